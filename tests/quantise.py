# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of a tiny model, and the same model with dequantised weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 64
"""Number of inputs that share a scale."""
PACKED = 8
"""Number of 4-bit values per int32."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each 4-bit value in an int32 of AWQ."""
LARGEST_INPUT = 32.0
"""Largest magnitude of activations with a static scale."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def _pack(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(PACKED))) -> torch.Tensor:
    """Pack 4-bit values, eight along dimension `dim` per int32."""
    parts = values.to(torch.int64).unflatten(dim, (-1, PACKED)).unbind(dim + 1)
    whole = sum(parts[column] << (4 * place) for place, column in enumerate(order))
    assert isinstance(whole, torch.Tensor)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32).contiguous()


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """Reshape a weight [out, in] to [groups, GROUP, out]."""
    return weight.T.unflatten(0, (-1, GROUP))


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise to symmetric 4-bit values, stored with an offset of 8."""
    grouped = _groups(weight)
    scales = (grouped.abs().amax(1) / 7).half()
    q = (grouped / scales.float()[:, None]).round().clamp(-8, 7) + 8
    plain = ((q - 8) * scales.float()[:, None]).flatten(0, 1).T
    zeros = torch.full(scales.shape, 7)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    tensors = {"qweight": _pack(q.flatten(0, 1), 0), "qzeros": _pack(zeros, 1), "scales": scales, "g_idx": index}
    return tensors, plain


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise to 4-bit values with a zero point per group."""
    grouped = _groups(weight)
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    q = ((grouped / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15)
    plain = ((q - zeros[:, None]) * scales.float()[:, None]).flatten(0, 1).T
    tensors = {"qweight": _pack(q.flatten(0, 1), 1, AWQ_ORDER), "qzeros": _pack(zeros, 1, AWQ_ORDER), "scales": scales}
    return tensors, plain


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scales).round().clamp(-127, 127)
    return {"weight": q.to(torch.int8), "weight_scale": scales}, q * scales


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    q = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scales}, q.float() * scales


def fp8_static(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale.reshape(1), "input_scale": torch.tensor([LARGEST_INPUT / 448])}, (
        q.float() * scale
    )


def _compressed(kind: str, layout: str, static: bool = False) -> dict[str, Any]:
    """The config of compressed-tensors: weights have a scale per output, activations a dynamic scale per token.

    static: both have one scale per layer instead.
    """
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    if static:
        weights = inputs = {"strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": common | inputs}
    method = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return {**method, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


_FOUR_BITS = {"bits": 4, "group_size": GROUP}
SCHEMES: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", **_FOUR_BITS, "desc_act": False, "sym": True, "lm_head": False}),
    "awq": (awq, {"quant_method": "awq", **_FOUR_BITS, "zero_point": True, "version": "gemm"}),
    "int8": (int8, _compressed("int", "int-quantized")),
    "fp8": (fp8, _compressed("float", "float-quantized")),
    "fp8-static": (fp8_static, _compressed("float", "float-quantized", static=True)),
}


def quantise(model: Path, scheme: str, quantised: Path, plain: Path) -> None:
    """Write `model` with quantised linear layers to `quantised`, and with the dequantised weights to `plain`."""
    make, config = SCHEMES[scheme]
    tensors: Tensors = {}
    kept: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer.rsplit(".", 1)[-1] in LINEAR:
            made, kept[name] = make(weight.float())
            tensors |= {f"{layer}.{key}": value.contiguous() for key, value in made.items()}
        else:
            tensors[name] = kept[name] = weight
    for folder, saved in ((quantised, tensors), (plain, kept)):
        shutil.copytree(model, folder)
        save_file(
            {name: value.contiguous() for name, value in saved.items()}, folder / "model.safetensors", {"format": "pt"}
        )
    file = quantised / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
