# SPDX-License-Identifier: Apache-2.0
"""What our draft changes in vLLM's V2 runner: its forward is left out, and the draft tokens are vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.worker.gpu.spec_decode.extract_hidden_states import ExtractHiddenStatesSpeculator

from dmi_connector.engine import contract

SAMPLED = torch.tensor([[3], [5], [7]])
"""Token of each request that the engine has, int [requests, 1]."""


def propose(active: bool, aux_hidden_states: Any = None, **more: Any) -> torch.Tensor:
    """Ask for draft tokens of requests 2 and 0, as vLLM's runner does."""
    speculator = ExtractHiddenStatesSpeculator.__new__(ExtractHiddenStatesSpeculator)
    speculator.model = SimpleNamespace(dmi_active=active)
    batch = SimpleNamespace(idx_mapping=torch.tensor([2, 0]))
    rest = (None, None, SAMPLED, None, None, None)
    tokens = speculator.propose(batch, {}, {}, None, aux_hidden_states, *rest, num_speculative_tokens=0, **more)
    assert isinstance(tokens, torch.Tensor)
    return tokens


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExtractHiddenStatesSpeculator, "propose", ExtractHiddenStatesSpeculator.propose)  # undone later
    contract.skip_draft_forward()
    contract.skip_draft_forward()  # of a second engine in this process


@pytest.mark.usefixtures("replaced")
def test_a_draft_of_ours_runs_no_forward() -> None:
    assert propose(active=True).tolist() == [[7], [3]]  # a forward would ask for hidden states


@pytest.mark.usefixtures("replaced")
def test_the_same_in_a_warm_up_step() -> None:
    assert propose(active=True, dummy_run=True, skip_attn_for_dummy_run=False, is_profile=True).tolist() == [[7], [3]]


@pytest.mark.usefixtures("replaced")
def test_a_draft_of_vllm_runs_its_forward() -> None:
    with pytest.raises(ValueError, match="aux_hidden_states are required"):
        propose(active=False)
