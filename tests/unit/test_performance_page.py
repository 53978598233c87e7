# SPDX-License-Identifier: Apache-2.0
"""Speeds in docs/MEASUREMENTS.md, PERFORMANCE.md and FROM_VLLM.md: each is in benchmarks/results, rounded as shown."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import report
from tests.resultkit import RESULTS, ROOT, page, results, same, table

BUSY = results("gpu-busy.json")["runs"]
RANKS = results("gpu-ranks.json")["runs"]
BURSTS = results("gpu-bursts.json")["runs"]
FIRST, SECOND, SLOW, HALVES, WITHOUT = (
    f"h200-sustained{name}" for name in ("-reports", "", "-slow-cores", "-halves", "-without")
)
LONG, WIDE = "h200-sustained-long", "h200-sustained-256"
ZSTD, DRAFT, NARROW, ALWAYS = (
    "hidden-states zstd",
    "hidden-states zstd draft",
    "narrow zstd",
    "hidden-states zstd without plain",
)


def rounds(runs: dict[str, Any], setup: str, load: str, names: list[str]) -> list[dict[str, Any]]:
    return [runs[name]["engines"][setup]["loads"][load] for name in names]


def ratios(found: list[dict[str, Any]], what: str = "tok_per_s") -> list[float]:
    return [ratio for one in found for ratio in one[f"{what}_of_stock"]]


@pytest.mark.parametrize(
    ("row", "setup", "names"),
    [
        (1, ZSTD, [FIRST, SECOND, SLOW, HALVES, WITHOUT]),
        (2, DRAFT, [HALVES]),
        (3, NARROW, [SECOND, SLOW, HALVES]),
        (4, "full null", ["h200-sustained-full"]),
        (5, "int8 lz4", ["h200-sustained-int8"]),
    ],
)
def test_a_busy_engine_with_64_requests(row: int, setup: str, names: list[str]) -> None:
    _, size, shown, middle, p99 = table("MEASUREMENTS.md", "| 64 in flight")[row]
    found = rounds(BUSY, setup, "short64", names)
    assert [len(part.split(",")) for part in shown.split(";")] == [one["rounds"] for one in found]
    same(shown, *ratios(found))
    same(middle, median(ratios(found)))
    same(p99, median(ratios(found, "between_tokens_p99")))
    same(size, BUSY[names[0]]["engines"][setup]["bytes_per_token"] / 1e6)
    assert all(one.get("verified", True) and not one.get("lost_rows") for one in found)


def test_stock_beside_it() -> None:
    _, _, speeds, _, p99 = table("MEASUREMENTS.md", "| 64 in flight")[0]
    engines = [run["engines"] for name, run in BUSY.items() if "h200-s" in name]
    found = [one["stock"]["loads"].get("short64", {}) for one in engines if "stock" in one]
    p99s = [one for run in found for one in run.get("between_tokens_p99_ms", [])]
    fast = [median(run["tok_per_s"]) for run in found if run]
    same(p99, *(median(some) for some in ([min(p99s)], [max(p99s)])))
    low, high = (float(number.replace(",", "")) for number in speeds.split(" to "))
    assert low <= min(fast) and max(fast) <= high


@pytest.mark.parametrize(
    ("row", "setup", "load", "names"),
    [
        (0, ZSTD, "short256", [SECOND, LONG, SLOW, WIDE]),
        (1, DRAFT, "short256", [WIDE]),
        (2, NARROW, "short256", ["h200-sustained-narrow-256"]),
        (3, ZSTD, "long16", [LONG, SLOW]),
        (4, ALWAYS, "long16", [LONG]),
        (5, ZSTD, "cached64", [LONG, SLOW]),
        (6, ALWAYS, "cached64", [LONG]),
    ],
)
def test_a_busy_engine_under_other_loads(row: int, setup: str, load: str, names: list[str]) -> None:
    _, shown, first, p99 = table("MEASUREMENTS.md", "| `hidden-states`, `zstd` stores | tokens/s, each round")[row]
    found = rounds(BUSY, setup, load, names)
    same(shown, *ratios(found))
    same(first, median(ratios(found, "first_token_p50")))
    same(p99, median(ratios(found, "between_tokens_p99")))


POOL, NULL = f"{ZSTD} pool", "hidden-states null"
OTHERS = {
    "| in flight | GPU, cores |": [
        ("h100-vllm-0.33", ZSTD, "short64", "stock"),
        ("h100-vllm-0.33", ZSTD, "short256", "stock"),
        ("h100-busy", ZSTD, "short64", "stock"),
        ("h100-pool", ZSTD, "short64", "stock"),
        ("h200-pool-target", ZSTD, "short64", "stock"),
        ("h200-32-cores", ZSTD, "short256", "stock"),
    ],
    "| draft tokens | capture |": [
        ("h100-busy-drafts", f"{ZSTD} eagle3", "short64", "stock eagle3"),
        ("h200-busy-drafts", f"{ZSTD} eagle3", "short64", "stock eagle3"),
        ("h200-pool-target", f"{ZSTD} eagle3", "short64", "stock eagle3"),
        ("h200-busy-drafts-slow-cores", f"{ZSTD} eagle3", "short64", "stock eagle3"),
        ("h200-drafts-writers", f"{ZSTD} eagle3", "short64", "stock eagle3"),
    ],
    "| model and requests | in flight |": [
        ("h100-pool", POOL, "short64", "stock"),
        ("h200-pool-target", POOL, "short64", "stock"),
        ("h100-pool", POOL, "short256", "stock"),
        ("h200-pool", POOL, "short256", "stock"),
        ("h200-pool-256", POOL, "short256", "stock"),
        ("h200-pool-target", POOL, "short256", "stock"),
        ("h200-probes-6", POOL, "uncaptured64", "stock"),
        ("h200-probes-6", POOL, "uncaptured-prompts16", "stock"),
        ("h200-encodings-rp", POOL, "uncaptured64", "stock"),
        ("h200-pool-shared", POOL, "cached64", "stock"),
        ("h200-pool-long", POOL, "reasoning128", "stock"),
        ("h200-pool-long128", POOL, "long128", "stock"),
    ],
}
"""{head of a table: (run, setup, load, setup of stock) of each row}."""


@pytest.mark.parametrize("head", OTHERS)
def test_other_engines_and_machines(head: str) -> None:
    for row, (run, setup, load, stock) in zip(table("MEASUREMENTS.md", head), OTHERS[head], strict=True):
        header, engines = BUSY[run]["header"], BUSY[run]["engines"]
        *_, machine, seconds, speeds, shown, named = row
        assert named == f"`{run}`" and header["versions"]["vllm"] == "0.33.0"
        gpu, cores = machine.split(", ")
        assert f"NVIDIA {gpu}" in header["machine"]["gpu"] and int(cores) == header["machine"]["cpu_cores"], row
        assert re.search(rf"(--seconds |WINDOW=){seconds}\b", header["command"]), row
        count = re.findall(r"\d+$", load)[0]
        assert count in (row[0], row[1]) or head.startswith("| draft"), row
        found, theirs = engines[setup]["loads"][load], engines[stock]["loads"]
        own = theirs.get({"uncaptured64": "short64"}.get(load, load), {}).get("tok_per_s", [])
        if speeds:
            same(speeds, *([min(own), max(own)] if " to " in speeds else [median(own)]))
        captured = zip(found["tok_per_s"], own, strict=False)
        same(shown, *([a / b for a, b in captured] if load == "uncaptured64" else ratios([found])))
        assert found.get("verified", True) and not found.get("lost_rows"), row


SLICES = [
    ("h200-slices-parts", f"{NULL} ngram"),
    ("h200-slices-parts", "hidden-states host ngram"),
    ("h200-slices-parts", f"{ZSTD} ngram"),
    ("h200-slices-codecs", f"{ZSTD} ngram"),
    ("h200-slices-codecs", f"{ZSTD} ngram:w8"),
    ("h200-slices-codecs", "hidden-states none ngram"),
    ("h200-slices", f"{ZSTD} ngram"),
    ("h200-slices-mixed", "hidden-states host ngram"),
    ("h200-slices-mixed", f"{ZSTD} ngram"),
    ("h200-slices-pool", POOL),
    ("h200-slices-pool", f"{POOL}:w8"),
    ("h200-slices", POOL),
    ("h200-slices-mixed-pool", POOL),
    ("h200-slices-qwen3.5", f"{NULL} pool"),
    ("h200-slices-qwen3.5", POOL),
    ("h200-slices-nemotron-h", f"{NULL} pool"),
    ("h200-slices-nemotron-h", POOL),
    ("h200-slices-decode-qwen3.5", POOL),
    ("h200-slices-decode-qwen3.5-2", f"{NULL} pool"),
    ("h200-slices-decode-qwen3.5-2", POOL),
    ("h200-slices-decode-qwen3.5-3", f"{NULL} pool"),
    ("h200-slices-decode-qwen3.5-3", f"{POOL}:w3"),
    ("h200-slices-decode-nemotron-h", POOL),
]
"""(run, setup) of each row of the table of engines that ran in slices."""


@pytest.mark.parametrize("row", range(len(SLICES)))
def test_engines_that_ran_in_slices(row: int) -> None:
    rows = table("MEASUREMENTS.md", "| requests | capture | ratio to stock | 95 % interval |")
    assert len(rows) == len(SLICES)
    _, capture, shown, intervals, cores, rate, named = rows[row]
    run, setup = SLICES[row]
    (found,) = BUSY[run]["engines"][setup]["loads"].values()
    assert named == f"`{run}`" and "--slice 1" in BUSY[run]["header"]["command"]
    assert re.findall(r"(\d) `writers`", capture) == re.findall(r":w(\d)", setup)
    same(shown, *(one["ratio"] for one in found["in_slices"]))
    same(intervals, *(one[bound] for one in found["in_slices"] for bound in ("low", "high")))
    same(cores, *found.get("writers_cores", []))
    same(rate, *(one for one in found["exported_GB_per_s"] if one))
    assert found.get("verified", True) and not found.get("lost_rows")


EAGLE3 = ["h200-busy-drafts", "h200-pool-target", "h200-busy-drafts-slow-cores", "h200-drafts-writers"]
SLICED = [f"h200-slices{name}" for name in ("", "-parts", "-codecs", "-pool", "-mixed", "-mixed-pool")]
POOLS = ["h200-pool", "h200-pool-256", "h200-pool-target"]
QWEN = [f"h200-slices{name}" for name in ("-qwen3.5", *(f"-decode-qwen3.5{more}" for more in ("", "-2", "-3")))]
EXPECTED = {
    "| load, with `hidden-states` and `zstd` stores |": [
        (BUSY, ZSTD, ["short64"], [FIRST, SECOND, SLOW, HALVES, WITHOUT, "h200-pool-target"]),
        (BUSY, ZSTD, ["short256"], [SECOND, LONG, SLOW, WIDE, "h200-32-cores"]),
        (BUSY, POOL, ["short256", "mixed256"], [*POOLS, *SLICED]),
        (BUSY, ZSTD, ["long16"], [LONG, SLOW]),
        (BUSY, ZSTD, ["cached64"], [LONG, SLOW]),
        (BUSY, POOL, ["cached64"], ["h200-pool-shared"]),
        (BUSY, POOL, ["long128"], ["h200-pool-long128"]),
        (BUSY, POOL, ["reasoning128"], ["h200-pool-long"]),
        (BUSY, f"{ZSTD} eagle3", ["short64"], EAGLE3),
        (BUSY, f"{ZSTD} ngram", ["short64", "mixed64"], SLICED),
        (BUSY, POOL, ["mixed64", "decode64"], QWEN),
        (BUSY, POOL, ["mixed64", "decode64"], ["h200-slices-nemotron-h", "h200-slices-decode-nemotron-h"]),
        (RANKS, ZSTD, ["short64"], ["h200-two-stores-again", "h200-two-stores"]),
        (RANKS, ZSTD, ["short64"], ["h200-four-sustained"]),
        (RANKS, DRAFT, ["short64"], ["h200-two-32b-draft"]),
        (RANKS, ZSTD, ["short64"], ["h200-four-70b"]),
    ],
    "| capture, with 64 in flight |": [
        (BUSY, NARROW, ["short64"], [SECOND, SLOW, HALVES]),
        (BUSY, "int8 lz4", ["short64"], ["h200-sustained-int8"]),
        (BUSY, "probe one", ["short64", "mixed64"], ["h200-probes-6", "h200-slices-probes"]),
        (BUSY, "probe keep", ["short64", "mixed64"], ["h200-probes-6", "h200-slices-probes"]),
    ],
}
"""{head of a table in PERFORMANCE.md: (runs, setup, loads, names of runs) of each row}."""


@pytest.mark.parametrize("head", EXPECTED)
def test_speeds_to_expect(head: str) -> None:
    for row, (runs, setup, names_of_loads, names) in zip(table("PERFORMANCE.md", head), EXPECTED[head], strict=True):
        what, speed, slowest, fastest, count, *writers = row
        engines = [runs[name]["engines"] for name in names if setup in runs[name]["engines"]]
        loads = [found[setup]["loads"] for found in engines]
        found = [one[load] for one in loads for load in names_of_loads if load in one]
        values = [part["ratio"] for one in found for part in one.get("in_slices", ())]
        values += ratios([one for one in found if "in_slices" not in one])
        assert int(count) == len(values), row
        assert "| load" not in head or re.findall(r"\d+$", names_of_loads[0])[0] in what, row
        same(speed, median(values))
        same(f"{slowest} {fastest}", *([min(values), max(values)] if len(values) > 1 else []))
        if writers:
            sustained = [ratio for one in found for ratio in one.get("sustained_tok_per_s_of_stock", ())]
            same(writers[0], *([median(sustained)] if sustained else []))


def test_latency_to_expect() -> None:
    rows = table("MEASUREMENTS.md", "| 64 in flight, prompts of 128 tokens, 384 generated | MB per token |")[1:2]
    rows += [
        row for row in table("MEASUREMENTS.md", "| `hidden-states`, `zstd` stores | tokens/s") if row[0][0].isdigit()
    ]
    rows = [row for row in rows if "capture of" not in row[0]]
    firsts, betweens = [float(row[2]) for row in rows[1:]], [float(row[-1]) for row in rows]
    said = page("PERFORMANCE.md").split("- **Latency**")[1].split("\n- ")[0]
    same(" ".join(re.findall(r"\d\.\d\d", said)), min(firsts), max(firsts), min(betweens), max(betweens), max(betweens))
    assert rows[betweens.index(max(betweens))][0].endswith("cached")


def test_the_readme_has_the_speeds_to_expect() -> None:
    rows = table("PERFORMANCE.md", "| load, with `hidden-states` and `zstd` stores |")
    one_gpu, drafts = rows[:3], [row for row in rows if "drafts" in row[0]]
    said = " ".join((ROOT / "README.md").read_text().split()).split("shapes has ")[1].split("[Compatibility]")[0]
    speeds = [f"{pick(row[1] for row in some)}" for some in (one_gpu, drafts) for pick in (min, max)]
    sustained = [row[5] for row in (*one_gpu, *drafts) if row[5]]
    assert re.findall(r"0\.\d\d", said) == [*speeds, min(sustained), max(sustained)]


def test_speeds_to_expect_of_bursts() -> None:
    cases = report.measured(BURSTS["h200-overhead"], "hidden-states disk")
    said = page("PERFORMANCE.md").split("the speed of decode with")[1].split("*full surface*")[0]
    same(" ".join(re.findall(r"\d\.\d\d", said)), cases["decode32"]["ratio"], cases["prefill32"]["ratio"])


def test_drafts_with_slow_cores_could_be_written_at() -> None:
    found = BUSY["h200-busy-drafts-slow-cores"]["engines"][f"{ZSTD} eagle3"]["loads"]["short64"]
    said = re.findall(r"keep up with (0\.\d\d) of stock", page("MEASUREMENTS.md"))
    same(said[0], found["sustained_tok_per_s_of_stock_median"])


def test_speeds_with_which_writers_that_fell_behind_could_keep_up() -> None:
    text = " ".join(page("MEASUREMENTS.md").split())

    def kept_up(runs: dict[str, Any], run: str, *setups: str, load: str = "short64") -> list[float]:
        return ratios([runs[run]["engines"][setup]["loads"][load] for setup in setups], "sustained_tok_per_s")

    large = kept_up(BUSY, "h200-32-cores", ZSTD, load="short256")
    same(text.split("The writers fell behind: ")[1].split(" of stock")[0], min(large), max(large))
    run = "h200-drafts-writers"
    eagle3 = kept_up(BUSY, run, f"{ZSTD} eagle3")
    same(text.split(f"In `{run}` ")[1].split(". ")[0], min(eagle3), max(eagle3))
    answers = RANKS["h200-two-answers"]["engines"][DRAFT]["loads"]["short64"]
    said = text.split("`h200-two-answers`: the table")[1].split("The engine ran at ")[1].split(". ")[0]
    same(said, *ratios([answers]))


def test_number_of_speeds_that_are_not_sustained() -> None:
    loads = [load for runs in (BUSY, RANKS) for load in engine_loads(runs)]
    what = "tok_per_s_of_stock_median"
    behind = [one[what] - one[f"sustained_{what}"] for one in loads if f"sustained_{what}" in one]
    few, many = sum(0.01 < lost <= 0.05 for lost in behind), sum(lost > 0.05 for lost in behind)
    said = " ".join(page("MEASUREMENTS.md").split())
    assert f"In {few + many} of the {len(loads)} measurements in `gpu-busy.json` and `gpu-ranks.json`" in said
    assert f"by 0.01 to 0.05 of stock in {few} of them, by more in {many}." in said


def engine_loads(found: Any) -> list[dict[str, Any]]:
    """Every measurement of an engine under a load."""
    if not isinstance(found, dict):
        return []
    own = [found] if isinstance(found.get("tok_per_s"), list) else []
    return own + [load for value in found.values() for load in engine_loads(value)]


def test_notes_on_rows_in_a_pool() -> None:
    text = page("MEASUREMENTS.md").split("### Rows in a pool")[1].split("\n## ")[0]
    shared, long = (BUSY[f"h200-pool-{name}"]["engines"][POOL]["loads"] for name in ("shared", "long128"))
    said = re.findall(r"keep up with (.*) of stock", text)[0]
    same(said, *ratios([shared["cached64"]], "sustained_tok_per_s"))
    same(re.findall(r"wrote ([\d.]+) GB/s", text)[0], *long["long128"]["exported_GB_per_s"])
    hybrids = [BUSY[f"h200-slices-{name}"]["engines"]["stock"] for name in ("qwen3.5", "nemotron-h")]
    p99s = [p99 for stock in hybrids for p99 in stock["loads"]["mixed64"]["between_tokens_p99_ms"]]
    same(re.findall(r"p99 of (\d+ to \d+)", text)[0], min(p99s), max(p99s))


def test_means_of_a_hybrid_in_slices() -> None:
    text = page("MEASUREMENTS.md").split("With Qwen3.5, rows that stay")[1].split(": means")[0]
    engines = [engine for run in QWEN for engine in BUSY[run]["engines"].items()]
    for said, setup in zip(text.split("of stock, and"), (f"{NULL} pool", POOL), strict=True):
        loads = [load for name, one in engines if name.split(":")[0] == setup for load in one["loads"].values()]
        found = [part for load in loads for part in load["in_slices"]]
        weights = [(part["high"] - part["low"]) ** -2 for part in found]
        mean = sum(w * part["ratio"] for w, part in zip(weights, found, strict=True)) / sum(weights)
        half = sum(weights) ** -0.5 / 2
        same(" ".join(re.findall(r"\d\.\d\d", said)), mean, mean - half, mean + half)


def test_prompts_of_16000_tokens_in_a_pool() -> None:
    text = page("MEASUREMENTS.md").split("**Prompts of 16,000 tokens**")[1].split("\n- ")[0]
    engine = BUSY["h200-pool-16000"]["engines"]["int8 none pool"]
    found = engine["loads"]["long32"]
    same(re.findall(r"([\d.]+) GB per store", text)[0], engine["bytes_per_token"] * 16_000 / 1e9)
    same(re.findall(r"([\d.]+) GB/s", text)[0], *found["exported_GB_per_s"])
    same(re.findall(r"All (\d+) stores", text)[0], found["stores"])
    assert found["verified"] and not found["lost_rows"] and not found["vanished"]


def test_drafts_with_two_ranks() -> None:
    text = page("MEASUREMENTS.md").split("**EAGLE-3 drafts with TP=2**")[1].split("No row")[0].replace("vLLM 0.33", "")
    engines = RANKS["h200-two-drafts"]["engines"]
    stock, found = (engines[f"{name} eagle3"]["loads"]["short64"] for name in ("stock", ZSTD))
    same(" ".join(re.findall(r"\d\d,\d{3}", text)), min(stock["tok_per_s"]), max(stock["tok_per_s"]))
    same(" ".join(re.findall(r"0\.\d\d", text)), *ratios([found]))
    assert found["verified"] and not found["lost_rows"]


def test_several_gpus() -> None:
    rows = table("MEASUREMENTS.md", "| engine | capture |")

    def engine(run: str, setup: str) -> list[float]:
        load = RANKS[run]["engines"][setup]["loads"]["short64"]
        if setup == "stock":
            return [float(speed) for speed in load["tok_per_s"]]
        # For this one, the page has the rate at which its writers keep up.
        kept_up = run == "h200-two-answers"
        return [float(one) for one in load["sustained_tok_per_s_of_stock" if kept_up else "tok_per_s_of_stock"]]

    null = "hidden-states null"
    shown = [
        ("h200-two-stores-again", ["stock"]),
        ("h200-two-stores-again", [ZSTD]),
        ("h200-two-stores-again", [null]),
        ("h200-two-stores", [ZSTD, null]),
        ("h200-two-answers", ["stock", DRAFT]),
        ("h200-four-sustained", ["stock", ZSTD, DRAFT]),
        ("h200-two-32b-draft", ["stock", DRAFT]),
        ("h200-four-70b", ["stock", ZSTD]),
        ("h200-four-235b", ["stock", ZSTD]),
    ]
    run = ""
    for (name, setups), row in zip(shown, rows, strict=False):
        run = row[4].strip("`") or run
        assert run == name
        for part, setup in zip(row[3].split("; "), setups, strict=True):
            same(part, *engine(name, setup))
        sizes = [RANKS[name]["engines"][setup].get("bytes_per_token", 0) / 1e6 for setup in setups[-1:]]
        if row[2] and sizes[0]:
            same(row[2], *sizes)
    speeds = {}
    for count, name in ((2, "h200-two-servers"), (4, "h200-four-servers")):
        servers = RANKS[name]["servers"]
        speeds[count] = (
            servers[f"capture, {count} engines"]["tok_per_s"] / servers[f"stock, {count} engines"]["tok_per_s"]
        )
    same(rows[9][3], speeds[2], speeds[4])
    bulk_run = RANKS["h200-four-bulk"]["rounds"]["run"]
    said = page("MEASUREMENTS.md").split("read and generated ")[1].split(" with")[0]
    same(said, round(bulk_run["tok_per_s"], -2))


def test_bursts_of_two_ranks() -> None:
    rows = table("MEASUREMENTS.md", "| bursts with TP=2 |")
    runs = ("h200-two-bursts", "h200-two-bursts-other-day")
    shown = [(run, setup) for run in runs for setup in ("hidden-states null", "hidden-states disk")]
    for (_, *cells, named), (run, setup) in zip(rows, shown, strict=True):
        cases = report.measured(RANKS[run], setup)
        assert named == f"`{run}`"
        same(" ".join(cells), *(cases[case]["ratio"] for case in ("decode32", "decode128", "prefill32")))


OVERHEAD, REDUCED = "h200-overhead", "h200-overhead-reduced"


@pytest.mark.parametrize(
    ("row", "run", "setups"),
    [
        (1, OVERHEAD, ["hidden-states null"]),
        (2, OVERHEAD, ["hidden-states disk"]),
        (3, OVERHEAD, ["full null"]),
        (4, OVERHEAD, ["full host"]),
        (5, OVERHEAD, ["full disk none"]),
        (6, OVERHEAD, ["full disk lz4", "full disk zstd"]),
        (7, REDUCED, ["int8 null"]),
        (8, REDUCED, ["int8 disk none"]),
        (9, REDUCED, ["mixed null"]),
        (10, REDUCED, ["mixed disk none"]),
    ],
)
def test_bursts(row: int, run: str, setups: list[str]) -> None:
    _, size, *shown, sink = table("MEASUREMENTS.md", "| capture | MB per token |")[row]
    found = [report.measured(BURSTS[run], setup) for setup in setups]
    for case, text in zip(("decode1", "decode32", "decode128", "prefill32"), shown, strict=True):
        same(text, *([one[case]["ratio"] for one in found] if text else []))
    if sink:
        same(sink, *(one["prefill32"]["GB_per_s"] for one in found))
    (bytes_per_token,) = {e["bytes_per_token"] for e in BURSTS[run]["engines"].values() if setups[0] in e["setups"]}
    same(size, bytes_per_token / 1e6)
    assert all(case.get("verified", True) and not case.get("missing_rows") for one in found for case in one.values())


def test_stock_beside_bursts_and_limits() -> None:
    cases = report.measured(BURSTS[OVERHEAD], "stock")
    shown = table("MEASUREMENTS.md", "| capture | MB per token |")[0][2:6]
    for case, text in zip(("decode1", "decode32", "decode128", "prefill32"), shown, strict=True):
        same(text, cases[case]["tok_per_s"])
    found = BURSTS[OVERHEAD]["limits"]
    host = report.measured(BURSTS[OVERHEAD], "full host")
    disk = {
        c: report.measured(BURSTS[OVERHEAD], f"full disk {c}")["prefill32"]["GB_per_s"] for c in ("none", "lz4", "zstd")
    }
    link, files, encoding = table("PERFORMANCE.md", "| limit | measured | fraction that capture reached |")
    same(link[1], found["link_d2h_GBps"])
    reached = [host[case]["GB_per_s"] / found["link_d2h_GBps"] for case in ("prefill32x4", "prefill32", "decode128")]
    same(" ".join(re.findall(r"0\.\d\d", link[2])), *reached)
    same(files[1], found["file_GBps_1"], found["file_GBps_16"])
    same(files[2].split(" ")[0], disk["none"] / found["file_GBps_16"])
    same(encoding[1], found["lz4_GBps_16"], found["zstd_GBps_16"])
    same(encoding[2], *(disk[codec] / found[f"{codec}_GBps_16"] for codec in ("lz4", "zstd")))
    same(" ".join(re.findall(r"ratio (\d\.\d\d)", encoding[0])), found["lz4_ratio"], found["zstd_ratio"])


def test_repeated_bursts() -> None:
    runs = ("h200-overhead-repeat", "h200-burst-slow-cores")
    for row, run in zip(table("MEASUREMENTS.md", "| repeated burst |"), runs, strict=True):
        cases = report.measured(BURSTS[run], "full null")
        assert row[4] == f"`{run}`"
        same(" ".join(row[2:4]), cases["decode32"]["ratio"], cases["decode128"]["ratio"])


def test_vllms_own_extraction() -> None:
    for row, run, setup in (
        (0, "h200-ehs", "ehs"),
        (1, "h200-ehs", "hidden-states disk"),
        (3, "h100-ehs", "ehs"),
        (4, "h100-ehs", "hidden-states disk"),
        (5, "h200-ehs-prefill", "ehs"),
        (6, "h200-ehs-prefill", "hidden-states disk"),
        (2, OVERHEAD, "hidden-states disk"),
    ):
        _, *shown, named = table("FROM_VLLM.md", "| | decode, batch 1")[row]
        cases = report.measured(BURSTS[run], setup)
        stock = report.measured(BURSTS[run], "stock")
        for case, text in zip(("decode1", "decode32", "decode128", "prefill32"), shown, strict=True):
            if text or case in cases:
                same(text, cases[case].get("ratio", cases[case]["tok_per_s"] / stock[case]["tok_per_s"]))
        assert named == f"`{run}`"


def test_one_program_prints_the_tables_of_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    source = str(RESULTS / "gpu-ranks.json")
    assert report.main([source]) == 0
    printed = capsys.readouterr().out
    for begin in (
        "| h200-two-bursts | hidden-states disk | ",
        "| short64 | hidden-states zstd | ",
        "| capture, 4 engines | ",
        "| `dmi run` | 62735 |",
    ):
        assert f"\n{begin}" in printed, begin
    assert report.main([source, "--runs", "h200-four-bulk"]) == 0
    assert "capture, 4 engines" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        report.main([source, "--runs", "h200-none"])
    assert "--runs: the files have no h200-none" in capsys.readouterr().err


def test_the_cost_is_drawn_by_bytes_of_a_token(tmp_path: Path) -> None:
    found = report.points({"h200-curves": BURSTS["h200-curves"]})
    assert {case: len(points) for case, points in found.items()} == {"decode32": 6, "prefill8": 6}
    for at, row in zip((0, -1), table("PERFORMANCE.md", "| capture | MB per token | decode | prefill |"), strict=True):
        (size, decode), (_, prompts) = (found[case][at] for case in ("decode32", "prefill8"))
        same(" ".join(row[1:]), size, decode, prompts)
    source = str(RESULTS / "gpu-bursts.json")
    assert report.main([source, "--runs", "h200-curves", "--plot", str(tmp_path / "cost.svg")]) == 0
    for drawn in (tmp_path / "cost.svg", ROOT / "docs" / "img" / "cost.svg"):
        text = drawn.read_text()
        assert "decode, 32 requests" in text and "prompts of 512 tokens, 8 requests" in text
