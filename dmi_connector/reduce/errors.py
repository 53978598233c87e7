# SPDX-License-Identifier: Apache-2.0
"""Defines the error that reductions raise."""

from __future__ import annotations

import re

_SKETCH = re.compile(r"\s*fd\s*(\(|$)")


class ReduceError(ValueError):
    """Raised for a reduction that does not exist or does not fit its hook. The message names the option and the fix."""


def refuse_sketch(spec: str) -> None:
    """Raise ReduceError for Frequent Directions, "fd(64)", which sketches many rows together and encodes none."""
    if _SKETCH.match(spec):
        raise ReduceError(
            f"reduce: {spec!r} is not a reduction: Frequent Directions makes one sketch of all rows of a capture; leave"
            " it out, and run dmi sketch on the stores, also while they are written"
        )
