# SPDX-License-Identifier: Apache-2.0
"""A writer that leaves two of three chunks uncompressed."""

from __future__ import annotations

import itertools

from dmi_connector.store.write import writer
from dmi_connector.store.write.arrays.plain import Costs
from dmi_connector.store.write.pace import Pace


def main(argv: list[str]) -> int:
    """Entry point of the writer process."""
    turns = itertools.cycle([True, True, False])
    Costs.plain_next = lambda self: next(turns)  # type: ignore[method-assign]
    Pace.behind = property(lambda self: True)  # type: ignore[assignment]
    return writer.main(argv)
