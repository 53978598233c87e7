# SPDX-License-Identifier: Apache-2.0
"""Stores as cached activations for SAELens and latents for Delphi, read by these libraries: `make types`."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import reading
from dmi_connector.captures.captures import open_captures
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import snippets
from tests import storekit as kit

sae_lens = pytest.importorskip("sae_lens", reason="sae_lens is not installed; run make types TYPES=sae-lens")
from sae_lens.config import LanguageModelSAERunnerConfig  # noqa: E402
from sae_lens.training.activations_store import ActivationsStore  # noqa: E402

from dmi_connector.analysis.export import packed, saelens  # noqa: E402

WIDTH, LATENTS, CONTEXT = 16, 40, 32
SPECS = (ArraySpec("resid_pre", "bfloat16", (0, 1), WIDTH), ArraySpec("z", "float32", (1,), WIDTH))
LENGTHS = (300, 40, 7, 90)
HOOK = "blocks.1.hook_resid_pre"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    owner = kit.Store(1 << 22)
    for number, length in enumerate(LENGTHS):
        owner.write(root / f"{number}.zarr", SPECS, length, attrs={"num_layers": 2}, chunk=32, segment=64)
    assert owner.shutdown()
    return root


def rows_of(stores: Path, skip: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(rows, token ids) of layer 1 of all stores."""
    captures = open_captures(stores)
    ids = np.concatenate([capture.token_ids[skip:] for capture in captures])
    return captures.rows("resid_pre", 1, skip)[:], ids


def reader(path: Path, hook: str = HOOK) -> ActivationsStore:
    """The activation store that SAELens' runner makes with `use_cached_activations`."""
    sae = sae_lens.StandardTrainingSAEConfig(d_in=WIDTH, d_sae=LATENTS, l1_coefficient=1e-3)
    config = LanguageModelSAERunnerConfig(
        sae=sae,
        dataset_path="none",
        hook_name=hook,
        context_size=CONTEXT,
        use_cached_activations=True,
        cached_activations_path=str(path),
        training_tokens=1000,
        store_batch_size_prompts=2,
        train_batch_size_tokens=64,
        n_batches_in_buffer=4,
        device="cpu",
        logger=sae_lens.LoggingConfig(log_to_wandb=False),
    )
    one = [{"tokens": [0] * CONTEXT}]
    import datasets

    return ActivationsStore.from_config(None, config, override_dataset=datasets.Dataset.from_list(one))


@pytest.mark.parametrize(("step", "batches"), [(1, 1), (1, 3), (5, 32)])
def test_saelens_reads_the_rows_and_tokens(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, batches: int
) -> None:
    monkeypatch.setattr(packed.PackedRows, "step", step)
    monkeypatch.setattr(saelens, "_BATCHES", batches)
    flags = ["--to", "saelens", "--hook", "resid_pre@1", "--context-size", str(CONTEXT), "--skip", "1"]
    assert main(["export", str(stores), *flags, "-o", str(tmp_path)]) == 0
    rows, ids = rows_of(stores, 1)
    assert len(list(tmp_path.glob("*.arrow"))) == -(-(len(rows) // CONTEXT) // (step * batches))
    whole = len(rows) // CONTEXT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = reader(tmp_path)
    assert len(found.cached_activation_dataset) == whole
    for first in range(0, whole - 1, 2):
        activations, tokens = found.get_raw_llm_batch(raise_on_epoch_end=True)
        span = slice(first * CONTEXT, (first + 2) * CONTEXT)
        assert torch.equal(activations, torch.from_numpy(rows[span])) and tokens.tolist() == ids[span].tolist()
    assert next(found).shape == (64, WIDTH), "its mixing buffer reads them too"


@pytest.mark.parametrize("batches", [1, 32])
def test_contexts_with_values_that_are_not_finite_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    owner = kit.Store(1 << 22)
    values = {spec.name: kit.random_bits(spec, 80) for spec in SPECS}
    owner.write(tmp_path / "in/a.zarr", SPECS, 80, attrs={"num_layers": 2}, values=values)
    broken = {**values, "resid_pre": values["resid_pre"].copy()}
    broken["resid_pre"][1, 40:, 3] = 0x7F80  # infinity
    owner.write(tmp_path / "in/b.zarr", SPECS, 80, attrs={"num_layers": 2}, values=broken)
    assert owner.shutdown()
    monkeypatch.setattr(packed.PackedRows, "step", 1)
    monkeypatch.setattr(saelens, "_BATCHES", batches)
    run = ["export", str(tmp_path / "in"), "--to", "saelens", "--hook", HOOK, "--context-size", "32", "-o"]
    for _ in range(2):
        assert main([*run, str(tmp_path / "out")]) == 3
        text, err = capsys.readouterr()
        assert text.startswith(f"{tmp_path / 'out'}: 3 contexts of 32 tokens")
        assert text.endswith("2 contexts left out: values that are not finite\n")
        assert err == f"dmi: {tmp_path / 'in/b.zarr'}: row 40 holds values that are not finite\n"
    dataset: Any = reader(tmp_path / "out").cached_activation_dataset
    rows, ids = rows_of(tmp_path / "in")
    found = torch.cat([dataset[i][HOOK] for i in range(len(dataset))])
    assert torch.equal(found, torch.from_numpy(rows[:96])) and torch.isfinite(found).all()
    assert dataset["token_ids"][:].tolist() == ids[:96].reshape(3, 32).tolist()
    assert main([*run, str(tmp_path / "kept"), "--finite", "keep"]) == 3
    assert capsys.readouterr().out.endswith("1 stores kept: values that are not finite\n")
    assert len(reader(tmp_path / "kept").cached_activation_dataset) == 5
    assert main([*run, str(tmp_path / "failed"), "--finite", "fail"]) == 3
    assert not (tmp_path / "failed/state.json").exists()


def test_saelens_refuses_another_hook(stores: Path, tmp_path: Path) -> None:
    flags = ["--to", "saelens", "--hook", "blocks.1.attn.hook_z", "--context-size", str(CONTEXT)]
    assert main(["export", str(stores), *flags, "-o", str(tmp_path)]) == 0
    assert reader(tmp_path, "blocks.1.attn.hook_z").cached_activation_dataset is not None
    with pytest.raises((ValueError, KeyError)):
        reader(tmp_path, HOOK)


def test_a_killed_run_continues(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--to", "saelens", "--hook", HOOK, "--context-size", str(CONTEXT), "-o", str(tmp_path)]
    code = f"""
import os
from dmi_connector.analysis.export import packed, saelens
from dmi_connector.cli.main import main
packed.PackedRows.step, saelens._BATCHES = 3, 1
read = packed.PackedRows.read
packed.PackedRows.read = lambda self, first, stop: os.kill(os.getpid(), 9) if first == 6 else read(self, first, stop)
main({["export", str(stores), *flags]!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9, killed.stderr
    parts = sorted(tmp_path.glob("*.arrow"))
    assert len(parts) == 2 and not (tmp_path / "state.json").exists()
    before = [part.stat().st_mtime_ns for part in parts]
    monkeypatch.setattr(packed.PackedRows, "step", 3)
    monkeypatch.setattr(saelens, "_BATCHES", 1)
    assert main(["export", str(stores), *flags]) == 0
    assert [part.stat().st_mtime_ns for part in parts] == before and not list(tmp_path.glob(".part*"))
    rows, _ = rows_of(stores)
    dataset: Any = reader(tmp_path).cached_activation_dataset
    found = torch.cat([dataset[i][HOOK] for i in range(len(dataset))])
    assert torch.equal(found, torch.from_numpy(rows[: len(found)])) and len(found) == len(rows) // CONTEXT * CONTEXT


def test_a_terminal_shows_the_number_of_finished_contexts(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed.PackedRows, "step", 5)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    flags = ["--to", "saelens", "--hook", HOOK, "--context-size", str(CONTEXT), "-o", str(tmp_path)]
    assert main(["export", str(stores), *flags]) == 0
    assert capsys.readouterr().err.endswith("".join(f"\r{n}/13 contexts exported" for n in (5, 10, 13)) + "\n")
    assert main(["export", str(stores), *flags]) == 0, "the second run writes nothing"
    assert capsys.readouterr().err.endswith("\r13/13 contexts exported\n")


def test_other_stores_and_mistakes_are_named(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--to", "saelens", "-o", str(tmp_path)]
    for extra, words in (
        ([], "saelens needs --hook"),
        (["--hook", "resid_pre"], "has layers [0, 1]; name one"),
        (["--hook", "resid_pre@x"], "names no layer"),
        (["--hook", "resid_pre@1", "--context-size", "1000"], "too few for a context of 1000"),
        (["--hook", "resid_pre@1", "--context-size", "0"], "too few for a context of 0"),
    ):
        assert main(["export", str(stores), *flags, *extra]) == 2
        assert words in capsys.readouterr().err
    assert main(["export", str(stores), *flags, "--hook", "resid_pre@1"]) == 0
    assert main(["export", str(stores / "0.zarr"), *flags, "--hook", "resid_pre@1"]) == 2
    assert "written from other stores" in capsys.readouterr().err


def test_the_pages_commands_work(stores: Path, tmp_path: Path) -> None:
    (words,) = snippets.commands("SAELens")
    names = {"captures": str(stores), "resid_pre@12": "resid_pre@1", "data/activations": str(tmp_path / "activations")}
    assert main([names.get(word, word) for word in words[1:]]) == 0
    names = snippets.run("SAELens", {"path": str(tmp_path / "activations")})
    assert names["rows"].column_names == [HOOK, "token_ids"]


def test_the_reading_benchmark_compares_the_export_with_reading_and_writing(tmp_path: Path) -> None:
    out, directory = tmp_path / "reading.json", tmp_path / "stores"
    argv = ["--out", str(out), "--directory", str(directory), "--only", "export", "--many", "5", "--repeat", "1"]
    assert reading.main(argv) == 0
    results = json.loads(out.read_text())
    bars = [bar for bar in reading.BARS if bar[0].startswith("export")]
    assert [(one["read"], one["limit"], one["bar"]) for one in results["of_limit"]] == bars and len(bars) == 2
    assert min(results["median"].values()) > 0 and not directory.exists()
