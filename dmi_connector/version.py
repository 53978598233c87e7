# SPDX-License-Identifier: Apache-2.0
"""The version of the package. Lower layers import this module, because `dmi_connector/__init__.py` names upper ones."""

__version__ = "0.1.0"
