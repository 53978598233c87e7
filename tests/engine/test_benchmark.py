# SPDX-License-Identifier: Apache-2.0
"""The capture benchmark runs on a CPU too, checks what it measures, and reports what it found."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capture, report
from benchmarks.engine import account
from benchmarks.setups import CASES, FULL, first_layers
from dmi_connector.engine.architectures import ARCHITECTURES
from dmi_connector.hooks import parse_selection

ROOT = Path(__file__).parents[2]
SHRINK, CHUNK = 4, 64
SETUPS = ("stock", "ehs", "full null", "full disk none", "full disk slow block", "full disk slow drop")
CASE_NAMES = ("decode32", "prefill8x128", "prefill8")
OPTIONS = {
    "--shrink": SHRINK,
    "--repeat": 2,
    "--dtype": "float32",
    "--engine-args": '{"enforce_eager": true}',
    "--options": json.dumps({"chunk_tokens": CHUNK}),  # 8 requests reach a chunk's end at once; a slow sink holds 3
    "--only": ",".join(SETUPS),
    "--cases": ",".join(CASE_NAMES),
    "--curves": "tokens",
    "--limit-seconds": 0.02,
    "--processes": 1,
}


@pytest.fixture(scope="module")
def run(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(result file, what was printed) of one run."""
    out = tmp_path_factory.mktemp("bench") / "tiny.json"
    paths = {"--model": tiny_model("qwen3"), "--out": out, "--store-dir": out.parent / "stores"}
    argv = [str(word) for option in {**paths, **OPTIONS}.items() for word in option]
    command = [sys.executable, "-m", "benchmarks.capture", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert not list((out.parent / "stores").glob("*/*.zarr")), "stores were left behind"
    return json.loads(out.read_text()), done.stdout


def test_the_result_names_machine_and_limits_but_no_paths(run: tuple[dict[str, Any], str]) -> None:
    results, _ = run
    assert results["machine"]["gpu"] is None and results["machine"]["vllm"] and results["machine"]["cpu_cores"] > 0
    assert {"memcpy_GBps_1", "zstd_GBps_1", "lz4_ratio", "file_GBps_1"} <= set(results["limits"])
    assert all(value > 0 for value in results["limits"].values())
    assert "--out tiny.json" in results["command"] and "/" not in results["command"]


def test_rates_are_medians_of_the_runs(run: tuple[dict[str, Any], str]) -> None:
    results, _ = run
    assert list(results["engines"]) == ["stock", "ehs", "full"]
    for setup in ("stock", "full null", "full disk none"):
        measured = report.measured(results, setup)
        assert set(measured) - {"profile decode32"} == set(CASE_NAMES)
        for case in CASE_NAMES:
            got = measured[case]
            assert len(got["runs"]) == 2 and min(got["runs"]) > 0
            assert got["tok_per_s"] == pytest.approx(statistics.median(got["runs"]), rel=0.01)
    profile = report.measured(results, "full null")["profile decode32"]
    assert profile["before_forward"]["calls"] >= 128, "one call a step"


@pytest.mark.parametrize("setup", ["full disk none", "full disk slow block"])
@pytest.mark.parametrize("case", ["decode32", "prefill8"])
def test_stores_are_verified_and_whole(run: tuple[dict[str, Any], str], setup: str, case: str) -> None:
    results, _ = run
    got, shrunk = report.measured(results, setup)[case], CASES[case].shrunk(SHRINK)
    assert got["verified"] is True and got["missing_rows"] == 0
    assert (got["stores"], got["rows"]) == (shrunk.requests, shrunk.requests * shrunk.rows)
    assert got["exported_GB"] == pytest.approx(got["rows"] * results["engines"]["full"]["bytes_per_token"] / 1e9)
    assert got["GB_per_s"] * got["finished_s"] == pytest.approx(got["exported_GB"])


def test_dropped_rows_are_accounted_for(run: tuple[dict[str, Any], str]) -> None:
    got = report.measured(run[0], "full disk slow drop")["decode32"]
    assert got["verified"] is True, got
    assert 0 < got["missing_rows"] < got["rows"]
    assert 0 < got["claimed_rows"] <= got["missing_rows"]


def test_the_printed_tables_hold_the_ratios(run: tuple[dict[str, Any], str]) -> None:
    results, printed = run
    rate = {name: report.measured(results, name)["prefill8"]["tok_per_s"] for name in SETUPS if name != "ehs"}
    lines = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("|")}
    for setup in ("full null", "full disk none", "full disk slow drop"):
        assert f"{rate[setup]:,.0f} ({rate[setup] / rate['stock']:.3f})" in lines[setup]
    assert f"{rate['full disk slow drop'] / rate['full null']:.3f} of full null" in lines["full disk slow drop"]
    assert f"{rate['stock']:,.0f} | {rate['full null']:,.0f} (" in lines["128"], "the tokens curve, 512 / 4 tokens"
    assert "ehs: not run: " in printed and "no GPU" in printed


def test_several_files_each_with_their_own_stock(run: tuple[dict[str, Any], str]) -> None:
    other = json.loads((ROOT / "benchmarks/results/h200-b.json").read_text())
    lines = report.table({"tiny": run[0], "h200": other}).splitlines()
    for name, results in (("tiny", run[0]), ("h200", other)):
        stock, null = (report.measured(results, s)["decode32"]["tok_per_s"] for s in ("stock", "full null"))
        [line] = [line for line in lines if line.startswith(f"| {name} | full null |")]
        assert f"{null:,.0f} ({null / stock:.3f})" in line


@pytest.mark.parametrize(
    ("there", "missing", "claimed", "words"),
    [
        ({0, 1, 2, 3}, set(), set(), None),
        ({0, 3}, {1, 2}, {1}, None),
        ({0, 3}, {1}, set(), "2 rows are there and 1 listed as missing, of 4"),
        ({0, 1, 3}, {1, 2}, set(), "3 rows are there and 2 listed as missing, of 4"),
        ({0, 1, 2, 3, 4}, set(), set(), "5 rows are there"),
        ({0, 3}, {1, 2}, {2, 3}, "calls 1 rows missing that the store does not"),
    ],
)
def test_accounting_finds_what_does_not_add_up(
    there: set[int], missing: set[int], claimed: set[int], words: str | None
) -> None:
    problems = account(4, there, missing, claimed)
    assert (problems == []) if words is None else words in problems[0]


def test_layer_curves_cut_the_full_selection(tiny_model: Callable[..., Path]) -> None:
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
