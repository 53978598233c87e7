# SPDX-License-Identifier: Apache-2.0
"""Encoders in the file formats of Gemma Scope and Llama Scope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.reduce.tensors import FloatTensors
from dmi_connector.view.latents import Latents

WIDTH, LATENTS = 8, 23
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((WIDTH, LATENTS), dtype=np.float32)
BIAS = RNG.standard_normal(LATENTS, dtype=np.float32)
SHIFT = RNG.standard_normal(WIDTH, dtype=np.float32)
ROWS = RNG.standard_normal((50, WIDTH), dtype=np.float32)
HYPERPARAMS: dict[str, Any] = {
    "act_fn": "jumprelu",
    "apply_decoder_bias_to_pre_encoder": False,
    "dataset_average_activation_norm": {"in": 6.3125, "out": 6.3125},
    "jump_relu_threshold": 0.75,
    "norm_activation": "dataset-wise",
    "top_k": 5,
}


def test_gemma_scope_is_jumprelu_without_a_shift(tmp_path: Path) -> None:
    threshold = RNG.uniform(0, 2, LATENTS).astype(np.float32)
    arrays = {"W_enc": WEIGHT, "W_dec": WEIGHT.T, "b_enc": BIAS, "b_dec": SHIFT, "threshold": threshold}
    np.savez(tmp_path / "params.npz", **arrays)
    want = ROWS.astype("f8") @ WEIGHT + BIAS
    want = np.where(want > threshold, np.maximum(want, 0), 0)
    for given in (tmp_path, tmp_path / "params.npz"):
        np.testing.assert_allclose(SparseEncoder.load(given).encode(ROWS), want, atol=1e-5)
    np.savez(tmp_path / "params.npz", W_enc=WEIGHT, b_enc=BIAS, threshold=np.arange(LATENTS))
    with pytest.raises(ValueError, match=r"params\.npz holds no threshold of floats"):
        SparseEncoder.load(tmp_path)
    (tmp_path / "params.npz").write_bytes(b"PK\3\4 torn")
    with pytest.raises(ValueError, match=r"params\.npz holds no tensors .*; give a file of safetensors"):
        SparseEncoder.load(tmp_path)


def test_arrays_of_numpy_are_read_as_float32(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", wide=WEIGHT.astype(np.float64), half=WEIGHT.astype(np.float16))
    tensors = FloatTensors(tmp_path / "a.npz")
    for name, tolerance in (("wide", 0), ("half", 1e-3)):
        found = tensors.get(name)
        assert found is not None and found.dtype == np.float32
        np.testing.assert_allclose(found, WEIGHT, rtol=tolerance)


class Runs:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of the file ran",)


def test_an_encoder_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    objects = np.array([Runs()], object)
    np.savez(tmp_path / "params.npz", W_enc=objects, b_enc=BIAS, threshold=BIAS)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        SparseEncoder.load(tmp_path)


def llama_scope(folder: Path, **settings: Any) -> Path:
    (folder / "checkpoints").mkdir(exist_ok=True)
    tensors = {
        "encoder.weight": np.ascontiguousarray(WEIGHT.T),
        "encoder.bias": BIAS,
        "decoder.weight": WEIGHT,
        "decoder.bias": SHIFT,
    }
    save_file(tensors, folder / "checkpoints/final.safetensors")
    (folder / "hyperparams.json").write_text(json.dumps({**HYPERPARAMS, **settings}))
    return folder


def test_llama_scope_scales_rows_to_their_average_norm(tmp_path: Path) -> None:
    rows = ROWS.astype("f8") * WIDTH**0.5 / 6.3125
    plain = rows @ WEIGHT + BIAS
    found = SparseEncoder.load(llama_scope(tmp_path)).encode(ROWS)
    np.testing.assert_allclose(found, np.where(plain > 0.75, plain, 0), atol=1e-5)
    assert (found > 0).any(1).all() and (found == 0).any(1).all()
    found = SparseEncoder.load(llama_scope(tmp_path, apply_decoder_bias_to_pre_encoder=True)).encode(ROWS)
    shifted = (rows - SHIFT) @ WEIGHT + BIAS
    np.testing.assert_allclose(found, np.where(shifted > 0.75, shifted, 0), atol=1e-5)
    found = SparseEncoder.load(llama_scope(tmp_path, act_fn="topk")).encode(ROWS)
    fifth = np.sort(plain, 1)[:, -5, None]
    np.testing.assert_allclose(found, np.where(plain >= fifth, np.maximum(plain, 0), 0), atol=1e-5)
    with pytest.raises(ValueError, match="norm_activation 'token-wise'; jumprelu, topk and relu work"):
        SparseEncoder.load(llama_scope(tmp_path, norm_activation="token-wise"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dataset_average_activation_norm None", {"dataset_average_activation_norm": None}),
        ("dataset_average_activation_norm 0", {"dataset_average_activation_norm": {"in": 0}}),
        ("jump_relu_threshold None", {"jump_relu_threshold": None}),
        ("top_k '5'", {"act_fn": "topk", "top_k": "5"}),
    ],
)
def test_settings_of_llama_scope_without_a_number_are_refused(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"hyperparams\.json has {name}; it needs a number (above 0|of at least 0)"):
        SparseEncoder.load(llama_scope(tmp_path, **settings))
    none, relu = (
        SparseEncoder.load(llama_scope(tmp_path, **it)) for it in ({"jump_relu_threshold": 0}, {"act_fn": "relu"})
    )
    np.testing.assert_array_equal(none.encode(ROWS), relu.encode(ROWS))


def test_the_page_takes_the_hook_of_llama_scope_from_its_settings(tmp_path: Path) -> None:
    folder = llama_scope(tmp_path, hook_point_in="blocks.12.hook_resid_post")
    for path in (folder, folder / "checkpoints/final.safetensors"):
        assert Latents.load(path, None).hook == "blocks.12.hook_resid_post"


def sae_lens(folder: Path, kind: str, **changed: np.ndarray) -> Path:
    names = {"gated": ("b_gate", "r_mag", "b_mag"), "jumprelu": ("b_enc", "threshold")}.get(kind, ("b_enc",))
    tensors = {"W_enc": WEIGHT, "W_dec": np.ascontiguousarray(WEIGHT.T), "b_dec": SHIFT, **dict.fromkeys(names, BIAS)}
    if kind == "batchtopk":
        tensors["topk_threshold"] = np.array([0.5], np.float32)
    save_file({**tensors, **changed}, folder / "sae.safetensors")
    config = {"architecture": kind, "apply_b_dec_to_input": True, "rescale_acts_by_decoder_norm": kind == "standard"}
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "name", "shape", "needs"),
    [
        ("standard", "b_enc", (7,), "[23]"),
        ("standard", "b_dec", (1,), "[8]"),
        ("standard", "W_dec", (8, 23), "[23, 8]"),
        ("jumprelu", "threshold", (1,), "[23]"),
        ("gated", "b_gate", (23, 1), "[23]"),
        ("gated", "r_mag", (4,), "[23]"),
        ("gated", "b_mag", (1,), "[23]"),
        ("batchtopk", "topk_threshold", (3,), "[1]"),
        ("jumprelu", "W_enc", (23, 8), None),
        ("jumprelu", "W_enc", (8,), None),
    ],
)
def test_tensors_that_do_not_fit_are_refused_when_they_are_read(
    kind: str, name: str, shape: tuple[int, ...], needs: str | None, tmp_path: Path
) -> None:
    assert SparseEncoder.load(sae_lens(tmp_path, kind)).encode(ROWS).shape == (50, LATENTS)
    folder = sae_lens(tmp_path, kind, **{name: np.ones(shape, np.float32)})
    with pytest.raises(ValueError) as error:
        SparseEncoder.load(folder)
    told = str(error.value)
    assert told.startswith(f"sae: {folder / 'sae.safetensors'}: ")
    if needs is not None:
        assert f"{name} has the shape {list(shape)}, W_enc [d_in, latents] needs {needs}" in told


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "batchtopk", "gated"])
def test_a_row_that_is_not_finite_has_only_latents_that_are_not_finite(kind: str, tmp_path: Path) -> None:
    rows = ROWS[:2].copy()
    rows[1, 3] = np.nan
    encoder = SparseEncoder.load(sae_lens(tmp_path, kind))
    assert np.isnan(encoder.encode(rows)[1]).all() and np.isfinite(encoder.encode(rows)[0]).all()
    with pytest.raises(ValueError, match=r"it takes rows \[rows, 8\], not an array \[8\]"):
        encoder.encode(rows[0])
