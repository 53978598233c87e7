# SPDX-License-Identifier: Apache-2.0
"""`dmi_connector.oracle`, what every hook must hold, under the name tests import it by."""

from __future__ import annotations

from dmi_connector.oracle import ONCE, Oracle, Point

__all__ = ["ONCE", "Oracle", "Point"]
