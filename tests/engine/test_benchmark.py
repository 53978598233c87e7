# SPDX-License-Identifier: Apache-2.0
"""The capture benchmark on a CPU: a short run, the checks of its stores, and its report."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capture, common, report, summary
from benchmarks.engine import account
from benchmarks.setups import (
    CASES,
    FULL,
    PROFILE,
    Setup,
    Turn,
    all_setups,
    first_layers,
    in_groups,
    in_phases,
    in_sequence,
    with_before,
)
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.hooks import parse_selection

pytestmark = pytest.mark.soak  # only benchmark code, which users do not run
ROOT = Path(__file__).parents[2]
SHRINK, CHUNK = 4, 16
SETUPS = ("stock", "ehs", "full null", "full disk none", "full disk slow block", "full disk slow drop")
CASE_NAMES = ("decode32", "prefill8")
OPTIONS = {
    "--shrink": SHRINK,
    "--repeat": 1,
    "--dtype": "float32",
    "--engine-args": '{"enforce_eager": true}',
    # 8 requests finish a chunk in the same step, and a slow sink holds 3 chunks
    "--options": json.dumps({"chunk_tokens": CHUNK}),
    "--only": ",".join((*SETUPS, "full disk none unpaced")),
    "--cases": ",".join(CASE_NAMES),
    "--limit-seconds": 0.02,
    "--processes": 1,
}


@pytest.fixture(scope="module")
def run(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(result file, printed text) of one run."""
    out = tmp_path_factory.mktemp("bench") / "tiny.json"
    paths = {"--model": tiny_model("qwen3"), "--out": out, "--store-dir": out.parent / "stores"}
    argv = [str(word) for option in {**paths, **OPTIONS}.items() for word in option]
    command = [sys.executable, "-m", "benchmarks.capture", "--together", "--stand-still", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert not list((out.parent / "stores").glob("*/*.zarr")), "stores were left behind"
    return json.loads(out.read_text()), done.stdout


def test_the_result_names_machine_and_limits_but_no_paths(run: tuple[dict[str, Any], str]) -> None:
    results, _ = run
    header = results["header"]
    assert header["machine"]["gpu"] is None and header["versions"]["torch"] and header["machine"]["cpu_cores"] > 0
    assert {"memcpy_GBps_1", "zstd_GBps_1", "lz4_ratio", "file_GBps_1"} <= set(results["limits"])
    assert {"file_first_GBps_1"} <= set(results["limits"])
    assert all(value > 0 for value in results["limits"].values())
    assert "--out tiny.json" in header["command"] and "/" not in header["command"]


def test_rates_are_medians_of_the_runs(run: tuple[dict[str, Any], str]) -> None:
    results, _ = run
    assert set(results["engines"]) == {"stock", "ehs", "full"}
    phases = {"decode32": 5, "prefill8": 4}  # phases that include the case
    for setup in ("stock", "full null", "full disk none"):
        measured = report.measured(results, setup)
        assert set(measured) - {PROFILE} == set(CASE_NAMES)
        for case in CASE_NAMES:
            got = measured[case]
            assert len(got["runs"]) == (phases[case] if setup == "stock" else 1) and min(got["runs"]) > 0
            assert got["tok_per_s"] == pytest.approx(statistics.median(got["runs"]), rel=0.01)
            assert len(got["python_us"]) == len(got["runs"]) and min(got["python_us"]) > 0
    profile = report.measured(results, "full null")["profile decode32"]
    assert profile["ours: before_forward"]["calls"] >= 128 / SHRINK, "one call per step"
    assert profile["step"]["mean_us"] > profile["execute_model"]["mean_us"] > 0


@pytest.mark.parametrize(
    ("setup", "case"),
    [
        *(("full disk none", case) for case in ("decode32", "prefill8")),
        *(("full disk slow block", case) for case in ("decode32", "prefill8")),
        ("full disk none unpaced", "decode32"),
    ],
)
def test_stores_are_verified_and_whole(run: tuple[dict[str, Any], str], setup: str, case: str) -> None:
    results, _ = run
    got, shrunk = report.measured(results, setup)[case], CASES[case].shrunk(SHRINK)
    assert got["verified"] is True and got["missing_rows"] == 0
    assert (got["stores"], got["rows"]) == (shrunk.requests, shrunk.requests * shrunk.rows)
    assert got["exported_GB"] == pytest.approx(got["rows"] * results["engines"]["full"]["bytes_per_token"] / 1e9)
    assert got["GB_per_s"] * got["finished_s"] == pytest.approx(got["exported_GB"])


def test_dropped_rows_are_counted_as_missing_rows(run: tuple[dict[str, Any], str]) -> None:
    got = report.measured(run[0], "full disk slow drop")["decode32"]
    assert got["verified"] is True, got
    assert 0 < got["missing_rows"] < got["rows"]
    assert 0 < got["claimed_rows"] <= got["missing_rows"]


def test_the_printed_tables_hold_the_ratios(run: tuple[dict[str, Any], str]) -> None:
    results, printed = run
    got = {name: report.measured(results, name)["prefill8"] for name in SETUPS if name != "ehs"}
    rate = {name: numbers["tok_per_s"] for name, numbers in got.items()}
    lines = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("|")}
    for setup in ("full null", "full disk none", "full disk slow drop"):
        stock = got[setup]["stock_tok_per_s"]
        assert stock in [pytest.approx(of_a_phase, rel=0.01) for of_a_phase in got["stock"]["runs"]]
        assert f"{rate[setup]:,.0f} ({got[setup].get('ratio', rate[setup] / stock):.3f})" in lines[setup]
    assert f"{rate['full disk slow drop'] / rate['full null']:.3f} of full null" in lines["full disk slow drop"]
    assert "ehs: not run: " in printed and "no GPU" in printed
    assert "tiny: a fixed piece of Python took " in printed


def test_the_table_compares_each_file_with_its_own_stock(run: tuple[dict[str, Any], str]) -> None:
    other = summary.runs(ROOT / "benchmarks/results/gpu-bursts.json")["h200-overhead"]
    lines = report.table({"tiny": run[0], "h200": other}).splitlines()
    for name, results in (("tiny", run[0]), ("h200", other)):
        stock, null = (report.measured(results, s)["decode32"] for s in ("stock", "full null"))
        then = null.get("ratio", null["tok_per_s"] / null.get("stock_tok_per_s", stock["tok_per_s"]))
        [line] = [line for line in lines if line.startswith(f"| {name} | full null |")]
        assert f"{null['tok_per_s']:,.0f} ({then:.3f})" in line


ORDERED = [
    Setup("stock", "stock", cases=("decode1", "decode32", "prefill8")),
    Setup("ehs", "ehs", cases=("decode32",)),
    Setup("a null", "a", FULL, sink="null", cases=("prefill8", "decode32")),
    Setup("b null", "b", FULL, sink="null", cases=("decode1", "decode32")),
    Setup("a disk", "a", FULL, cases=("decode32",)),
    Setup("a slow", "a", FULL, slow=True, cases=("decode32",)),
]


def _order(turns: list[Turn]) -> list[tuple[int, str, str]]:
    return [(turn.phase, turn.setup.name, turn.case) for turn in turns]


def test_engines_together_take_turns_on_each_case_of_a_phase() -> None:
    assert _order(in_phases(ORDERED)) == [
        (0, "stock", "decode32"),
        (0, "ehs", "decode32"),
        (0, "a disk", "decode32"),
        (0, "stock", PROFILE),
        (0, "ehs", PROFILE),
        (0, "a disk", PROFILE),
        (1, "stock", "decode1"),
        (1, "b null", "decode1"),
        (1, "stock", "decode32"),
        (1, "a null", "decode32"),
        (1, "b null", "decode32"),
        (1, "stock", "prefill8"),
        (1, "a null", "prefill8"),
        (1, "a null", PROFILE),
        (1, "b null", PROFILE),
        (2, "stock", "decode32"),
        (2, "a slow", "decode32"),
    ]
    assert _order(in_phases(ORDERED[:1])) == [(0, "stock", case) for case in (*ORDERED[0].cases, PROFILE)]


def test_engines_in_sequence_run_one_after_the_other() -> None:
    turns = in_sequence(ORDERED)
    assert sorted(_order(turns)) == sorted({(0, name, case) for _, name, case in _order(in_phases(ORDERED))})
    engines = [turn.engine for turn in turns]
    assert engines == ["stock"] * 4 + ["ehs"] * 2 + ["a"] * 6 + ["b"] * 3
    assert _order(turns)[6:9] == [(0, "a null", "prefill8"), (0, "a null", "decode32"), (0, "a null", PROFILE)]


def test_setups_of_one_engine_share_hooks_reductions_and_owner() -> None:
    setups = all_setups(["hooks"], "zstd", "")
    assert len({s.name for s in setups}) == len(setups)
    for setup in setups:
        assert len({(s.hooks, s.reduce, s.owner) for s in setups if s.engine == setup.engine}) == 1


def test_a_ratio_uses_the_stock_runs_of_its_own_phase() -> None:
    stock, null, disk = (Setup(name, name) for name in ("stock", "null", "disk"))
    results: dict[str, Any] = {"limits": {}, "engines": {name: {"setups": {}} for name in ("stock", "null", "disk")}}
    then: capture.Stock = {}
    for phase, setup, runs in (
        (0, stock, [100, 110, 90]),
        (0, null, [50]),
        (1, stock, [200, 210, 220]),
        (1, disk, [70]),
    ):
        numbers = {"tok_per_s": float(statistics.median(runs)), "runs": runs}
        capture.add(results, Turn(setup, "decode1", phase), numbers, then, True)
    capture.add(results, Turn(null, PROFILE, 1), {"before_forward": {}}, then, False)
    capture.add(results, Turn(disk, "decode128", 1), {"tok_per_s": 1.0, "runs": [1]}, then, True)
    got = {name: report.measured(results, name) for name in ("stock", "null", "disk")}
    assert got["stock"]["decode1"] == {"tok_per_s": 155, "runs": [100, 110, 90, 200, 210, 220]}
    assert (got["null"]["decode1"]["stock_tok_per_s"], got["disk"]["decode1"]["stock_tok_per_s"]) == (100, 210)
    assert got["null"][PROFILE] == {"before_forward": {}} and "stock_tok_per_s" not in got["disk"]["decode128"]
    assert report.cell(results, "null", "decode1") == "50 (0.500)"
    assert report.cell(results, "disk", "decode1") == "70 (0.333)"
    del got["null"]["decode1"]["stock_tok_per_s"]
    assert report.cell(results, "null", "decode1") == f"50 ({50 / 155:.3f})", "a file without phases"


@pytest.mark.parametrize("alternate", [True, False])
def test_only_rounds_that_alternate_are_compared_in_pairs(alternate: bool) -> None:
    """A machine that is slow for a while slows both rounds of a pair."""
    stock, null = (Setup(name, name) for name in ("stock", "null"))
    results: dict[str, Any] = {"limits": {}, "engines": {name: {"setups": {}} for name in ("stock", "null")}}
    then: capture.Stock = {}
    for setup, runs in ((stock, [100.0, 50.0, 100.0]), (null, [80.0, 45.0, 45.0])):
        numbers = {"tok_per_s": statistics.median(runs), "runs": runs}
        capture.add(results, Turn(setup, "decode1", 0), numbers, then, alternate)
    assert report.cell(results, "null", "decode1") == ("45 (0.800)" if alternate else "45 (0.450)")


CHILD = """
import functools, os, sys, time
from benchmarks.capture import answer, serve_engine
from benchmarks.setups import Setup

name, fd = sys.argv[1], int(sys.argv[-1])

class Bench:
    facts = {"start_s": 0.0}

    def __init__(self):
        self.asked = 0
        if name == "no start":
            raise ValueError("/some/where/model is not a model")

    def begin(self, setup, case):
        self.asked += 1
        self.rounds = []
        return {"rounds": 3}

    def again(self, setup, cores):
        if self.asked == 2 and name == "fails":
            raise RuntimeError("/some/where/store is full")
        if self.asked == 2 and name == "dies":
            if os.fork() == 0:
                time.sleep(1000)  # what it started holds the socket
            os.kill(os.getpid(), 9)
        self.rounds.append(time.monotonic())
        if len(self.rounds) < 3:
            return {}
        return {"tok_per_s": float(self.asked), "runs": [self.asked], "times": self.rounds, "cores": cores}

    def profile(self, setup):
        return {"before_forward": {"calls": self.asked}}

    def close(self):
        if name == "ends badly":
            os._exit(3)

setups = [Setup(f"{name} {what}", name) for what in ("null", "disk")]
serve_engine(fd, Bench, functools.partial(answer, setups))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("together", [True, False])
def test_an_engine_that_fails_or_dies_does_not_stop_the_others(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a failed child were waited for, the test would run into its timeout."""
    monkeypatch.setattr(common, "CLOSE_S", 3600)
    names = ("stock", "no start", "fails", "dies", "ends badly", "good")
    cases = ("decode1", "decode32")
    setups = [Setup(f"{n} null", n, "" if n == "stock" else FULL, sink="null", cases=cases) for n in names]
    results: dict[str, Any] = {"engines": {}}
    out = tmp_path / "out.json"

    def start(name: str) -> common.Child:
        return common.Child([sys.executable, "-c", CHILD, name], {**os.environ, "PYTHONPATH": str(ROOT)})

    run = capture.Run(start, results, str(out), pin=together)
    run.measure((in_phases if together else in_sequence)(setups), together)
    assert json.loads(out.read_text()) == results
    found = results["engines"]
    assert list(found) == list(names)
    assert {name: engine["failed"] for name, engine in found.items() if "failed" in engine} == {
        "no start": "ValueError: model is not a model",
        "fails": "RuntimeError: store is full",
        "dies": "exit status -9",
        "ends badly": "exit status 3",
    }
    done = {name: list(engine["setups"].get(f"{name} null", {})) for name, engine in found.items()}
    whole = [*cases, PROFILE]
    assert done == {
        "stock": whole,
        "no start": [],
        "fails": ["decode1"],
        "dies": ["decode1"],
        "ends badly": whole,
        "good": whole,
    }
    assert (
        found["good"]["start_s"] == 0 and found["good"]["setups"]["good null"][PROFILE]["before_forward"]["calls"] == 2
    )
    cores = found["good"]["setups"]["good null"]["decode1"]["cores"]
    assert set(cores) <= os.sched_getaffinity(0) and cores if together else cores is None
    times = {name: found[name]["setups"][f"{name} null"]["decode1"]["times"] for name in ("stock", "good")}
    first, second = times["stock"], times["good"]
    assert len(first) == 3 and max(first) < min(second) if not together else first[1] < second[1] < first[2]
    assert not capture._sound(results)


def test_code_before_a_change_alternates_with_the_code_after() -> None:
    stock, null = Setup("stock", "stock", cases=("decode1",)), Setup("a null", "a", FULL, cases=("decode1",))
    turns = in_phases(with_before([stock, null]))
    (group,) = in_groups(turns, together=True)
    assert [(turn.setup.name, turn.engine) for turn in group] == [
        ("stock", "stock"),
        ("a null", "a"),
        ("a null, before", "a, before"),
    ]


@pytest.mark.parametrize("given", [["--before", "DIR"], ["--before=DIR"]])
def test_an_engine_before_a_change_has_its_own_stores_and_entry_points(given: list[str], tmp_path: Path) -> None:
    args = capture.parser().parse_args([*given, "--store-dir", "/stores", "--model", "/model"])
    argv = capture.before_argv([*given, "--repeat", "1"], args)
    assert argv == ["--repeat", "1", "--model", "/model", "--store-dir", "/stores-before"]
    code = "from importlib.metadata import entry_points; import dmi_connector; print(dmi_connector.__file__)"
    code += "; print(entry_points(name='x'))"
    project = (ROOT / "pyproject.toml").read_text()
    checkout = tmp_path / "checkout"
    (checkout / "dmi_connector").mkdir(parents=True)
    (checkout / "dmi_connector/__init__.py").touch()
    (checkout / "pyproject.toml").write_text(project.replace("dmi_connector = ", "x = "))
    path = capture.python_path(checkout, tmp_path / "metadata")
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=tmp_path, text=True)
    assert found.startswith(str(checkout)) and found.count("EntryPoint(name='x'") == 2, found


def test_engines_that_are_up_together_take_rounds_alternately() -> None:
    a, b, disk = Setup("a null", "a"), Setup("b null", "b"), Setup("a disk", "a")
    turns = [Turn(a, "decode1"), Turn(b, "decode1"), Turn(disk, "decode1"), Turn(b, "decode32"), Turn(b, PROFILE)]
    names = [[turn.setup.name for turn in group] for group in in_groups(turns, together=True)]
    assert names == [["a null", "b null"], ["a disk"], ["b null"], ["b null"]], "an engine is twice in a group"
    assert in_groups(turns, together=False) == [[turn] for turn in turns]


def test_limits_of_a_former_run_are_copied() -> None:
    former = ROOT / "benchmarks/results/gpu-bursts.json"
    args = capture.parser().parse_args(["--limit-seconds", "0", "--limits-from", str(former)])
    assert capture._limits(args) == summary.runs(former)["h200-overhead"]["limits"] != {}
    assert capture._limits(capture.parser().parse_args(["--limit-seconds", "0"])) == {}


@pytest.mark.parametrize(
    ("there", "missing", "claimed", "words"),
    [
        ({0, 1, 2, 3}, set(), set(), None),
        ({0, 3}, {1, 2}, {1}, None),
        ({0, 3}, {1}, set(), "2 rows are there and 1 listed as missing, of 4"),
        ({0, 1, 3}, {1, 2}, set(), "3 rows are there and 2 listed as missing, of 4"),
        ({0, 1, 2, 3, 4}, set(), set(), "5 rows are there"),
        ({0, 3}, {1, 2}, {2, 3}, "lists 1 rows as missing that the store does not list"),
    ],
)
def test_accounting_finds_rows_that_do_not_add_up(
    there: set[int], missing: set[int], claimed: set[int], words: str | None
) -> None:
    problems = account(4, there, missing, claimed)
    assert (problems == []) if words is None else words in problems[0]


def test_layer_curves_take_the_first_layers_of_the_full_selection(tiny_model: Callable[..., Path]) -> None:
    from transformers import AutoConfig

    model = tiny_model("qwen3")
    dims = ARCHITECTURES["Qwen3ForCausalLM"].dims(AutoConfig.from_pretrained(model))
    full = parse_selection(FULL, dims).hooks
    half = parse_selection(first_layers(str(model), 2), dims).hooks
    assert half == {name: tuple(layer for layer in layers if layer < 2) for name, layers in full.items()}
    assert half["q"] == (0, 1) and full["q"] == (0, 1, 2)


@pytest.mark.parametrize("option", ["--only", "--engines", "--cases", "--curves"])
def test_an_unknown_name_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        capture.main(["--model", "none", option, "stokc"])
    assert caught.value.code == 2
    assert f"{option}: 'stokc' is unknown; choose from " in capsys.readouterr().err
