# SPDX-License-Identifier: Apache-2.0
"""Tables of the results of capture, sustained, data_parallel and bulk.

    python -m benchmarks.report A.json [B.json ...]
    python -m benchmarks.report benchmarks/results/gpu-bursts.json --runs h200-curves --plot docs/img/cost.svg

`--plot` draws the speed of each selection by its bytes per token, with a line for each case.

Files are results or summaries (`benchmarks.summary`). Ratios compare with stock in the same run. If engines ran
together, ratios compare with the rounds of stock in the same phase. If rounds alternated with those of stock, a ratio
is the median of the ratios of rounds.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.setups import CASES
from benchmarks.summary import base_of, runs

Results = dict[str, Any]
SLOW_BASE = "full null"
"""The setup without a sink. Setups with a slow sink are also compared with it."""
_MEDIANS = {"first token p50, median": "first_token_p50", "between tokens p99, median": "between_tokens_p99"}
"""{column of `busy_rounds`: figure of a summary}."""


def measured(results: Results, setup: str) -> dict[str, Any]:
    """{case: numbers} of one setup; {} if it was not measured."""
    for engine in results["engines"].values():
        if setup in engine["setups"]:
            return dict(engine["setups"][setup])
    return {}


def cell(results: Results, setup: str, case: str) -> str:
    """A cell of `table`: tokens per second, ratio to stock, and GB/s of setups with a sink."""
    got = measured(results, setup).get(case)
    if got is None:
        return ""
    if "not_run" in got:
        return f"not run: {got['not_run']}"
    parts = [f"{got['tok_per_s']:,.0f}"]
    stock = measured(results, "stock").get(case)
    if stock and setup != "stock":
        ratio = got.get("ratio", got["tok_per_s"] / got.get("stock_tok_per_s", stock["tok_per_s"]))
        parts.append(f"({ratio:.3f})")
    base = measured(results, SLOW_BASE).get(case)
    if base and " slow " in setup:
        parts.append(f"{got['tok_per_s'] / base['tok_per_s']:.3f} of {SLOW_BASE}")
    if "GB_per_s" in got:
        parts.append(f"{got['GB_per_s']:.1f} GB/s")
        link = results["limits"].get("link_d2h_GBps")
        parts += [f"= {got['GB_per_s'] / link:.0%} of link"] if link else []
    if got.get("missing_rows"):
        parts.append(f"{got['missing_rows']} of {got['rows']} rows missing")
    if got.get("verified") is False:
        parts.append("NOT VERIFIED")
    return " ".join(parts)


def table(files: dict[str, Results]) -> str:
    """A table with a line for each setup of each file, and a column for each case. files: {name: results}.

    Notes follow: missing and failed runs, commits and machines, and variation of the cores' speed.
    """
    setups = [(f, name, s) for f, r in files.items() for e in r["engines"].values() for name, s in e["setups"].items()]
    cases = [case for case in CASES if any(case in s for _, _, s in setups)]
    several = len(files) > 1
    lines = [[*(["file"] if several else []), "setup", *cases]]
    for file, name, _ in setups:
        lines.append([*([file] if several else []), name, *(cell(files[file], name, case) for case in cases)])
    notes = [
        f"{file}: {engine}: {word.replace('_', ' ')}: {found[word]}"
        for file, results in files.items()
        for engine, found in results["engines"].items()
        for word in ("not_run", "failed")
        if word in found
    ]
    notes += [line for file, results in files.items() for line in (_origin(file, results), _steadiness(file, results))]
    return "\n\n".join([common.markdown(lines), *filter(None, notes)])


def _origin(file: str, results: Results) -> str:
    """A note with commit and GPU of a file; "" for a file without a header."""
    if "header" not in results:
        return ""
    header = results["header"]
    return f"{file}: commit {header['commit'] or 'unknown'}, {header['machine']['gpu'] or 'no GPU'}"


def _steadiness(file: str, results: Results) -> str:
    """A note about how much the speed of the engines' cores varied; "" if it was not measured."""
    cases = [case for engine in results["engines"].values() for s in engine["setups"].values() for case in s.values()]
    times = sorted(us for case in cases for us in case.get("python_us", ()))
    if not times:
        return ""
    tenths = f"{times[len(times) // 10]:.0f}, {times[len(times) // 2]:.0f} and {times[len(times) * 9 // 10]:.0f} us"
    return f"{file}: a fixed piece of Python took {tenths} after rounds (10th percentile, median, 90th percentile)"


def points(files: dict[str, Results]) -> dict[str, list[tuple[float, float]]]:
    """{case: (MB per token, ratio to stock) of each selection whose rounds alternated with those of stock}."""
    found: dict[str, list[tuple[float, float]]] = {}
    for results in files.values():
        for engine in results["engines"].values():
            for cases in engine["setups"].values():
                for case, numbers in cases.items():
                    if "ratio" in numbers:
                        found.setdefault(case, []).append((engine["bytes_per_token"] / 1e6, numbers["ratio"]))
    return {case: sorted(found[case]) for case in CASES if case in found}


def plot(files: dict[str, Results], path: Path) -> None:
    """Draw `points` to an SVG file, in which text is stored as text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dmi", "font.size": 10})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for (case, found), marker in zip(points(files).items(), "os^Dv*Px" * 2, strict=False):
        work = "decode" if CASES[case].output_tokens > 1 else f"prompts of {CASES[case].prompt_tokens} tokens"
        axes.plot(*zip(*found, strict=True), marker, label=f"{work}, {CASES[case].requests} requests")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xlabel="MB per token", ylabel="speed, stock vLLM = 1", xlim=(0, None), ylim=(0, 1.05))
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# ---- sustained load --------------------------------------------------------------------------------------------------


def busy_table(results: dict[str, Any]) -> str:
    """A table of a result of `benchmarks.sustained`: a line for each load and setup.

    Cells are medians over the rounds, with the ratio to stock in brackets. For a result of --starts, cells are seconds
    of starts.
    """
    engines = results["engines"]
    if any("start_s" in engine and "loads" not in engine for engine in engines.values()):
        rows = [[name, *(str(s) for s in engine["start_s"])] for name, engine in engines.items()]
        return common.markdown([["start, s", *(f"{i + 1}." for i in range(len(rows[0]) - 1))], *rows])
    times = ["first token p50, ms", "between tokens p99, ms"]
    lines = [["load", "setup", "tok/s", *times, "GB/s", "keeps up", "stores"]]
    for load in dict.fromkeys(load for engine in engines.values() for load in engine["loads"]):
        for name, engine in engines.items():
            if load in engine["loads"]:
                base = engines.get(base_of(name), {}).get("loads", {}).get(load, [])
                lines.append([load, name, *_cells(engine["loads"][load], base)])
    failed = [f"{name} failed: {engine['failed']}" for name, engine in engines.items() if "failed" in engine]
    return "\n\n".join([common.markdown(lines), *failed])


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
        against(lambda one: one["first_token_ms"].get("p50"), 1),
        against(lambda one: one["between_tokens_ms"].get("p99"), 1),
        f"{last['exported_GB_per_s']:.2f}" if last.get("exported_GB_per_s") else "",
        slower if "keeps_up" in last else "",
        checked,
    ]


def busy_rounds(files: list[Results]) -> str:
    """A table with a line for each load and setup: ratios of all rounds to the round of stock just before.

    files: summaries of `benchmarks.sustained` on one or several machines.
    """
    found: dict[tuple[str, str], list[Results]] = {}
    for file in files:
        for name, engine in file.get("engines", {}).items():
            for load, rounds in engine.get("loads", {}).items():
                if "tok_per_s_of_stock" in rounds:
                    found.setdefault((load, name), []).append(rounds)
    lines = [["load", "setup", "tokens/s of stock, each round (`;` between machines)", "median", *_MEDIANS]]
    for (load, name), machines in sorted(found.items()):
        text = "; ".join(", ".join(_ratios(one)) for one in machines)
        lines.append([load, name, text, f"{_median(machines, 'tok_per_s'):.3f}"])
        lines[-1] += [f"{_median(machines, of):.2f}" for of in _MEDIANS.values()]
    return common.markdown(lines)


def _ratios(load: Results) -> list[str]:
    """The ratio to stock of each round, with its interval if it was measured in slices."""
    if "in_slices" in load:
        return ["{ratio:.3f} ({low:.3f} to {high:.3f})".format(**one) for one in load["in_slices"]]
    return [f"{ratio:.2f}" for ratio in load["tok_per_s_of_stock"]]


def _median(machines: list[Results], what: str) -> float:
    """The median ratio to stock of figure `what`, over the rounds of all machines."""
    return statistics.median(ratio for one in machines for ratio in one[f"{what}_of_stock"])


# ---- servers, and `dmi run` ------------------------------------------------------------------------------------------


def servers_table(run: Results) -> str:
    """A table of a summary of `benchmarks.data_parallel`, with a line for each server."""
    lines = [["server", "tokens/s", "by engine", "of stock", "per engine, of one engine", "stores, requests"]]
    servers = run["servers"]
    rate = {name: found["tok_per_s"] for name, found in servers.items()}
    for name, found in servers.items():
        kind, _, engines = name.partition(", ")
        count = int(engines.split()[0])
        by_engine = ", ".join(f"{speed:,.0f}" for speed in found["by_engine"].values())
        counts = f"{found['stores']:,}, {found['answered']:,}" if "stores" in found else ""
        of_one = f"{rate[name] / count / rate[f'{kind}, 1 engine']:.3f}"
        of_stock = f"{rate[name] / rate[f'stock, {engines}']:.3f}"
        lines.append([name, f"{rate[name]:,.0f}", by_engine, of_stock, of_one, counts])
    return common.markdown(lines)


def bulk_table(run: Results) -> str:
    """A table of a summary of `benchmarks.bulk`: median speeds of `LLM.generate` and `dmi run`, and their ratio."""
    lines = [["", "tokens/s", "ratio to LLM.generate", "rounds"]]
    titles = {"generate": "`LLM.generate`", "run": "`dmi run`"}
    ratio = run.get("ratio")
    shown = "{median:.3f} ({least:.3f} to {most:.3f})".format(**ratio) if ratio else ""
    for name, of in run["rounds"].items():
        lines.append([titles[name], f"{of['tok_per_s']:.0f}", "1" if name == "generate" else shown, str(of["rounds"])])
    return common.markdown(lines)


# ---- the program -----------------------------------------------------------------------------------------------------


def tables(files: dict[str, Results]) -> str:
    """All tables of runs. files: {name of a run: its summary}."""
    parts = []
    if bursts := {name: run for name, run in files.items() if _has(run, "setups")}:
        parts.append(table(bursts))
    if any(_has(run, "loads") for run in files.values()):
        parts.append(busy_rounds([*files.values()]))
    parts += [f"{name}\n\n{servers_table(run)}" for name, run in files.items() if "servers" in run]
    parts += [f"{name}\n\n{bulk_table(run)}" for name, run in files.items() if "run" in run.get("rounds", ())]
    return "\n\n".join(parts)


def _has(run: Results, what: str) -> bool:
    return any(what in engine for engine in run.get("engines", {}).values())


def main(argv: list[str] | None = None) -> int:
    p = common.parser("benchmarks.report", __doc__)
    p.add_argument("files", nargs="+", type=Path, metavar="RESULTS.json")
    p.add_argument("--runs", help="comma-separated names of runs in the files (default: all)")
    p.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw speeds by bytes per token, and print no table")
    args = p.parse_args(argv)
    files: dict[str, Results] = {}
    for path in args.files:
        for name, run in runs(path).items():
            files[f"{path}: {name}" if name in files else name] = run
    if args.runs:
        if lacking := set(args.runs.split(",")) - set(files):
            p.error(f"--runs: the files have no {', '.join(sorted(lacking))}")
        files = {name: files[name] for name in args.runs.split(",")}
    if args.plot:
        plot({name: run for name, run in files.items() if _has(run, "setups")}, args.plot)
    else:
        print(tables(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
