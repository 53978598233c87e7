# SPDX-License-Identifier: Apache-2.0
"""The forward that is run if vLLM runs none before it serves."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.model import first_forward


class Model(torch.nn.Module):
    """A model like vLLM's InternLM 2: the third argument of its forward has no default."""

    dmi_context = SimpleNamespace(arch=SimpleNamespace(language=""), first_stage=True, last_stage=True)

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rows = torch.nn.Parameter(torch.ones(3)), 0

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> torch.Tensor:
        assert intermediate_tensors is None and inputs_embeds is None and positions.tolist() == [0, 1]
        return input_ids[:, None] * self.weight

    def compute_logits(self, hidden: torch.Tensor) -> None:
        self.rows = len(hidden)


def test_each_argument_of_a_forward_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_forward, "set_forward_context", lambda *_args, **_kwargs: contextlib.nullcontext())
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(uses_mrope=False, runner_type="generate"), lora_config=None
    )
    model = Model()
    first_forward.first_forward(model, config)
    assert model.rows == 1


class SecondOfThree(torch.nn.Module):
    """A pipeline stage that neither embeds tokens nor computes logits."""

    dmi_context = SimpleNamespace(arch=SimpleNamespace(language=""), first_stage=False, last_stage=False)

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.given = torch.nn.Parameter(torch.ones(3)), None

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> Any:
        return {"hidden_states": torch.zeros(batch_size, 3, dtype=dtype, device=device)}

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any) -> Any:
        self.given = intermediate_tensors["hidden_states"].shape
        return intermediate_tensors


def test_a_later_stage_gets_what_the_one_before_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_forward, "set_forward_context", lambda *_args, **_kwargs: contextlib.nullcontext())
    settings = SimpleNamespace(uses_mrope=False, runner_type="generate", dtype=torch.float32)
    config: Any = SimpleNamespace(model_config=settings, lora_config=None)
    model = SecondOfThree()
    first_forward.first_forward(model, config)
    assert model.given == (2, 3)
