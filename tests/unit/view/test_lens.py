# SPDX-License-Identifier: Apache-2.0
"""The logit lens against the final norm and the unembedding of transformers' own models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dmi_connector.cli.tiny_models import make_model
from dmi_connector.store.read.capture import open_capture
from dmi_connector.view.lens import Lens, Weights, residual_rows
from tests import viewkit

NORMS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "qwen3": lambda m: m.model.norm,  # type: ignore[union-attr, return-value]
    "llama": lambda m: m.model.norm,  # type: ignore[union-attr, return-value]
    "gpt2": lambda m: m.transformer.ln_f,  # type: ignore[union-attr, return-value]
    "gemma2": lambda m: m.model.norm,  # type: ignore[union-attr, return-value]
    "granite": lambda m: m.model.norm,  # type: ignore[union-attr, return-value]
    "cohere2": lambda m: m.model.norm,  # type: ignore[union-attr, return-value]
    "opt": lambda m: m.model.decoder.final_layer_norm,  # type: ignore[union-attr, return-value]
    "bloom": lambda m: m.transformer.ln_f,  # type: ignore[union-attr, return-value]
}


@pytest.mark.parametrize("arch", NORMS)
def test_the_lens_gives_the_models_own_logits(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(arch, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in NORMS[arch](model).named_parameters():
            weight.copy_(
                torch.linspace(0.5, 1.5, len(weight)) if name == "weight" else torch.linspace(-1, 1, len(weight))
            )
    model.save_pretrained(folder)
    lens = Lens.of(folder)
    rows = np.random.default_rng(0).standard_normal((3, lens.unembedding.shape[1])).astype("f4") * 5
    captured: list[torch.Tensor] = []
    hook = NORMS[arch](model).register_forward_pre_hook(lambda _, args: (torch.from_numpy(rows)[None],))
    after = model.register_forward_hook(lambda _m, _a, out: captured.append(out.logits))
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
    hook.remove()
    after.remove()
    wanted = torch.softmax(captured[0][0].double(), -1)
    ids, shares = lens.top(rows, 5)
    np.testing.assert_array_equal(ids, wanted.topk(5).indices.numpy())
    np.testing.assert_allclose(shares, wanted.topk(5).values.numpy(), rtol=1e-4)


def test_the_last_place_gives_the_logits_that_the_engine_stored(tmp_path: Path) -> None:
    real = viewkit.unpack(tmp_path)
    lens = Lens.of(make_model("qwen3", tmp_path / "model"))
    with open_capture(real / "full.zarr") as capture:
        for logits, row in zip(capture.numpy("logits"), capture.logits_positions, strict=True):
            places, rows = residual_rows(capture, int(row))
            assert places == ["0", "1", "2", "final"]
            ids, shares = lens.top(rows, 5)
            wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            np.testing.assert_allclose(shares[-1], wanted[ids[-1]], rtol=0.05)  # bfloat16
            assert logits[ids[-1, 0]] >= logits.max() - 0.05


def test_weights_of_several_files_and_of_bfloat16_are_found(tmp_path: Path) -> None:
    from ml_dtypes import bfloat16

    rows = np.arange(6, dtype="f4").reshape(2, 3).astype(bfloat16)
    save_file({"lm_head.weight": rows}, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": np.ones(3, "f4")}, tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-6}))
    lens = Lens.of(tmp_path)
    np.testing.assert_array_equal(lens.unembedding.astype("f4"), rows.astype("f4"))
    assert not lens.centred


def test_a_directory_that_lacks_something_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no readable config\.json"):
        Lens.of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        Lens.of(tmp_path)
    save_file({"other.weight": np.ones(3, "f4")}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="no tensor there has the name"):
        Lens.of(tmp_path)
    save_file({"lm_head.weight": np.ones(3, "i4")}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="has the dtype I32"):
        Weights.of(tmp_path).first(("lm_head",))


def test_a_stream_of_another_width_is_refused(tmp_path: Path) -> None:
    lens = Lens.of(make_model("qwen3", tmp_path))
    with pytest.raises(ValueError, match="has 32 values and the model of --model 64"):
        lens.top(np.zeros((1, 32), "f4"), 5)
