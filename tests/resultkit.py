# SPDX-License-Identifier: Apache-2.0
"""Reads tables of the docs and files of benchmarks/results, for tests that compare them."""

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
    """The cells of each row of a table of a page. `head`: how the first line of the table begins."""
    rows = page(name).split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def same(shown: str, *values: float) -> None:
    """Whether the numbers of a cell equal these values, each rounded to the digits that are shown."""
    texts = re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?", shown)
    assert texts == [rounded(value, text) for text, value in zip(texts, values, strict=True)], shown


def rounded(value: float, like: str) -> str:
    """`value` with as many decimals as `like`, rounded half up."""
    digits = Decimal(1).scaleb(-len(like.partition(".")[2]))
    return f"{Decimal(repr(float(value))).quantize(digits, ROUND_HALF_UP):,}"
