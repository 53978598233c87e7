# SPDX-License-Identifier: Apache-2.0
"""docs/PROBES.md: what probes cost is what benchmarks/results/gpu-busy.json has."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/PROBES.md").read_text().split("## What they cost")[1].split("\n## ")[0]
RUNS = json.loads((ROOT / "benchmarks/results/gpu-busy.json").read_text())["runs"]
SETUPS = ("probe latents", "probe one", "probe layers", "probe keep")


def shares(run: str, setup: str, load: str, first: int = 0) -> str:
    """Of stock's speed, each round from `first` on."""
    return ", ".join(f"{share:.2f}" for share in loads(run, setup, load)["tok_per_s_of_stock"][first:])


def loads(run: str, setup: str, load: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = RUNS[run]["engines"][setup]["loads"][load]
    return found


def test_the_table_has_the_rounds_of_the_run() -> None:
    rows = [line.strip("|").split("|")[1].strip() for line in SECTION.splitlines() if line.startswith("| ")][1:]
    assert rows == [shares("h200-probes-5", setup, "short64") for setup in SETUPS]
    *first, last = (f"{speed:,.0f}" for speed in loads("h200-probes-5", "stock", "short64")["tok_per_s"])
    assert f"{', '.join(first)} and {last} tokens/s" in SECTION


def test_what_was_before_is_that_of_the_runs_before() -> None:
    at_64, at_128, at_32 = (shares("h200-probes", "probe one", f"short{n}", n == 64) for n in (64, 128, 32))
    told = f"one probe ran at {at_64} with 64, {at_128} with 128, {at_32} with 32".replace(", 0.66", " and 0.66")
    assert told.replace(", 1.09", " and 1.09") in " ".join(SECTION.split())
    assert f"({shares('h200-probes', 'probe one', 'short64').split(',')[0]})" in SECTION
    late = [shares("h200-probes-late", setup, "short64") for setup in SETUPS]
    told = "{} in the first row, {} in the second, {} in the third and {} in the last"
    assert told.format(*late) in " ".join(SECTION.split())
