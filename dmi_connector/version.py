# SPDX-License-Identifier: Apache-2.0
"""The version of the package. Every room may import this module; `dmi_connector/__init__.py` names upper rooms."""

__version__ = "0.1.0"
