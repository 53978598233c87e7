# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of taps: taps without a model, and a forward context without a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmi_connector.engine.model.architectures import Architecture
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.taps import install
from dmi_connector.engine.taps.batches import ModelTaps, TapBatch
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.engine.taps.op import Place
from dmi_connector.layout import RowField, RowLayout

CACHE_LAYER = "rows.0"


def batch(
    in_place: bool = False,
    stream_lasts: bool = False,
    copies: bool = False,
    products_last: bool = True,
) -> TapBatch:
    """A batch of layer 0 without a model."""
    deferred: Any = SimpleNamespace(tokens=0)
    taps: Any = SimpleNamespace(
        token=torch.zeros(1, dtype=torch.int32),
        deferred=deferred,
        ends=False,
        compilation=Compilation(in_place, stream_lasts, products_last, copies),
        context=SimpleNamespace(cache_layer=CACHE_LAYER),
    )
    return TapBatch(taps, torch.zeros(1, dtype=torch.int32), Place(0, 0, {}, deferred))


def fields(*layers: int, width: int = 2560, hooks: tuple[str, ...] = ("resid_pre",)) -> list[RowField]:
    """Adjacent fields of these hooks and layers in bfloat16."""
    names = [(hook, layer) for layer in layers for hook in hooks]
    return [RowField(hook, layer, "bfloat16", width, 2 * width * i) for i, (hook, layer) in enumerate(names)]


class ForwardContext(SimpleNamespace):
    """Fake forward context of vLLM. Unlike SimpleNamespace, it can be weakly referenced."""


class RowMemory:
    """Fake memory of an owner, with given rows and slots.

    step: metadata of the batch. scores: (the object that copies scores, vLLM's slots of the tokens).
    """

    def __init__(self, rows: torch.Tensor, slots: torch.Tensor, step: object = None, scores: Any = None) -> None:
        self.rows, self.slots, self.step = rows, slots, step
        self.scores, self.in_cache = (None, None) if scores is None else scores

    def slots_in_cache(self, _forward: object) -> Any:
        return self.in_cache

    def rows_and_slots(self, _forward: object, _first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows, self.slots


def without_cache(patch: pytest.MonkeyPatch) -> None:
    """Run ops as in vLLM's profiling run, which has no cache. They write nothing."""
    in_forward(patch, ForwardContext(no_compile_layers={}, slot_mapping={}))


def in_forward(patch: pytest.MonkeyPatch, context: Any) -> None:
    """Make `context` vLLM's forward context."""
    patch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    patch.setattr("vllm.forward_context.is_forward_context_available", lambda: True)


def tap(
    block: torch.nn.Module, batch: TapBatch, fields: list[RowField], drafting: Any = None, **modules: str
) -> ModelTaps:
    """Install taps of `fields` on a layer that has only these modules. drafting: `CaptureContext.drafting`."""
    every = {"ln1", "qkv", "attn", "o_proj", "ln2", "mlp", "down_proj"}
    context: Any = SimpleNamespace(
        drafting=drafting,
        may_sleep=False,
        arch=Architecture("Block", "", **{**dict.fromkeys(every, ""), **modules}),
        dims=SimpleNamespace(moe_layers=(), qk_rope_head_dim=0),
        block_scale=1.0,
        layout=RowLayout(tuple(fields), 0, {}),
        cache_layer=CACHE_LAYER,
        coverage=Coverage(),
    )
    holder = torch.nn.Module()
    holder.model = torch.nn.Module()
    holder.model.layers = torch.nn.ModuleList([block])
    taps = ModelTaps(holder, context, batch.taps.compilation)
    install.install_layer(taps, block, 0, batch)
    return taps
