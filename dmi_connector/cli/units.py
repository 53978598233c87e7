# SPDX-License-Identifier: Apache-2.0
"""Parses sizes and times of the command line, such as 500M and 12h."""

from __future__ import annotations

import argparse
import re


def seconds(text: str) -> int:
    """Parse a time such as 3600, 90s, 90m, 12h or 7d as seconds. Raises ArgumentTypeError."""
    return _scaled(text, {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400})


def nbytes(text: str) -> int:
    """Parse a size such as 1000000, 500M or 2T as bytes. Prefixes are powers of 1000. Raises ArgumentTypeError."""
    return _scaled(text, {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12})


def _scaled(text: str, units: dict[str, int]) -> int:
    match = re.fullmatch(r"(\d{1,15})([a-zA-Z]?)", text, re.ASCII)
    if match is None or match[2] not in units:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid; give an integer, alone or followed by one of {', '.join(units)[2:]}"
        )
    return int(match[1]) * units[match[2]]
