# SPDX-License-Identifier: Apache-2.0
"""Latents of autoencoders in the tap: the option, and the output of the encoder in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector.hooks import ModelDims
from dmi_connector.option_values import OptionError
from dmi_connector.probes import with_probes
from dmi_connector.reduce import ReduceError, from_settings
from dmi_connector.reduce.latents import DEFAULT_K, Latents
from dmi_connector.reduce.sparse_encoder import SparseEncoder
from dmi_connector.settings import ServerOptions
from tests.probekit import save_encoder

DIMS = ModelDims("Qwen3ForCausalLM", 4, 32, 4, 2, 8, 64, 512)
CPU = torch.device("cpu")
WIDTH, LATENTS = 32, 100
KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "jumprelu": {"architecture": "jumprelu"},
    "topk": {"architecture": "topk", "k": 7},
    "gated": {"architecture": "gated"},
    "rescaled": {"normalize_activations": "constant_norm_rescale"},
    "layer norm": {"normalize_activations": "layer_norm", "apply_b_dec_to_input": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_latents_are_the_largest_of_the_encoder(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, WIDTH, LATENTS, **KINDS[name])
    latents = Latents.load(str(folder), "resid_pre", 2, 5).bind("resid_pre", (2,), WIDTH, 1)
    latents.prepare(WIDTH, CPU, 2, 0)
    values = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    stored = latents.encode(values, 2)
    assert stored.dtype == torch.uint8 and stored.shape == (60, latents.stored_width(WIDTH, "bfloat16"))
    want = SparseEncoder.load(folder).encode(values.float().numpy())
    assert (want > 0).sum(1).max() > 5, "too few latents are active"
    ids, found = latents.pairs(stored.numpy())
    np.testing.assert_allclose(found, -np.sort(-want, 1)[:, :5], rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.where(ids >= 0, np.take_along_axis(want, ids, 1), 0), found, rtol=0, atol=1e-5)
    assert ((ids < 0) == (found == 0)).all()
    dense = latents.decode(stored.numpy(), WIDTH, "bfloat16")
    np.testing.assert_array_equal(-np.sort(-dense, 1)[:, :5], found)
    assert from_settings(json.loads(json.dumps(latents.settings()))) == latents


def test_rows_with_few_active_latents_say_so(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, WIDTH, LATENTS, shift=3.0)  # hardly any latent is active
    latents = Latents.load(str(folder), "resid_pre", 2, 20).bind("resid_pre", (2,), WIDTH, 1)
    latents.prepare(WIDTH, CPU, 2, 0)
    values = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    want = SparseEncoder.load(folder).encode(values.numpy())
    ids, found = latents.pairs(latents.encode(values, 2).numpy())
    active = (want > 0).sum(1)
    assert 0 < active.max() < 20
    assert ((ids >= 0).sum(1) == active).all() and ((found > 0).sum(1) == active).all()


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_not_finite_are_noticed(name: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, WIDTH, LATENTS, **KINDS[name])
    latents = Latents.load(str(folder), "resid_pre", 2, 5).bind("resid_pre", (2,), WIDTH, 1)
    latents.prepare(WIDTH, CPU, 2, 0)
    values = torch.ones(2, WIDTH)
    values[0, 3] = float("nan")
    decoded = latents.decode(latents.encode(values, 2).numpy(), WIDTH, "float32")
    assert np.isfinite(decoded).all(1).tolist() == [False, True]


def parsed(folder: Path, *more: str) -> Latents:
    text = ", ".join([str(folder), *more])
    _, computed = with_probes(DIMS, ServerOptions.parse({"store_dir": "s", "probes": {"sae": text}}).probes, 1)
    found = computed["probe.sae"]
    assert isinstance(found, Latents)
    return found


def test_hook_and_layer_come_from_the_settings_or_the_option(tmp_path: Path) -> None:
    plain = save_encoder(tmp_path / "plain", WIDTH, LATENTS)
    assert (parsed(plain, "hook=ln2", "layer=1").source, DEFAULT_K) == ("ln2", parsed(plain, "hook=resid_final").k)
    named = save_encoder(tmp_path / "named", WIDTH, LATENTS, hook_name="blocks.1.hook_resid_post")
    assert (parsed(named).source, parsed(named).layers, parsed(named, "layer=2").layers) == ("resid_pre", (2,), (3,))
    inner = save_encoder(tmp_path / "inner", WIDTH, LATENTS, metadata={"hook_name": "blocks.3.hook_mlp_out"})
    assert (parsed(inner).source, parsed(inner).layers) == ("mlp_out", (3,))
    few = save_encoder(tmp_path / "few", WIDTH, LATENTS, architecture="topk", k=7)
    assert (parsed(few, "hook=q", "layer=1").k, parsed(few, "hook=q", "layer=1", "k=3").k) == (7, 3)
    assert parsed(plain, "hook=ln2", "layer=1", f"sha256={parsed(named).sha256}").latents == LATENTS  # the same weights


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "does not say which hook it encodes; add hook=NAME, layer=NUMBER"),
        (("hook=resid_pre",), "is of resid_pre, and names no layer; give one"),
        (("hook=resid_pre", "layer=4"), "does not exist in layer 4"),
        (("hook=mlp_post", "layer=1"), "of mlp_post with 32 values, but here it has 64"),
        (("hook=q", "layer=one"), "'layer=one' in .* is not valid; .* sha256=HASH, hook=NAME, layer=NUMBER, k=NUMBER"),
        (("hook=q", f"layer={'9' * 5000}"), "'layer=9+' in .* is not valid"),
        (("hook=q", "layer=1", "k=101"), "k=101 of .* the encoder keeps 100 latents of a row, give 1 to 100"),
        (("hook=q", "layer=1", "k=0"), "k=0 of .* is not valid"),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused(more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^probes: .*{message}"):
        parsed(save_encoder(tmp_path, WIDTH, LATENTS), *more)


def test_files_that_are_not_encoders_are_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, WIDTH, LATENTS)
    bad = save_encoder(tmp_path / "bad", WIDTH, LATENTS, shift=float("nan"))
    with pytest.raises(OptionError, match=r"cannot be used as a probe or an autoencoder .*not finite"):
        parsed(bad, "hook=q", "layer=1")
    with pytest.raises(OptionError, match="is an autoencoder, and each of 2 ranks has only a slice of q"):
        with_probes(DIMS, [("sae", f"{folder}, hook=q, layer=1")], 2)
    (folder / "cfg.json").unlink()
    with pytest.raises(OptionError, match=r"cannot be used .*cfg\.json does not exist"):
        parsed(folder, "hook=q", "layer=1")


def test_an_encoder_that_changed_since_the_start_is_noticed(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, WIDTH, LATENTS)
    latents = Latents.load(str(folder), "resid_pre", 2, 5)
    save_encoder(tmp_path, WIDTH, LATENTS, shift=0.25)
    with pytest.raises(ReduceError, match="has changed since the engine started; start it again"):
        latents.prepare(WIDTH, CPU, 2, 0)


def test_pictures_show_a_latent_or_how_many_are_active() -> None:
    rows = np.array([[0, 2, 0, 1], [0, 0, 0, 0.5]], np.float32)
    value, active = Latents(latents=4, k=2).statistics()
    assert (value.words(3), active.words(0)) == ("value of latent 3", "active latents")
    np.testing.assert_array_equal(value.of(rows, 3), [1, 0.5])
    np.testing.assert_array_equal(active.of(rows, 0), [2, 1])
