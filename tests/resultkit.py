# SPDX-License-Identifier: Apache-2.0
"""Reads tables of the docs and files of benchmarks/results, for the tests that hold the one to the other."""

from __future__ import annotations

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def table(name: str, head: str) -> list[list[str]]:
    """The cells of each row of the table of a page whose first line begins with `head`."""
    rows = page(name).split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def same(shown: str, *values: float) -> None:
    """The numbers of a cell are these values, each rounded to as many digits as are shown."""
    texts = re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?", shown)
    assert texts == [rounded(value, text) for text, value in zip(texts, values, strict=True)], shown


def rounded(value: float, like: str) -> str:
    """`value` with as many decimals as `like`, halves up."""
    digits = Decimal(1).scaleb(-len(like.partition(".")[2]))
    return f"{Decimal(repr(float(value))).quantize(digits, ROUND_HALF_UP):,}"
