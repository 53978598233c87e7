# SPDX-License-Identifier: Apache-2.0
"""Summaries of results without raw rounds, for the pages that cite them.

    python -m benchmarks.summary --out benchmarks/results/gpu-bursts.json one.json another.json
    python -m benchmarks.summary --out benchmarks/results/gpu-busy.json one.json --only 'stock,hidden-states zstd'

A summary has a run for each result file, named like the file. A run has the header of the result (machine, versions,
commit, command), medians, minima, maxima, and the number of rounds. For `benchmarks.sustained`, it has the ratios of
all rounds. Runs in OUT with other names are kept. `benchmarks.report` prints tables of summaries.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.drafts import METHODS

Found = dict[str, Any]
_PROGRAMS = "capture, sustained, data_parallel, bulk, reading, fidelity, check_gpu or check_experts"
_HEADER = ("commit", "clean", "commit_note", "note", "command", "machine", "versions", "gpu")
_CASE = ("requests", "prompt_tokens", "output_tokens", "tok_per_s", "stock_tok_per_s", "ratio", "GB_per_s",
         "exported_GB", "stores", "stored_GB", "rows", "missing_rows", "verified", "not_run")  # fmt: skip
_ENGINE = ("start_s", "hooks", "reduce", "bytes_per_token", "owner", "cudagraph_mode", "not_run", "failed")
_CHECK = ("same_tokens_as_stock", "greedy_same", "seeded_same", "largest_tie", "beyond_tie", "unexplained", "requests",
          "rows", "rows_missing", "problems", "experts", "top_k_gap", "attention_error", "stores", "choices",
          "differing", "drafts_of", "drafts")  # fmt: skip


def base_of(setup: str) -> str:
    """The stock setup that a setup of `benchmarks.sustained` is compared with. setup: a name, or `NAME:LABEL`."""
    name = setup.split(":")[0]
    return next((f"stock {last}" for last in ("pieces", *METHODS) if name.endswith(f" {last}")), "stock")


def summarise(raw: Found) -> Found:
    """The summary of one result. raw: content of the result file. Raises ValueError for an unknown kind of result."""
    if "of_limit" in raw or "of_before" in raw:  # `benchmarks.reading` writes summaries itself
        return raw
    header = {"header": raw.get("header") or _pick(raw, _HEADER)}
    if "trained" in raw:
        kept = {name: found for name, found in raw.items() if name not in ("header", *_HEADER)}
        return header | kept | {name: _fidelity(raw[name]) for name in ("trained", "random") if name in raw}
    engines: Found = raw.get("engines", {})
    if any("setups" in engine for engine in engines.values()):
        limits = {name: round(value, 4) for name, value in raw.get("limits", {}).items()}
        return {**header, "limits": limits, "engines": {name: _bursts(engine) for name, engine in engines.items()}}
    if any("loads" in engine for engine in engines.values()):
        return {**header, "engines": {name: _busy(name, engines) for name in engines}}
    if "servers" in raw:
        return {**header, "servers": {name: _rounds(runs) for name, runs in raw["servers"].items()}}
    if "rounds" in raw:
        found = {"settings": raw["settings"], "rounds": {name: _rounds(runs) for name, runs in raw["rounds"].items()}}
        ratio = {"ratio": {"median": raw["ratio"], **_spread(raw["ratios"])}} if "ratio" in raw else {}
        return {**header, **found, **ratio}
    if checks := _checks(raw):
        return {**header, **checks}
    raise ValueError(f"not a result of {_PROGRAMS}")


def _pick(found: Found, names: Iterable[str]) -> Found:
    return {name: found[name] for name in names if name in found}


def _spread(values: list[float]) -> Found:
    return {"rounds": len(values), "least": min(values), "most": max(values)}


# ---- one function for each kind of result --------------------------------------------------------------------------


def _bursts(engine: Found) -> Found:
    """Summarise an engine of `benchmarks.capture`, without profiles."""

    def case(found: Found) -> Found:
        kept = _pick(found, _CASE)
        for name in ("tok_per_s", "ratio", "GB_per_s", "exported_GB", "stored_GB"):
            if name in kept:
                kept[name] = round(kept[name], 6)
        return kept | (_spread(found["runs"]) if "runs" in found else {})

    setups = {
        name: {what: case(found) for what, found in cases.items() if not what.startswith("profile")}
        for name, cases in engine["setups"].items()
    }
    return {**_pick(engine, _ENGINE), "setups": setups}


def _busy(name: str, engines: Found) -> Found:
    """Summarise an engine of `benchmarks.sustained`: for each load, the rounds and their ratios to stock."""
    base = {} if name == base_of(name) else engines.get(base_of(name), {}).get("loads", {})
    loads = {load: _load(runs, base.get(load, [])) for load, runs in engines[name].get("loads", {}).items()}
    return {**_pick(engines[name], _ENGINE), "loads": loads}


def _load(runs: list[Found], base: list[Found]) -> Found:
    """Summarise the rounds of a load. Lists have an entry per round. base: the rounds of stock just before them."""
    figures: dict[str, Callable[[Found], float]] = {
        "tok_per_s": lambda one: one["tok_per_s"],
        "sustained_tok_per_s": lambda one: float(one.get("sustained_tok_per_s") or one["tok_per_s"]),
        "first_token_p50": lambda one: one["first_token_ms"]["p50"],
        "between_tokens_p50": lambda one: one["between_tokens_ms"]["p50"],
        "between_tokens_p99": lambda one: one["between_tokens_ms"]["p99"],
    }
    found: Found = {"rounds": len(runs)}
    if not any("sustained_tok_per_s" in one for one in runs):
        del figures["sustained_tok_per_s"]
    for name, figure in figures.items():
        mine, stock = ([figure(one) for one in some] for some in (runs, base))
        ratios = [round(a / b, 6) for a, b in zip(mine, stock, strict=False)]
        found[name if name.endswith("per_s") else f"{name}_ms"] = mine
        if ratios:
            found |= {f"{name}_of_stock": ratios, f"{name}_of_stock_median": round(statistics.median(ratios), 6)}
    if "of_stock" in runs[0]:
        found["in_slices"] = [{name: round(value, 6) for name, value in one["of_stock"].items()} for one in runs]
    for name in ("exported_GB_per_s", "waiting_grows_GB_per_s", "writers_cores"):
        if name in runs[0]:
            found[name] = [one[name] for one in runs]
    if "stores" in runs[0]:
        found |= {name: sum(one.get(name) or 0 for one in runs) for name in ("stores", "vanished", "lost_rows")}
        found["verified"] = all(one["verified"] for one in runs)
    return found


def _rounds(runs: list[Found]) -> Found:
    """Summarise rounds of a server (`benchmarks.data_parallel`), or of a setup of `benchmarks.bulk`."""
    speeds = [one["tok_per_s"] for one in runs]
    sums: Found = {
        name: round(sum(one[name] for one in runs), 3)
        for name in ("seconds", "tokens", "answered", "stores", "vanished", "stored_GB")
        if name in runs[0]
    }
    whole = {"verified": all(one["verified"] for one in runs)} if "verified" in runs[0] else {}
    engines = {"by_engine": runs[-1]["by_engine"]} if "by_engine" in runs[0] else {}
    return {"tok_per_s": round(statistics.median(speeds), 1), **_spread(speeds), **engines, **sums, **whole}


def _fidelity(found: list[Found]) -> list[Found]:
    """Summarise results of `benchmarks.fidelity`, without sizes and errors, which no page shows."""
    rows = [_pick(row, ("hook", "layer", "reduction", "width")) for row in found]
    measures = [{name: value for name, value in row["measures"].items() if name != "error"} for row in found]
    return [{**row, "measures": of} for row, of in zip(rows, measures, strict=True)]


def _checks(raw: Found) -> Found:
    """Summarise the engines of check_gpu and check_experts. A file may have several checks, by name."""
    found: Found = {}
    for name, part in raw.items():
        if isinstance(part, dict) and ("steps" in part or "choices" in part):
            found[name] = _check(part)
        elif isinstance(part, dict) and name != "header" and (inner := _checks(part)):
            found[name] = {**_pick(part, ("command",)), **inner}
    return found


def _check(engine: Found) -> Found:
    """Summarise the check of one engine. Of errors by hook, the largest is kept, as [error, hook]."""
    found = _pick(engine.get("facts", {}), ("v2_model_runner", "cudagraph_mode")) | _pick(engine, _CHECK)
    if steps := engine.get("steps"):
        if engine.get("drafts_of"):
            found |= _pick(steps, ("draft_tokens", "largest_decode_step"))
        else:
            as_stock = steps["scheduled_tokens"] == steps["expected_tokens"] and not steps["draft_tokens"]
            found["steps_as_stock"] = as_stock
    for name, worst in (("least_cosine", min), ("rows_below", max), ("largest_relative_error", max)):
        if of_hook := engine.get(name):
            hook = worst(of_hook, key=lambda one: of_hook[one])
            found[name] = [round(of_hook[hook], 6), hook]
    return found


# ---- files -------------------------------------------------------------------------------------------------------


def runs(path: Path) -> dict[str, Found]:
    """{name: run} of a summary file, or of one result file, whose run is named like the file."""
    found: Found = json.loads(path.read_text())
    return found["runs"] if "runs" in found else {path.stem: summarise(found)}


def main(argv: list[str] | None = None) -> int:
    p = common.parser("benchmarks.summary", __doc__)
    p.add_argument("files", nargs="+", type=Path, metavar="RESULTS.json")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="comma-separated engines to keep (default: all)")
    args = p.parse_args(argv)
    only = args.only.split(",") if args.only else None
    found: Found = {"runs": {}}
    for path in [*filter(Path.exists, [args.out]), *args.files]:
        try:
            taken = runs(path)
        except ValueError as error:
            p.error(f"{path.name}: {error}")
        if only and path != args.out:
            for run in (run for run in taken.values() if "engines" in run):
                run["engines"] = {name: engine for name, engine in run["engines"].items() if name in only}
        found["runs"] |= taken
    common.save(args.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
