# SPDX-License-Identifier: Apache-2.0
"""Latents of stores in Delphi's format, compared with the encoders of SAELens and sparsify, and read by Delphi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmi_connector.captures.captures import open_captures
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import snippets
from tests import storekit as kit

pytest.importorskip("delphi", reason="delphi is not installed; run make types TYPES=sae-lens")
import sae_lens
from delphi.config import ConstructorConfig, SamplerConfig
from delphi.latents import LatentCache
from safetensors.numpy import load_file
from sparsify import SparseCoder, SparseCoderConfig

WIDTH, LATENTS, CONTEXT, SPLITS = 16, 48, 32, 3
HOOK = "blocks.1.hook_mlp_out"
Encode = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    owner = kit.Store(1 << 22)
    for number, length in enumerate((300, 40, 7, 90)):
        spec = ArraySpec("mlp_out", "float32", (0, 1), WIDTH)
        owner.write(root / f"{number}.zarr", [spec], length, attrs={"num_layers": 2}, chunk=32, segment=64)
    assert owner.shutdown()
    return root


def of_sae_lens(name: str, config: str, path: Path, **fields: Any) -> Encode:
    """Save a random autoencoder of SAELens. Returns its encoder."""
    sae = getattr(sae_lens, name)(getattr(sae_lens, config)(d_in=WIDTH, d_sae=LATENTS, **fields))
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
        if hasattr(sae, "threshold"):
            sae.threshold.abs_()
    sae.save_model(path)
    return sae.encode


def of_sparsify(path: Path) -> Encode:
    """Save a random sparse coder. Returns its encoder, whose latents are dense."""
    coder = SparseCoder(WIDTH, SparseCoderConfig(num_latents=LATENTS, k=5), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in coder.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    coder.save_to_disk(path)

    def encode(rows: torch.Tensor) -> torch.Tensor:
        found = coder.encode(rows)
        return torch.zeros(len(rows), LATENTS).scatter(1, found.top_indices, found.top_acts)

    return encode


MAKE: dict[str, Callable[[Path], Encode]] = {
    "standard": lambda path: of_sae_lens("StandardSAE", "StandardSAEConfig", path),
    "without-b_dec": lambda path: of_sae_lens("StandardSAE", "StandardSAEConfig", path, apply_b_dec_to_input=False),
    "jumprelu": lambda path: of_sae_lens("JumpReLUSAE", "JumpReLUSAEConfig", path),
    "gated": lambda path: of_sae_lens("GatedSAE", "GatedSAEConfig", path),
    "rescaled": lambda path: of_sae_lens(
        "StandardSAE", "StandardSAEConfig", path, normalize_activations="constant_norm_rescale"
    ),
    "layer-norm": lambda path: of_sae_lens(
        "StandardSAE", "StandardSAEConfig", path, normalize_activations="layer_norm"
    ),
    "topk": lambda path: of_sae_lens("TopKSAE", "TopKSAEConfig", path, k=5),
    "topk-rescaled": lambda path: of_sae_lens("TopKSAE", "TopKSAEConfig", path, k=5, rescale_acts_by_decoder_norm=True),
    "sparsify": of_sparsify,
}


def own_cache(stores: Path, encode: Encode, out: Path) -> None:
    """Write the cache of the same rows and latents with Delphi itself."""
    captures = open_captures(stores)
    rows = torch.from_numpy(captures.rows("mlp_out", 1)[:])
    contexts = len(rows) // CONTEXT
    ids = torch.cat([torch.from_numpy(capture.token_ids) for capture in captures]).long()[: contexts * CONTEXT]
    cache = LatentCache(None, {}, batch_size=contexts)
    with torch.no_grad():
        latents = encode(rows[: contexts * CONTEXT]).reshape(contexts, CONTEXT, LATENTS)
    cache.cache.add(latents, ids.reshape(contexts, CONTEXT), 0, HOOK)
    cache.cache.save()
    cache.width = LATENTS
    cache.save_splits(SPLITS, out)


@pytest.mark.parametrize("kind", MAKE)
def test_the_files_are_those_that_delphi_writes(stores: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    encode = MAKE[kind](tmp_path / "sae")
    own_cache(stores, encode, tmp_path / "theirs")
    flags = ["--hook", "mlp_out@1", "--sae", str(tmp_path / "sae"), "--context-size", str(CONTEXT)]
    out = tmp_path / "ours"
    assert main(["export", str(stores), "--to", "delphi", *flags, "--splits", str(SPLITS), "-o", str(out)]) == 0
    files = sorted(path.name for path in (tmp_path / "theirs" / HOOK).iterdir())
    assert sorted(path.name for path in (out / HOOK).glob("*.safetensors")) == files and len(files) == SPLITS
    for name in files:
        have, want = load_file(out / HOOK / name), load_file(tmp_path / "theirs" / HOOK / name)
        assert len(want["locations"]) > 50 and have["locations"].dtype == want["locations"].dtype
        assert (have["locations"] == want["locations"]).all() and (have["tokens"] == want["tokens"]).all()
        assert have["activations"].dtype == want["activations"].dtype
        assert abs(have["activations"].astype("f4") - want["activations"].astype("f4")).max() < 0.01


def test_delphi_reads_the_latents(stores: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encode = MAKE["topk"](tmp_path / "sae")
    names = {"captures": str(stores), "sae": str(tmp_path / "sae"), "latents": str(tmp_path / "latents")}
    (words,) = snippets.commands("Delphi")
    filled = [names.get(word, word).replace("@12", "@1") for word in words]
    assert main(filled[1:]) == 0
    rows = open_captures(stores).rows("mlp_out", 1)[:]
    contexts = len(rows) // 256
    given = {"sampler_config": SamplerConfig(), "constructor_config": ConstructorConfig(), "tokenizer": object()}
    read = snippets.run("Delphi", {"latents": names["latents"], **given})["dataset"]
    assert read.modules == [HOOK] and read.cache_config["cache_ctx_len"] == 256
    assert read.tokens.shape == (contexts, 256)
    found = torch.zeros(contexts, 256, LATENTS)
    for buffer in read.buffers:
        for latent in buffer:
            at = latent.activation_data.locations
            found[at[:, 0], at[:, 1], latent.latent.latent_index] = latent.activation_data.activations.float()
    with torch.no_grad():
        want = encode(torch.from_numpy(rows[: contexts * 256])).reshape(contexts, 256, LATENTS)
    torch.testing.assert_close(found, want, atol=0.01, rtol=0)
