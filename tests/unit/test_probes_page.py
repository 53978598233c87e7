# SPDX-License-Identifier: Apache-2.0
"""docs/PROBES.md and the log: the costs of probes are in benchmarks/results/gpu-busy.json."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/PROBES.md").read_text().split("## Cost")[1].split("\n## ")[0]
LOG = (ROOT / "docs/ENGINEERING.md").read_text()
RUNS = json.loads((ROOT / "benchmarks/results/gpu-busy.json").read_text())["runs"]
SETUPS = ("probe one", "probe layers", "probe latents", "probe keep")


def rounds(run: str, setup: str, load: str) -> list[float]:
    found: list[float] = RUNS[run]["engines"][setup]["loads"][load]["tok_per_s"]
    return found


def shares(mine: list[float], base: list[float]) -> str:
    return ", ".join(f"{a / b:.2f}" for a, b in zip(mine, base, strict=True))


def test_the_table_has_the_figures_of_the_runs() -> None:
    lines = [[cell.strip() for cell in line.split("|")[2:5]] for line in SECTION.splitlines() if line.startswith("| ")]
    for cells, setup in zip(lines[1:], SETUPS, strict=True):
        (slices,) = RUNS["h200-slices-probes"]["engines"][setup]["loads"]["mixed64"]["in_slices"]
        ratio, low, high = (f"{slices[name]:.2f}" for name in ("ratio", "low", "high"))
        captured, not_captured = (rounds("h200-probes-6", setup, load) for load in ("short64", "uncaptured64"))
        assert cells == [ratio, f"{low} to {high}", shares(captured, not_captured)], setup
    (stock,) = rounds("h200-slices-probes", "stock", "mixed64")
    assert f"(stock) ran at {stock:,.0f} tokens/s" in " ".join(SECTION.split())


def test_the_log_has_the_speeds_of_the_earlier_run() -> None:
    before = shares(*(rounds("h200-probes-5", setup, "short64") for setup in ("probe one", "stock")))
    assert f"scores in responses: {before} (`h200-probes-5`)" in LOG
