# SPDX-License-Identifier: Apache-2.0
"""Token ids of later pipeline stages on the V2 runner, whose models get none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dmi_connector.engine.model.coverage import POSITIONS, TOKEN_IDS
from dmi_connector.engine.replaced import tell_token_ids
from dmi_connector.engine.taps import inputs


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a step of a runner. As in vLLM, it writes the token ids of the step into memory that all steps share."""

    def execute_model(self: Any, step: str, dummy_run: bool = False) -> tuple[str, bool]:
        self.input_buffers.input_ids[:] = torch.arange(50, 60)
        return step, dummy_run

    monkeypatch.setattr(inputs, "_token_ids", None)
    monkeypatch.setattr(GPUModelRunner, "execute_model", execute_model)
    tell_token_ids(inputs.note_token_ids)
    memory = torch.zeros(10, dtype=torch.int32)
    runner: Any = SimpleNamespace(input_buffers=SimpleNamespace(input_ids=memory))
    result: Any = GPUModelRunner.execute_model(runner, "step", dummy_run=True)
    assert result == ("step", True), "the result is that of vLLM's own method"


def header(first_stage: bool) -> dict[str, list[int]]:
    """The header that a forward with three tokens and without token ids writes."""
    found: dict[str, list[int]] = {}
    once = SimpleNamespace(add=lambda field, value: found.update({field.hook: value.tolist()}), write=lambda: None)
    layout = SimpleNamespace(find=lambda *_: None, taking=lambda *_: ())
    context = SimpleNamespace(first_stage=first_stage, layout=layout, arch=SimpleNamespace(name="Some"))
    taps: Any = SimpleNamespace(context=context, once=once)
    inputs.write_inputs(taps, None, torch.tensor([7, 8, 9]), None)
    return found


def test_a_later_stage_writes_the_token_ids_of_its_runner(told: None) -> None:
    assert header(first_stage=False) == {TOKEN_IDS.hook: [50, 51, 52], POSITIONS.hook: [7, 8, 9]}


def test_a_first_stage_does_not_use_them(told: None) -> None:
    with pytest.raises(RuntimeError, match="Some: the forward got no token ids"):
        header(first_stage=True)


def test_a_later_stage_that_was_not_told_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_token_ids", None)
    with pytest.raises(RuntimeError, match="Some: the forward got no token ids"):
        header(first_stage=False)
