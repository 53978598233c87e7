# SPDX-License-Identifier: Apache-2.0
"""Encoders of autoencoders, and their latents cached in Delphi's format. tests/types uses the real libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dmi_connector.analysis.export import delphi
from dmi_connector.analysis.export.packed import PackedRows
from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.captures.captures import open_captures
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import storekit as kit

WIDTH, LATENTS, CONTEXT = 8, 23, 16
LENGTHS = (100, 30, 50)
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    owner = kit.Store(1 << 22)
    for number, length in enumerate(LENGTHS):
        spec = ArraySpec("mlp_out", "float32", (0, 1), WIDTH)
        owner.write(root / f"{number}.zarr", [spec], length, attrs={"num_layers": 2}, chunk=16, segment=32)
    assert owner.shutdown()
    return root


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(config, leave_out=(), **tensors): write an autoencoder to disk."""

    def call(config: dict[str, Any] | None = None, leave_out: tuple[str, ...] = (), **tensors: np.ndarray) -> Path:
        rng = np.random.default_rng(0)
        made = {
            "W_enc": rng.standard_normal((WIDTH, LATENTS), dtype=np.float32),
            "b_enc": rng.standard_normal(LATENTS, dtype=np.float32) - 1,
            "b_dec": rng.standard_normal(WIDTH, dtype=np.float32),
            "W_dec": rng.standard_normal((LATENTS, WIDTH), dtype=np.float32),
            **tensors,
        }
        folder = tmp_path / "sae"
        folder.mkdir(exist_ok=True)
        save_file({name: t for name, t in made.items() if name not in leave_out}, folder / "sae_weights.safetensors")
        (folder / "cfg.json").write_text(json.dumps({"architecture": "standard", **(config or {})}))
        return folder

    return call


def dense(rows: np.ndarray, folder: Path, shifted: bool = True) -> np.ndarray:
    """Latents computed as relu((x - b_dec) W_enc + b_enc)."""
    t = load_file(folder / "sae_weights.safetensors")
    return np.maximum((rows - t["b_dec"] * shifted).astype("f8") @ t["W_enc"] + t["b_enc"], 0)


def test_an_encoder_of_each_architecture_gives_its_latents(save: Save) -> None:
    rows = np.random.default_rng(1).standard_normal((50, WIDTH), dtype=np.float32)
    folder = save()
    np.testing.assert_allclose(SparseEncoder.load(folder).encode(rows), dense(rows, folder), atol=1e-5)
    folder = save({"apply_b_dec_to_input": False})
    np.testing.assert_allclose(SparseEncoder.load(folder).encode(rows), dense(rows, folder, False), atol=1e-5)
    threshold = np.full(LATENTS, 0.7, np.float32)
    folder = save({"architecture": "jumprelu"}, threshold=threshold)
    want = dense(rows, folder)
    np.testing.assert_allclose(SparseEncoder.load(folder).encode(rows), np.where(want > 0.7, want, 0), atol=1e-5)
    folder = save({"architecture": "topk", "k": 3})
    found = SparseEncoder.load(folder).encode(rows)
    want = np.where(dense(rows, folder) >= np.sort(dense(rows, folder), axis=1)[:, -3:-2], dense(rows, folder), 0)
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert ((found > 0).sum(1) <= 3).all() and (found > 0).sum() > 50


def test_a_gated_encoder_gives_the_magnitudes_of_open_latents(save: Save) -> None:
    rng = np.random.default_rng(2)
    tensors = {name: rng.standard_normal(LATENTS, dtype=np.float32) for name in ("b_gate", "r_mag", "b_mag")}
    folder = save({"architecture": "gated"}, leave_out=("b_enc",), **tensors)
    rows, t = rng.standard_normal((50, WIDTH), dtype=np.float32), load_file(folder / "sae_weights.safetensors")
    inner = (rows - t["b_dec"]).astype("f8")
    magnitudes = np.maximum(inner @ (t["W_enc"] * np.exp(t["r_mag"])) + t["b_mag"], 0)
    want = np.where(inner @ t["W_enc"] + t["b_gate"] > 0, magnitudes, 0)
    np.testing.assert_allclose(SparseEncoder.load(folder).encode(rows), want, rtol=1e-3, atol=1e-4)
    assert 0 < (want > 0).sum() < (magnitudes > 0).sum()


@pytest.mark.parametrize("kind", ["batchtopk", "matryoshka_batchtopk"])
def test_a_batch_topk_encoder_keeps_latents_above_the_threshold_of_its_training(save: Save, kind: str) -> None:
    rows = np.random.default_rng(1).standard_normal((50, WIDTH), dtype=np.float32)
    folder = save({"architecture": kind, "k": 2.5}, topk_threshold=np.array(0.9, np.float64))
    want = dense(rows, folder)
    np.testing.assert_allclose(SparseEncoder.load(folder).encode(rows), np.where(want > 0.9, want, 0), atol=1e-5)


def test_rows_are_normalised_as_the_encoder_was_trained(save: Save) -> None:
    rows = 3 + 5 * np.random.default_rng(1).standard_normal((50, WIDTH), dtype=np.float32)
    scaled = rows * np.sqrt(WIDTH) / np.linalg.norm(rows, axis=1, keepdims=True)
    centred = rows - rows.mean(1, keepdims=True)
    layer = centred / (np.sqrt((centred**2).sum(1, keepdims=True) / (WIDTH - 1)) + 1e-5)
    digests = set()
    for norm, normed in (("none", rows), ("constant_norm_rescale", scaled), ("layer_norm", layer)):
        folder = save({"normalize_activations": norm})
        encoder = SparseEncoder.load(folder)
        np.testing.assert_allclose(encoder.encode(rows), dense(normed, folder), rtol=1e-4, atol=1e-4)
        digests.add(encoder.digest)
    assert len(digests) == 3


def test_unsupported_encoders_and_rows_are_refused_with_the_reason(save: Save, tmp_path: Path) -> None:
    for config, words in (
        ({"architecture": "temporal"}, "architecture 'temporal'"),
        ({"normalize_activations": "expected_average_only_in"}, "normalize_activations 'expected_average_only_in'"),
        ({"architecture": "gated"}, "holds no b_gate of floats"),
        ({"architecture": "batchtopk", "k": 3}, "holds no topk_threshold of floats"),
    ):
        with pytest.raises(ValueError, match=words):
            SparseEncoder.load(save(config))
    with pytest.raises(ValueError, match="holds no b_enc of floats; it holds W_dec, W_enc, b_dec"):
        SparseEncoder.load(save(leave_out=("b_enc",)))
    folder = save()
    with pytest.raises(ValueError, match="takes rows of 8 values, the hook has 9"):
        SparseEncoder.load(folder).encode(np.zeros((2, 9), np.float32))
    save_file({}, folder / "more.safetensors")
    with pytest.raises(ValueError, match="holds 2 safetensors files"):
        SparseEncoder.load(folder)
    (folder / "cfg.json").unlink()
    with pytest.raises(ValueError, match=r"cfg\.json does not exist"):
        SparseEncoder.load(folder / "sae_weights.safetensors")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        SparseEncoder.load(tmp_path / "nowhere")


def check(out: Path, stores: Path, folder: Path, splits: int) -> None:
    """Fail unless the files of a module have all latents of all contexts."""
    rows = open_captures(stores).rows("mlp_out", 1)[:]
    contexts = len(rows) // CONTEXT
    want = dense(rows[: contexts * CONTEXT], folder).reshape(contexts, CONTEXT, LATENTS)
    found = np.zeros_like(want)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == splits
    for path in files:
        first, last = map(int, path.stem.split("_"))
        part = load_file(path)
        at = part["locations"].astype(int)
        assert part["locations"].dtype == np.uint16 and part["activations"].dtype == np.float16
        assert part["tokens"].shape == (contexts, CONTEXT) and at[:, 2].max() <= last - first
        assert np.array_equal(at, at[np.lexsort(at.T[::-1])]), "latents must be ordered by context"
        found[at[:, 0], at[:, 1], at[:, 2] + first] = part["activations"]
    np.testing.assert_allclose(found, want, atol=5e-3)


@pytest.mark.parametrize(("splits", "values"), [(1, 1 << 24), (5, 2 * CONTEXT * LATENTS)])
def test_all_latents_of_all_contexts_are_written(
    stores: Path, tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, splits: int, values: int
) -> None:
    monkeypatch.setattr(delphi, "_STEP_VALUES", values)
    folder, out = save(), tmp_path / "latents"
    flags = ["--hook", "mlp_out@1", "--sae", str(folder), "--context-size", str(CONTEXT), "--splits", str(splits)]
    assert main(["export", str(stores), "--to", "delphi", *flags, "-o", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["blocks.1.hook_mlp_out"], "Delphi treats every entry as a module"
    check(out / "blocks.1.hook_mlp_out", stores, folder, splits)
    assert not list(out.rglob("*.partial"))


def test_the_defaults_are_contexts_of_256_tokens_and_five_files(tmp_path: Path, save: Save) -> None:
    owner, attrs = kit.Store(1 << 20), {"num_layers": 2, "model": "a/model"}
    owner.write(tmp_path / "a" / "a.zarr", [ArraySpec("mlp_out", "float32", (1,), WIDTH)], 520, attrs=attrs)
    assert owner.shutdown()
    out, seen = tmp_path / "latents", []
    flags = {"hook": "mlp_out@1", "sae": str(save())}
    captures, finite = open_captures(tmp_path / "a"), FiniteCheck("skip")
    out.mkdir()
    done = delphi.export(captures, out, lambda *counts: seen.append(counts), finite, **flags)
    assert done.notes == ("2 contexts of 256 tokens, 23 latents; 8 tokens left over",) and seen[-1] == (2, 2)
    files = sorted(out.glob("*/*.safetensors"))
    assert done.written == len(files) == 5 and done.kept == 0
    assert all(load_file(path)["tokens"].shape == (2, 256) for path in files)
    config = json.loads((files[0].parent / "config.json").read_text())
    assert config == {
        "dataset_repo": str(tmp_path / "a"),
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": "token_ids",
        "batch_size": 1,
        "cache_ctx_len": 256,
        "n_tokens": 512,
        "n_splits": 5,
        "model_name": "a/model",
    }
    settings = json.loads((files[0].parent / ".dmi-export.json").read_text())["settings"]
    assert len(settings.pop("sae_digest")) == 64
    told = {"to": "delphi", "hook": "mlp_out@1", "context_size": 256, "skip": 0, "splits": 5}
    assert settings == {**told, "sae": flags["sae"]}
    again = delphi.export(captures, out, lambda *counts: seen.append(counts), finite, **flags)
    assert (again.written, again.kept, again.notes) == (0, 5, done.notes)


def test_a_negative_layer_gets_its_number(stores: Path, tmp_path: Path, save: Save) -> None:
    folder, out = save(), tmp_path / "latents"
    flags = ["--sae", str(folder), "--context-size", str(CONTEXT), "-o", str(out)]
    for layer in ("-1", "1"):  # the second run finds the files of the first one
        assert main(["export", str(stores), "--to", "delphi", "--hook", f"mlp_out@{layer}", *flags]) == 0
    assert [path.name for path in out.iterdir()] == ["blocks.1.hook_mlp_out"]
    check(out / "blocks.1.hook_mlp_out", stores, folder, 5)


def test_rows_of_a_hook_without_another_name_have_its_number(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [ArraySpec("q", "float32", (0, 2), WIDTH)], 20, attrs={"num_layers": 3})
    assert owner.shutdown()
    rows = [PackedRows(open_captures(tmp_path), hook, CONTEXT) for hook in ("q@-1", "q@2", "q@-3")]
    assert [(packed.hook, packed.name) for packed in rows] == [("q@2", "q@2"), ("q@2", "q@2"), ("q@0", "q@0")]
    assert np.array_equal(rows[0].read(0, 1), rows[1].read(0, 1))


def test_a_killed_run_continues_without_its_last_entries(
    stores: Path, tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = save(), tmp_path / "latents"
    flags = ["--hook", "mlp_out@1", "--sae", str(folder), "--context-size", str(CONTEXT), "--splits", "2"]
    argv = ["export", str(stores), "--to", "delphi", *flags, "-o", str(out)]
    code = f"""
import os
from dmi_connector.analysis.export import delphi
from dmi_connector.cli.main import main
delphi._STEP_VALUES = {2 * CONTEXT * LATENTS}
append, seen = delphi._Parts._append, []
def dies(self, name, values):
    append(self, name, values)
    seen.append(name)
    if len(seen) == 10:  # after half of the files of the third step
        os.kill(os.getpid(), 9)
delphi._Parts._append = dies
main({argv!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9, killed.stderr
    module = out / "blocks.1.hook_mlp_out"
    counted = json.loads((module / ".parts.partial" / "count.json").read_text())
    assert counted["contexts"] == 4 and not list(module.glob("*.safetensors"))
    first: list[int] = []
    encode = delphi._encode
    monkeypatch.setattr(delphi, "_encode", lambda *args: first.append(args[3]) or encode(*args))
    assert main(argv) == 0
    assert first[0] == 4, "it continues after the contexts that were counted"
    check(module, stores, folder, 2)
    assert main(argv) == 0 and len(first) == len(set(first)), "a third run must do nothing"


@pytest.mark.parametrize(
    ("latents", "edges"),
    [
        (7, [0, 7]),
        (5, [0, 1, 2, 3, 4, 5]),
        (24576, [0, 4915, 9830, 14745, 19660, 24576]),
        (16, [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 16]),
        (
            131072,
            [0, 9362, 18724, 28086, 37449, 46811, 56173, 65535, 74898, 84260, 93622, 102985, 112347, 121709, 131072],
        ),
        ((1 << 24) + 1, [0, 4194304, 8388608, 12582912, 16777216]),
    ],
)
def test_files_begin_and_end_where_delphis_do(latents: int, edges: list[int]) -> None:
    """edges: torch.linspace(0, latents, splits + 1).long(), Delphi's boundaries (torch 2.13, AVX2 and AVX-512)."""
    bounds = delphi._bounds(latents, len(edges) - 1)
    assert [first for first, _ in bounds] == edges[:-1] and [last + 1 for _, last in bounds] == edges[1:]


def test_splits_begin_at_the_same_latents_as_delphis() -> None:
    """torch.linspace(0, 24576, 124).long()[[40, 41, 42]] and torch.linspace(0, 100, 91).long()[[44, 45, 46]]."""
    assert [delphi._bounds(24576, 123)[i][0] for i in (40, 41, 42)] == [7992, 8191, 8391]
    assert [delphi._bounds(100, 90)[i][0] for i in (44, 45, 46)] == [48, 49, 51]


def test_splits_that_do_not_fit_are_named(
    stores: Path, tmp_path: Path, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--to", "delphi", "--hook", "mlp_out@1", "--sae", str(save()), "--context-size", str(CONTEXT)]
    for splits in ("0", "24"):
        assert main(["export", str(stores), *flags, "--splits", splits, "-o", str(tmp_path / "x")]) == 2
        assert f"--splits {splits} is not valid; use 1 to 23" in capsys.readouterr().err


def test_older_configs_of_saelens_are_read(save: Save) -> None:
    for config in (
        {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}},
        {"architecture": "topk", "activation_fn_kwargs": {"k": 3}},
    ):
        assert SparseEncoder.load(save(config)).k == 3
    assert SparseEncoder.load(save({"activation_fn_str": "relu", "activation_fn_kwargs": {}})).k is None


@pytest.mark.parametrize("named", [{}, {"activation": "topk"}])
def test_an_encoder_of_sparsify_keeps_its_k_largest_latents(save: Save, tmp_path: Path, named: dict[str, Any]) -> None:
    """The configs of published encoders name no activation."""
    folder, rows = save({"k": 3}), np.random.default_rng(1).standard_normal((50, WIDTH), dtype=np.float32)
    t, own = load_file(folder / "sae_weights.safetensors"), tmp_path / "sparsify"
    own.mkdir()
    weights = {"encoder.weight": np.ascontiguousarray(t["W_enc"].T), "encoder.bias": t["b_enc"], "b_dec": t["b_dec"]}
    save_file(weights, own / "sae.safetensors")
    facts = {"expansion_factor": 32, "normalize_decoder": True, "num_latents": LATENTS, "k": 3, "d_in": WIDTH}
    (own / "cfg.json").write_text(json.dumps({**facts, **named}))
    want = SparseEncoder.load(save({"architecture": "topk", "k": 3})).encode(rows)
    np.testing.assert_array_equal(SparseEncoder.load(own).encode(rows), want)
    del facts["k"]
    (own / "cfg.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="k None; a topk encoder needs"):
        SparseEncoder.load(own)


@pytest.mark.parametrize(
    "config, said",
    [
        ({"architecture": "topk"}, "k None"),
        ({"activation_fn_str": "tanh-relu"}, "activation_fn_str 'tanh-relu'"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor True"),
    ],
)
def test_configs_with_unsupported_settings_are_refused(save: Save, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SparseEncoder.load(save(config))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_not_an_object_is_named(save: Save, text: str) -> None:
    config = save() / "cfg.json"
    config.write_text(text)
    with pytest.raises(ValueError, match=r"cfg\.json"):
        SparseEncoder.load(config.parent)


def test_an_export_of_other_weights_at_the_same_place_is_refused(
    stores: Path, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--hook", "mlp_out@1", "--context-size", str(CONTEXT), "-o", str(tmp_path / "out")]
    export = ["export", str(stores), "--to", "delphi", "--sae", str(save()), *flags]
    assert main(export) == 0
    save(b_enc=np.zeros(LATENTS, np.float32))
    assert main(export) == 2
    assert "sae_digest" in capsys.readouterr().err


def test_rows_of_long_contexts_are_not_cut_to_16_bits(save: Save, tmp_path: Path) -> None:
    owner, length = kit.Store(1 << 24), 65_600
    owner.write(
        tmp_path / "long/a.zarr", [ArraySpec("mlp_out", "float32", (), WIDTH)], length, chunk=4096, segment=8192
    )
    assert owner.shutdown()
    flags = ["--hook", "mlp_out", "--sae", str(save()), "--context-size", str(length), "--splits", "1"]
    assert main(["export", str(tmp_path / "long"), "--to", "delphi", *flags, "-o", str(tmp_path / "out")]) == 0
    rows = load_file(next((tmp_path / "out").rglob("*.safetensors")))["locations"][:, 1]
    assert rows.dtype == np.uint32 and rows.max() >= 1 << 16 and (np.diff(rows.astype(int)) >= 0).all()
