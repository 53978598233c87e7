# SPDX-License-Identifier: Apache-2.0
"""Tables of the results of `benchmarks.sustained`."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from benchmarks import common

QUICK_US = 80.0
"""A core with a lower `python_us` runs at full speed. Other guests of a machine may halve it for seconds."""


def base_of(setup: str) -> str:
    """The setup of stock that one is compared with."""
    return "stock pieces" if setup.endswith("pieces") else "stock"


def table(results: dict[str, Any]) -> str:
    """A row for each load and setup: medians over rounds, with the ratio to stock's in brackets."""
    engines = results["engines"]
    if any("start_s" in engine and "loads" not in engine for engine in engines.values()):
        rows = [[name, *(str(s) for s in engine["start_s"])] for name, engine in engines.items()]
        return common.markdown([["start, s", *(f"{i + 1}." for i in range(len(rows[0]) - 1))], *rows])
    times = ["first token p50, ms", "between tokens p99, ms"]
    lines = [["load", "setup", "tok/s", "with quick cores", *times, "GB/s", "keeps up", "stores"]]
    for load in dict.fromkeys(load for engine in engines.values() for load in engine["loads"]):
        for name, engine in engines.items():
            if load in engine["loads"]:
                base = engines.get(base_of(name), {}).get("loads", {}).get(load, [])
                lines.append([load, name, *_cells(engine["loads"][load], base)])
    failed = [f"{name} failed: {engine['failed']}" for name, engine in engines.items() if "failed" in engine]
    return "\n\n".join([common.markdown(lines), *failed])


def quick(runs: list[dict[str, Any]]) -> float | None:
    """Median tokens/s of the seconds that begin and end with a quick core; None if there are fewer than three."""
    found = []
    for run in runs:
        ends = pairwise(run["python_us"])
        rates = run.get("tok_per_s_between_looks", [])
        found += [rate for rate, us in zip(rates, ends, strict=False) if max(us) < QUICK_US]
    return statistics.median(found) if len(found) > 2 else None


def _cells(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[str]:
    def against(pick: Any, digits: int) -> str:
        mine, stock = [pick(one) for one in runs], [pick(one) for one in base]
        if None in mine:
            return ""
        text = f"{statistics.median(mine):,.{digits}f}"
        if not stock or base is runs or len(stock) != len(mine) or None in stock:
            return text
        return f"{text} ({statistics.median(a / b for a, b in zip(mine, stock, strict=True)):.3f})"

    last = runs[-1]
    slower = f"no: {last['sustained_tok_per_s']:,.0f} tok/s" if "sustained_tok_per_s" in last else "yes"
    checked = "" if "stores" not in last else f"{sum(one['stores'] for one in runs)}"
    if not all(one.get("verified", True) for one in runs):
        checked += ", NOT VERIFIED"
    return [
        against(lambda one: one["tok_per_s"], 0),
        _quick_cell(runs, base),
        against(lambda one: one["first_token_ms"].get("p50"), 1),
        against(lambda one: one["between_tokens_ms"].get("p99"), 1),
        f"{last['exported_GB_per_s']:.2f}" if last.get("exported_GB_per_s") else "",
        slower if "keeps_up" in last else "",
        checked,
    ]


def _quick_cell(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    mine, stock = quick(runs), quick(base)
    if mine is None:
        return ""
    return f"{mine:,.0f}" + (f" ({mine / stock:.3f})" if stock and base is not runs else "")


def merged(files: list[dict[str, Any]]) -> str:
    """A row for each load and setup: the ratios of all rounds to stock's round just before them, over all files."""
    tokens: dict[tuple[str, str], list[list[float]]] = {}
    p99: dict[tuple[str, str], list[float]] = {}
    for file in files:
        found: dict[tuple[str, str], list[float]] = {}
        for name, engine in file["engines"].items():
            for load, runs in engine["loads"].items():
                base = file["engines"].get(base_of(name), {}).get("loads", {}).get(load, [])
                for mine, stock in zip(runs, base if name != base_of(name) else [], strict=False):
                    found.setdefault((load, name), []).append(mine["tok_per_s"] / stock["tok_per_s"])
                    between = [run["between_tokens_ms"]["p99"] for run in (mine, stock)]
                    p99.setdefault((load, name), []).append(between[0] / between[1])
        for key, ratios in found.items():
            tokens.setdefault(key, []).append(ratios)
    lines = [["load", "setup", "tokens/s of stock, each round (`;` between machines)", "median", "p99, median"]]
    for (load, name), machines in sorted(tokens.items()):
        text = "; ".join(", ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in machines)
        middle = statistics.median(ratio for ratios in machines for ratio in ratios)
        lines.append([load, name, text, f"{middle:.3f}", f"{statistics.median(p99[load, name]):.2f}"])
    return common.markdown(lines)
