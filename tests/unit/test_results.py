# SPDX-License-Identifier: Apache-2.0
"""Other pages: each figure in their tables is in benchmarks/results, rounded as shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import bulk, node, reading, report, scale
from benchmarks.checks import models
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import ArraySpec
from tests import storekit
from tests.resultkit import page, results, same, table

RANKS = results("gpu-ranks.json")["runs"]


# ---- docs/CORRECTNESS.md, docs/MODELS.md -------------------------------------------------------------------------

CHECKS = results("checks.json")["runs"]


def engines(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each engine of a check, also if a run has several checks."""
    for part in found.values():
        if isinstance(part, dict) and ("v2_model_runner" in part or "choices" in part):
            yield part
        elif isinstance(part, dict):
            yield from engines(part)


def test_tokens_are_as_many_as_the_page_says() -> None:
    lines = [row for row in table("CORRECTNESS.md", "| machine | engine |") if row[-1].startswith(("`h", "`cpu"))]
    named = {row[-1].strip("`") for row in lines}
    assert named == {name for name in CHECKS if name != "h100-vllm-0.33"}
    (choices,) = re.findall(r"all ([\d,]+) chosen experts", page("CORRECTNESS.md"))
    for _, where, _, said, run in lines:
        found = list(engines(CHECKS[run.strip("`")]))
        counts = {
            one[kind] for one in found for kind in ("same_tokens_as_stock", "greedy_same", "seeded_same") if kind in one
        }
        assert said in counts, (where, said)
        for one in found:
            if "choices" in one:
                same(choices, one["choices"])
                assert one["differing"] == 0
            assert one.get("steps_as_stock", True) and not one.get("rows_missing") and not one.get("problems")


def test_values_are_as_near_as_the_page_says() -> None:
    found = [(name, one) for name, run in CHECKS.items() if name != "h100-vllm-0.33" for one in engines(run)]
    rows = {one["rows"] for _, one in found if "rows" in one}
    whole = [(name, one) for name, one in found if "least_cosine" in one and not one.get("experts")]
    others = ("reduced", "drafts", "fp8")
    plain = [one["least_cosine"][0] for name, one in whole if not any(word in name for word in others)]
    (reduced,) = (one["least_cosine"][0] for one in engines(CHECKS["h200-check-reduced"]) if "least_cosine" in one)
    drafts, fp8 = (min(one["least_cosine"][0] for name, one in whole if word in name) for word in others[1:])
    assert rows == {5610} and "none of the 5,610 rows was missing" in page("CORRECTNESS.md")
    least = [
        str(Decimal(repr(value)).quantize(Decimal("0.0001"), ROUND_DOWN))
        for value in (min(plain), reduced, drafts, fp8)
    ]
    shown = table("CORRECTNESS.md", "| values | lowest cosine |")
    assert shown == [
        list(row) for row in zip(("not reduced", "reduced", "with EAGLE-3", "with an FP8 cache"), least, strict=True)
    ]


def test_the_page_about_models_has_the_table_of_the_results() -> None:
    """For a GPU it has the models that ran there, and no other model of their architectures."""
    found = results("models.json")
    gpu = found["gpu"]["models"]
    text = models.table(found["found"], found["gpu"])
    assert text in models.PAGE.read_text()
    ran = {line.split("`")[1] for line in text.splitlines()[2:] if not line.endswith("| not run |")}
    assert ran == {one["model"] for one in gpu.values()} and len(ran) == len(gpu)
    again, all_models = [row for row in table("CORRECTNESS.md", "| machine | engine |") if row[-1] == "`models.json`"]
    same_tokens = [list(map(int, one["same_tokens"].split(" of "))) for one in gpu.values()]
    assert all_models[3] == "{} of {}".format(*map(sum, zip(*same_tokens, strict=True)))
    assert again[3] == found["gpu"]["stock_again"]["gpt_neox"]["same_tokens_as_stock"]
    assert all_models[1].startswith(f"{len(gpu)} engines")
    assert f"| {len(gpu)} small models of other families" in page("COMPATIBILITY.md")


def test_models_on_a_gpu() -> None:
    gpu, text = results("models.json")["gpu"], " ".join(page("MODELS.md").split())
    later = gpu["models"].values()
    kernels, combined = (gpu["granite_kernels"][name] for name in ("kernels", "combinations"))
    assert f"each of the {sum(one['right'] for one in kernels.values())} configurations of its five kernels" in text
    assert f"with {combined['right']:,} random combinations" in text
    assert len(kernels) == 5 and max(one["largest_error"] for one in (combined, *kernels.values())) < 1e-5
    for one in (*later, *gpu["two_ranks"].values()):
        assert one["rows"] == 5610 and not one["rows_missing"] and not one["problems"], one["model"]
        assert one.get("largest_own_gap", 0.0) == 0.0
    ties = [one["largest_tie"] for one in later if one["rows_below"] is None and one["largest_tie"]]
    assert f"at most {max(ties):.1%}".replace("%", " %") in text
    beyond = {one["model"]: one["beyond_tie"] for one in later if one.get("beyond_tie")}
    assert beyond == {"mimo_v2_flash": 3, "minimax_m2": 8, "llama4": 2}
    assert "In `mimo_v2_flash`, `minimax_m2` and `llama4`, 3, 8 and 2 of 20" in text
    said = {name.strip("`"): (tokens, values) for name, tokens, values in table("MODELS.md", "| model | requests with")}
    assert said.keys() == {one["model"] for one in gpu["two_ranks"].values()}
    for one in gpu["two_ranks"].values():
        tokens, values = said[one["model"]]
        assert tokens == one["same_tokens"]
        if one["rows_below"] is None:
            same(values, one["cosine"])
        else:
            assert values == f"{1 - one['rows_below']:.1%}".replace("%", " %")


def test_images_on_a_gpu() -> None:
    said = {row[0].split("`")[1]: row[1] for row in table("MODELS.md", "| CUDA graph mode | lowest cosine")}
    engines = results("compat.json")["images_of_0.33"]["engines"]
    assert said.keys() == engines.keys()
    for mode, requests in engines.items():
        same(said[mode], min(found[0] for one in requests for found in one.values() if isinstance(found, list)))


def test_attention_with_an_indexer_on_a_gpu() -> None:
    checks = results("compat.json")["indexer_of_0.33"]["checks"]
    rows = table("MODELS.md", "| engine | `z`, lowest cosine |")
    assert [row[0] for row in rows] == list(checks)
    for (_, of_z, wrong, shared, near, tokens), one in zip(rows, checks.values(), strict=True):
        same(of_z, one["least_cosine_of_z"])
        same(shared, *one["chosen_in_common"].values())
        same(near, 1 - one["most_rows_below"][0])
        assert int(wrong) == one["rows_without_a_choice"] == one["rows_missing"] == len(one["problems"])
        assert f"compared {one['rows']:,} rows of each engine" in page("MODELS.md")
        assert tokens == one.get("same_tokens_as_stock", "not compared")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (0, "Gemma 3 4B, 34 of 34 layers, H100"),
        (1, "gpt-oss-20b, 12 of 24 layers, H100"),
        (2, "DeepSeek-V2-Lite, 14 of 27 layers, H100"),
        (3, "pythia, H200"),
        (4, "qwen3-moe, H200"),
        (5, "deepseek-v32, H200"),
    ],
)
def test_larger_shapes(row: int, name: str) -> None:
    found = results("models.json")["gpu"]["speed"][name]
    rows = table("MODELS.md", "| shapes | layers | GPU |")
    assert len(rows) == len(results("models.json")["gpu"]["speed"])
    *_, card, stock, null, stores = rows[row]
    assert name.endswith(card)
    cases = {s: report.measured(found, s)["decode32"] for s in ("stock", "hidden-states null", "hidden-states disk")}
    speeds = [cases["stock"]["tok_per_s"], cases["hidden-states disk"]["stock_tok_per_s"]]
    assert stock in [f"{speed:,.0f}" for speed in speeds]
    if "no figure" not in null:
        same(null, cases["hidden-states null"]["ratio"])
    same(stores, cases["hidden-states disk"]["ratio"])


# ---- docs/BULK.md, docs/READING.md -------------------------------------------------------------------------------


def test_dmi_run_beside_generate() -> None:
    found = results("cpu-bulk.json")["runs"]["cpu-bulk"]
    ratio = found["ratio"]
    assert ratio["median"] >= bulk.TARGET and ratio["rounds"] == 9 and found["header"]["clean"]
    generate, run = table("BULK.md", "| | tokens/s | median ratio")
    same(generate[1], found["rounds"]["generate"]["tok_per_s"])
    same(" ".join(run[1:]), found["rounds"]["run"]["tok_per_s"], ratio["median"], ratio["least"], ratio["most"])


def test_reads_beside_their_limits() -> None:
    run = results("cpu-reading.json")["runs"]["cpu-reading"]
    rows = table("READING.md", "| read | compared with | GB/s |")
    for row, one in zip(rows, run["of_limit"], strict=True):
        values = run["median"][one["read"]], run["median"][one["limit"]], one["ratio"], one["ratio_processor_time"]
        same(" ".join(row[2:]), *values)
    ranks = results("cpu-reading.json")["runs"]["cpu-reading-ranks"]["of_limit"]
    said = [row[1] for row in table("READING.md", "| read | speed |") if "`cpu-reading-ranks`" in row[1]]
    for name, speed in zip(("two ranks,", "two ranks by layer"), said, strict=True):
        ratios = [one["ratio"] for one in ranks if one["read"].startswith(name)]
        same(speed.split(" (")[0], min(ratios), max(ratios))


def test_reads_beside_those_of_an_earlier_commit() -> None:
    run = results("cpu-reading.json")["runs"]["cpu-reading-before"]
    parts = {name: one for name, one in run["of_before"].items() if " of " in name}
    assert list(parts) == [f"{read} of {limit}" for read, limit, _ in reading.BARS[: len(parts)]] and run["rounds"] > 9
    said = re.findall(
        r"\((\w+) to (\w+)\) \| (\S+) to (\S+) of the earlier speed in CPU time, medians of (\d+) rounds",
        page("ENGINEERING.md"),
    )
    [(before, after, least, most, rounds)] = said
    assert (before, after, rounds) == (run["before"], run["header"]["commit"], str(run["rounds"]))
    ratios = [one["ratio"] for one in parts.values()]
    same(f"{least} {most}", min(ratios), max(ratios))
    assert run["header"]["machine"]["cpu_cores"] == 1 and run["header"]["clean"]


# ---- docs/SCALE.md -----------------------------------------------------------------------------------------------


def test_the_page_about_scale_has_what_its_script_prints(tmp_path: Path) -> None:
    """The number of files per store equals that of a real store. The hooks are those of the selection."""
    assert scale.tables(1e9, [1, 8, 64], 0.023) in page("SCALE.md")
    hours, stored = scale.costs(scale.SELECTIONS[0], 1e9, 2)
    assert hours == pytest.approx(189_440 / 6.4 / 3600, rel=1e-6) and stored == pytest.approx(6.4 / 1.5)
    dims = ModelDims("Qwen3ForCausalLM", 36, 2560, 32, 8, 128, 9728, 151936)
    hooks = ["hidden-states", "mlp_post@16-19,resid_post@16-19", "vllm-full,-logits"]
    assert [one.arrays for one in scale.SELECTIONS] == [len(parse_selection(text, dims).hooks) for text in hooks]
    stores = storekit.Store()
    stores.write(tmp_path / "a.zarr", [ArraySpec("q", "bfloat16", (0, 1), 8), ArraySpec("z", "bfloat16", (0,), 8)], 200)
    assert stores.shutdown()
    files = [path for path in (tmp_path / "a.zarr").rglob("*") if path.is_file()]
    assert len(files) == scale.FIXED_FILES + 2 * 2


def test_the_page_about_scale_has_the_prediction_for_a_node() -> None:
    """The row sizes of Qwen3-4B are those of the page's other tables. Each limit follows its formula."""
    found, machine = results("cpu-node.json"), scale.Machine()
    assert scale.node_table(found, machine, node.SHOWN) in page("SCALE.md") and found["header"]["clean"]
    cases, codecs = list(found["rows"])[::3], ("zstd", "zstd", "lz4")
    sizes = [one.token_bytes for one in scale.SELECTIONS]
    assert [found["rows"][case]["DP 1"]["bytes"] for case in cases] == [pytest.approx(size, rel=1e-3) for size in sizes]
    for case, codec in zip(cases, codecs, strict=True):
        one, eight, tensor = (scale.node_limits(found, case, codec, at, machine) for at in ("DP 1", *node.SHOWN))
        size = found["rows"][case]["DP 1"]["bytes"]
        assert one["link"] == pytest.approx(50e9 / size) and eight["link"] == pytest.approx(8 * one["link"])
        assert tensor["link"] < eight["link"] and tensor["writers"] < eight["writers"]
        assert one["cores"] == pytest.approx(15 / 16 * one["writers"])
        stored = eight["disk"] * size / found["costs"][case][codec]["DP 8"]["compression"]
        assert stored == pytest.approx(20e9) and eight["disk"] < eight["memory"]
    slow = replace(machine, core_cost=2 * machine.core_cost, disk=10)
    slower, before = (scale.node_limits(found, cases[0], "zstd", "DP 8", one) for one in (slow, machine))
    halved = {"cores", "writers", "coordinator", "index", "disk"}
    assert {name for name in before if slower[name] == pytest.approx(before[name] / 2)} == halved


def test_data_parallel_engines_in_one_directory() -> None:
    with_prompts, rows = (128 + 384) / 384, (128 + 384 - 1) / 384
    shown = table("SCALE.md", "| engines | stock |")
    wanted = [(1, ["h200-two-servers", "h200-four-servers"]), (2, ["h200-two-servers"]), (4, ["h200-four-servers"])]
    for row, (count, runs) in zip(shown, wanted, strict=False):
        name = f"{count} engine{'s' * (count > 1)}"
        speeds = [
            [RANKS[run]["servers"][f"{kind}, {name}"]["tok_per_s"] for run in runs] for kind in ("stock", "capture")
        ]
        for text, of in zip(row[1:3], speeds, strict=True):
            same(text, *(speed * with_prompts / 1e3 for speed in of))
        same(row[3], *(speed * rows * scale.SELECTIONS[0].token_bytes / 1e9 for speed in speeds[1]))
        assert re.findall(r"`([\w-]+)`", row[4]) == runs
    speed = RANKS["h200-four-bulk"]["rounds"]["run"]["tok_per_s"]
    same(shown[3][2], speed / 1e3)
    same(shown[3][3], speed * scale.SELECTIONS[0].token_bytes / 1e9)


def test_four_gpus_beside_the_prediction() -> None:
    rows = {row[0]: row[2] for row in table("SCALE.md", "| | predicted | measured |")}
    per_row = (128 + 384 - 1) / 384
    small, large = (
        [engine["loads"]["short64"] for name, engine in RANKS[run]["engines"].items() if name != "stock"]
        for run in ("h200-four-sustained", "h200-four-70b")
    )

    def cpu_s(load: dict[str, Any]) -> list[float]:
        """CPU seconds of the writers per 1,000 tokens."""
        return [1e3 * c / s / per_row for c, s in zip(load["writers_cores"], load["tok_per_s"], strict=True)]

    spent = [one for load in small for one in cpu_s(load)]
    same(rows["Qwen3-4B, TP 4: CPU seconds of 1,000 tokens"].split(",")[0], min(spent), max(spent))
    same(rows["Llama-3-70B, TP 4: the same"], median(cpu_s(large[0])))
    speeds = [speed * per_row / 1e3 for load in small for speed in load["tok_per_s"]]
    same(rows["Qwen3-4B, TP 4"].split(",")[0], min(speeds), max(speeds))
    same(rows["Llama-3-70B, TP 4"].split(",")[0], median(large[0]["tok_per_s"]) * per_row / 1e3)


def test_the_index_by_the_number_of_captures() -> None:
    found = results("cpu-index.json")["entries"]
    for row in table("SCALE.md", "| captures | index |"):
        one = found[row[0].replace(",", "")]
        same(row[1], one["index_bytes"] / 1e6)
        for text, what in zip([row[2], row[3], row[4], row[6]], ("key", "request id", "all", "append"), strict=True):
            if what in one:
                same(text, one[what]["seconds"] * (1e3 if text.endswith("ms") else 1))
            else:
                assert text == "not run"
