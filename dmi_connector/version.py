# SPDX-License-Identifier: Apache-2.0
"""The version of the package, in a module of its own: `dmi_connector/__init__.py` names modules of the upper layers."""

__version__ = "0.1.0"
