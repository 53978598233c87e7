# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that need no engine run on a CPU, and write their measurements."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    beside,
    bulk,
    common,
    kernels,
    node,
    reading,
    report,
    scale,
    shapes,
    stores,
    summary,
)
from benchmarks.checks import check_gpu, check_indexer, models
from dmi_connector import find_captures, open_capture
from dmi_connector.cli.main import main as cli

pytestmark = pytest.mark.soak


def test_the_kernel_benchmark_measures_every_rule(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    assert kernels.main(["--out", str(out), "--tokens", "1,3", "--layers", "2", "--repeat", "1"]) == 0
    results = json.loads(out.read_text())
    assert set(results["rules"]) == set(kernels.RULES) and "/" not in results["header"]["command"]
    assert results["model"].keys() == {"1", "3"} and results["model"]["1"]["model_us"] > 0
    for name, found in results["rules"].items():
        at_end = {"at_end_us"} if "topk" in name or "rp(" in name or name == "mixed" else set()
        assert all(set(us) == {"at_once_us", "thread_us"} | at_end and min(us.values()) > 0 for us in found.values())


def test_the_store_benchmark_measures_rates_and_removes_its_files(tmp_path: Path) -> None:
    out, directory = tmp_path / "stores.json", tmp_path / "stores"
    small = {"--ring-bytes": 32 << 20, "--captures": 2, "--length": 130, "--layers": 1, "--repeat": 1, "--writers": 1}
    argv = [str(word) for option in small.items() for word in option]
    assert stores.main(["--out", str(out), "--directory", str(directory), "--codec", "lz4", *argv]) == 0
    results = json.loads(out.read_text())
    assert results["GBps"] == results["runs"][0] > 0 and results["files_alone_GBps"] > 0
    assert min(results["writers_user_s"], results["writers_system_s"]) >= 0
    assert results["GB"] == pytest.approx(2 * 130 * 2 * sum(kernels.WIDTHS.values()) / 1e9, abs=1e-3)
    assert not directory.exists()


def test_the_reading_benchmark_compares_each_read_with_its_limit(tmp_path: Path) -> None:
    out, directory = tmp_path / "reading.json", tmp_path / "stores"
    small = {"--few": 2, "--layers": 2, "--many": 3, "--batch": 300, "--repeat": 1}
    argv = [str(word) for option in small.items() for word in option]
    # export needs datasets: tests/types has it
    argv += ["--only", *(name for name in reading.PARTS if name != "export")]
    assert reading.main(["--out", str(out), "--directory", str(directory), *argv]) == 0
    results = json.loads(out.read_text())
    bars = [bar for bar in reading.BARS if not bar[0].startswith("export")]
    assert [(one["read"], one["limit"], one["bar"]) for one in results["of_limit"]] == bars
    assert all(one["least"] == one["ratio"] == one["most"] > 0 for one in results["of_limit"])
    assert min(results["median"].values()) > 0 and "/" not in results["header"]["command"]
    assert not directory.exists()


def test_the_reading_benchmark_measures_one_part_alone(tmp_path: Path) -> None:
    out = tmp_path / "reading.json"
    argv = ["--out", str(out), "--directory", str(tmp_path / "stores"), "--many", "2", "--repeat", "1"]
    assert reading.main([*argv, "--only", "open"]) == 0
    assert json.loads(out.read_text())["median"].keys() == {"open none, s", "open zstd, s"}


def test_the_reading_benchmark_measures_two_checkouts_in_turns(tmp_path: Path) -> None:
    """Here, both checkouts are this one."""
    out, argv = tmp_path / "reading.json", ["--only", "open", "random", "--many", "2", "--batch", "9", "--repeat", "2"]
    argv += ["--out", str(out), "--directory", str(tmp_path / "stores"), "--before", str(common.ROOT)]
    assert reading.main(argv) == 0
    found = json.loads(out.read_text())
    assert found["rounds"] == 2 and found["before"] == found["header"]["commit"] and [*tmp_path.iterdir()] == [out]
    assert {"open none, s", "random zstd", "random none of in order none"} < found["of_before"].keys()
    assert not [name for name in found["of_before"] if "chunks" in name]
    for one in found["of_before"].values():
        assert 0 < one["least"] <= one["ratio"] <= one["most"] and min(one["before"], one["after"]) > 0
    assert summary.summarise(found) == found


def test_ratios_of_two_checkouts_are_of_the_same_round() -> None:
    found = beside.compared([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert found == {"before": 2.0, "after": 2.0, "ratio": 1.0, "least": 0.5, "most": 2.0}


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_the_reading_benchmark_says_what_an_export_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reading.main(["--out", "reading.json", "--only", "export"])
    assert "--only export needs the package datasets: make types TYPES=sae-lens" in capsys.readouterr().err
    assert reading.chosen([]) == [name for name in reading.PARTS if name != "export"]
    assert "export is left out, which needs the package datasets" in capsys.readouterr().err


def test_the_bulk_benchmark_gives_both_engines_the_same_arguments() -> None:
    given = {"dtype": "float32", "enforce_eager": True, "async_scheduling": False, "compilation_config": {"mode": 0}}
    want = ["--dtype", "float32", "--enforce-eager", "--no-async-scheduling", "--compilation-config", '{"mode": 0}']
    assert list(bulk.flags(given)) == want


def test_the_table_of_models_says_what_a_gpu_gave() -> None:
    """For models with experts it has the share of rows that keep their experts, for others the minimum cosine."""
    found = models.summary(
        [
            {"model": name, "architecture": "A", "mode": "eager", "errors": {"q": 1e-6}}
            for name in ("small", "small-odd")
        ]
    )
    bf16 = {"A": {"model": "small", "cosine": 0.99777, "rows_below": None, "same_tokens": "59 of 60"}}
    float32 = {"small": {"eager": [3e-6, "z"], "compiled": [2e-6, "k"]}}
    gpu = {"models": bf16, "float32": {"models": float32}}
    head, _, first, second = models.table(found, gpu).splitlines()
    assert head.endswith("| GPU, float32 | GPU, bf16 |") and second.endswith(
        "| not run | not run | not run | not run |"
    )
    assert first.endswith("| 1.0e-06 (`q`) | not run | not run | 3.0e-06 (`z`) | cosine 0.99777, tokens 59 of 60 |")
    bf16["A"] |= {"rows_below": 0.0236}
    assert "| 97.6 % of rows ≥ 0.99, tokens 59 of 60 |" in models.table(found, gpu)
    assert models.table(found, {"models": {}, "float32": {"models": {}}}).count("not run") == 8


def test_a_run_of_some_models_keeps_the_results_of_the_others() -> None:
    found = [{"model": name, "hooks": 2, "eager": [1e-6, "q"], "compiled": [1e-6, "q"]} for name in ("a", "b")]
    before = {"header": {"commit": "1"}, "found": found}
    later = [{"model": name, "hooks": 3, "eager": [2e-6, "z"], "commit": "2"} for name in ("b", "c")]
    kept = {**found[1], **later[0]}
    assert models.merged(before, later) == [{**found[0], "commit": "1"}, kept, later[1]]
    assert kept["compiled"] == [1e-6, "q"] and kept["commit"] == "2"


def test_the_benchmark_of_indexes_finds_what_it_wrote(tmp_path: Path) -> None:
    from benchmarks import index

    out, directory = tmp_path / "out.json", tmp_path / "indexes"
    assert index.main(["--entries", "300", "--out", str(out), "--directory", str(directory)]) == 0
    found = json.loads(out.read_text())["entries"]["300"]
    assert [found[what]["found"] for what in index.WHAT] == [1, 1, 300, 0] and not list(directory.iterdir())


def test_ranks_of_a_simulated_node_write_sound_stores(tmp_path: Path) -> None:
    """Two ranks write at once, each its own stores, or its part of shared stores."""
    dims, options = replace(scale.MODELS["Qwen3-4B"], layers=4), node.SELECTIONS["four layers"]
    with node.new_rank() as first, node.new_rank() as second:
        node.together([first, second], node.fill, [(False,)] * 2)
        for layout, tp in (("DP 2", 1), ("TP 2", 2)):
            directory, sent = tmp_path / layout, node.payloads(dims, options, layout)
            spent = node.write([first, second], directory, layout, sent, 130, 4)
            assert spent["bytes_raw"] == 130 * 98_304 and 0 < spent["bytes_stored"] < 0.7 * spent["bytes_raw"]
            assert min(spent["writer_s"], spent["coordinator_s"], spent["rank_s"]) > 0
            assert cli(["verify", str(directory)]) == 0 and node.problems(directory, 4) == []
            for i in range(4):
                (info,) = find_captures(directory, key=str(i))
                with open_capture(info.store) as capture:
                    assert len(sent) == capture.attrs["tp"] == tp and capture["mlp_post"].shape == (4, 130, 9728)
                    # Columns that no rank wrote would be zero.
                    assert (abs(capture["mlp_post"].astype("f4")).max((0, 1)) > 0).all()
    index = directory / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join([*lines[:-1], lines[-2]]))
    (directory / "0.zarr" / "token_ids" / "c" / "0").write_bytes(b"")
    found = node.problems(directory, 4)
    assert sum(line.startswith("index: ") for line in found) == 2 and any("token_ids" in line for line in found)


def test_the_node_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, case = tmp_path / "node.json", "Qwen3-4B four layers"
    assert node.main(["--out", str(out), "--quick", "--layouts", "DP 1,TP 2"]) == 0
    assert list(tmp_path.iterdir()) == [out], "no store must be left"
    results = json.loads(out.read_text())
    assert "/" not in results["header"]["command"]
    costs = results["costs"][case]
    assert costs.keys() == {"store", "zstd"} and costs["zstd"]["DP 1"]["ratio"] == costs["store"]["DP 1"]["ratio"] == 1
    for place in ("shared", "shared_disk"):
        assert results[place].keys() == {"append", "create", "quota", "copy"}
        assert all(found[n]["cpu_s"] > 0 for found in results[place].values() for n in ("1", "2"))
    printed = capsys.readouterr().out
    assert node.main(["--out", str(out), "--table", "--layouts", "DP 1,TP 2"]) == 0
    assert capsys.readouterr().out == printed and printed.splitlines()[-1].startswith(f"| {case}")
    with pytest.raises(SystemExit, match=r"--layouts: .*node\.json has no TP 4; it has DP 1, TP 2"):
        node.main(["--out", str(out), "--table", "--layouts", "DP 1,TP 4"])


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_the_shapes_of_published_models_are_of_architectures_that_are_served(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from dmi_connector.engine.model.architectures import ARCHITECTURES

    assert shapes.main([str(tmp_path), "--only", name]) == 0
    config = AutoConfig.from_pretrained(tmp_path / name)
    (architecture,) = config.architectures
    dims, fields = ARCHITECTURES[architecture].dims(config), shapes.SHAPES[name]
    blocks = fields.get("hybrid_override_pattern")
    assert (dims.layers, dims.hidden) == (len(blocks) if blocks else fields["num_hidden_layers"], fields["hidden_size"])
    if blocks is None:  # transformers gives a Nemotron-H experts by default, even if no block has any
        experts = fields.get("num_experts", fields.get("num_local_experts", fields.get("n_routed_experts", 0)))
        assert dims.experts == experts


def test_a_benchmark_that_is_ended_by_a_signal_ends_its_engines(tmp_path: Path) -> None:
    """The engines are in sessions of their own."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from contextlib import closing\n"
        "from benchmarks import common\n"
        "common.end_with_children()\n"
        "common.CLOSE_S = 0\n"
        "engine = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)']\n"
        "with closing(common.Child(engine)):\n"
        "    time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(common.ROOT)}
    with subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{engine}").exists()


def test_the_check_on_a_gpu_has_no_limit_that_holds_for_nan() -> None:
    steps = {"scheduled_tokens": 1, "expected_tokens": 1, "largest_decode_step": 1, "draft_tokens": 0}
    assert check_gpu._failures({"steps": steps}) == []
    for name in ("attention_error", "top_k_gap"):
        assert len(check_gpu._failures({"steps": steps, name: float("nan")})) == 1, name


def test_a_choice_of_an_indexer_has_every_place_filled_once_with_earlier_tokens() -> None:
    good = np.array([[0, -1], [1, 0], [2, 0]], np.int32)
    mask, wrong = check_indexer.chosen(good)
    assert wrong == 0 and mask.tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    for row, line in ((0, [1, -1]), (1, [1, 1]), (1, [-1, 1]), (2, [-1, -1])):  # later, twice, missing, stale
        bad = good.copy()
        bad[row] = line
        assert check_indexer.chosen(bad)[1] == 1, (row, line)


def test_the_check_of_an_indexer_fails_for_values_that_are_not_numbers() -> None:
    good = {"problems": [], "rows_missing": 0, "rows_without_a_choice": 0, "least_cosine_of_z": 1.0}
    good |= {"chosen_in_common": {0: 0.9, 1: 0.1}, "rows_below": {"z": 0.0}}
    assert check_indexer.failures(good) == []
    nan = float("nan")
    for name, value in (("least_cosine_of_z", nan), ("chosen_in_common", {0: nan}), ("rows_below", {"z": nan})):
        assert len(check_indexer.failures({**good, name: value})) == 1, name


def test_a_summary_has_a_run_for_each_result_and_no_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"tok_per_s": 90.0, "runs": [90.0, 80.0, 95.0], "python_us": [60.0] * 3, "ratio": 0.9}
    setups = {"a null": {"decode1": rates, "profile decode32": {"step": {"calls": 3}}}}
    steps = {"scheduled_tokens": 5, "expected_tokens": 5, "draft_tokens": 0}
    check = {"steps": steps, "facts": {"cached_tokens": 3}, "least_cosine": {"q": 0.9, "k": 0.8}, "rows_missing": 0}
    served = [{"seconds": 1.0, "tok_per_s": speed, "by_engine": {"0": speed}, "answered": 2} for speed in (10.0, 30.0)]
    raw = {
        "bursts": {"header": {"commit": "1"}, "limits": {}, "engines": {"a": {"start_s": 1.0, "setups": setups}}},
        "check": {"commit": "2", "target": check, "stock": {"steps": {**steps, "scheduled_tokens": 6}}},
        "servers": {"header": {}, "servers": {"stock, 1 engine": served}},
    }
    for name, found in raw.items():
        common.save(tmp_path / f"{name}.json", found)
    out = tmp_path / "out" / "summary.json"
    paths = [str(tmp_path / f"{name}.json") for name in raw]
    assert summary.main([*paths[:1], "--out", str(out)]) == summary.main([*paths[1:], "--out", str(out)]) == 0
    found = json.loads(out.read_text())["runs"]
    assert list(found) == list(raw), "runs of an earlier call must stay"
    assert found["bursts"]["engines"]["a"]["setups"] == {
        "a null": {"decode1": {"tok_per_s": 90.0, "ratio": 0.9, "rounds": 3, "least": 80.0, "most": 95.0}}
    }
    assert found["check"]["header"] == {"commit": "2"} and not found["check"]["stock"]["steps_as_stock"]
    assert found["check"]["target"] == {"rows_missing": 0, "steps_as_stock": True, "least_cosine": [0.8, "k"]}
    assert found["servers"]["servers"]["stock, 1 engine"] == {
        **{"tok_per_s": 20.0, "rounds": 2, "least": 10.0, "most": 30.0},
        **{"by_engine": {"0": 30.0}, "seconds": 2.0, "answered": 4},
    }
    common.save(tmp_path / "other.json", {"header": {}})
    with pytest.raises(SystemExit):
        summary.main([str(tmp_path / "other.json"), "--out", str(out)])
    assert "other.json: not a result of capture" in capsys.readouterr().err


def test_a_summary_of_runs_in_turns_has_their_ratio_and_one_of_reductions_what_they_keep() -> None:
    rounds = {"generate": [{"tok_per_s": 2.0}, {"tok_per_s": 4.0}], "run": [{"tok_per_s": 3.0}, {"tok_per_s": 3.0}]}
    raw = {"header": {}, "settings": {"engines": 1}, "rounds": rounds, "ratios": [1.5, 0.75], "ratio": 1.125}
    found = summary.summarise(raw)
    assert found["ratio"] == {"median": 1.125, "rounds": 2, "least": 0.75, "most": 1.5}
    assert report.bulk_table(found).splitlines()[2:] == [
        "| `LLM.generate` | 3 | 1 | 2 |",
        "| `dmi run` | 3 | 1.125 (0.750 to 1.500) | 2 |",
    ]
    row = {"hook": "q", "layer": 0, "reduction": "int8", "tokens": 9, "width": 4, "size": 0.5}
    raw = {"commit": "1", "losses": [2.0], "trained": [{**row, "measures": {"cosine_least": 0.9, "error": 0.1}}]}
    kept = {"hook": "q", "layer": 0, "reduction": "int8", "width": 4, "measures": {"cosine_least": 0.9}}
    assert summary.summarise(raw) == {"header": {"commit": "1"}, "losses": [2.0], "trained": [kept]}


def test_a_result_has_one_line_for_what_fits_on_a_line(tmp_path: Path) -> None:
    found = {"short": {"a": [1, 2], "b": None}, "long": list(range(100)), "empty": {}}
    common.save(tmp_path / "a.json", found)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == found and len(text.splitlines()) == 100 + 6
    assert ' "short": {"a": [1, 2], "b": null},' in text.splitlines()
