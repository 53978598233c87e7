# SPDX-License-Identifier: Apache-2.0
"""Replaced parts of vLLM: the forward of the V2 runner's draft, and the ranks for which the executor waits."""

from __future__ import annotations

import inspect
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.worker.gpu.spec_decode.extract_hidden_states import ExtractHiddenStatesSpeculator

from dmi_connector.engine import replaced
from dmi_connector.engine.connector import DMIConnector
from dmi_connector.engine.messages import StepMetadata

_TAKEN = inspect.signature(ExtractHiddenStatesSpeculator.propose).parameters
SAMPLED = torch.tensor([[3], [5], [7]])
"""The latest token of each request in the engine, int [requests, 1]."""


def propose(active: bool, aux_hidden_states: Any = None, **more: Any) -> torch.Tensor:
    """Propose draft tokens for requests 2 and 0, as vLLM's runner does."""
    speculator = ExtractHiddenStatesSpeculator.__new__(ExtractHiddenStatesSpeculator)
    speculator.model = SimpleNamespace(dmi_active=active)
    batch = SimpleNamespace(idx_mapping=torch.tensor([2, 0]))
    rest = (None, None, SAMPLED, None, None, None)
    more |= {"num_speculative_tokens": 0} if "num_speculative_tokens" in _TAKEN else {}  # not in vLLM 0.31
    tokens = speculator.propose(batch, {}, {}, None, aux_hidden_states, *rest, **more)
    assert isinstance(tokens, torch.Tensor)
    return tokens


@pytest.fixture
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    # so that monkeypatch restores it
    monkeypatch.setattr(ExtractHiddenStatesSpeculator, "propose", ExtractHiddenStatesSpeculator.propose)
    replaced.skip_draft_forward()
    replaced.skip_draft_forward()  # by a second engine in this process


@pytest.mark.usefixtures("no_forward")
def test_a_draft_of_ours_runs_no_forward() -> None:
    assert propose(active=True).tolist() == [[7], [3]]  # a forward would need hidden states


@pytest.mark.usefixtures("no_forward")
def test_the_same_in_a_warm_up_step() -> None:
    assert propose(active=True, dummy_run=True, skip_attn_for_dummy_run=False, is_profile=True).tolist() == [[7], [3]]


@pytest.mark.usefixtures("no_forward")
def test_a_draft_of_vllm_runs_its_forward() -> None:
    with pytest.raises(ValueError, match="aux_hidden_states are required"):
        propose(active=False)


class Queue:
    """A fake queue between the executor and a rank, in one process. answer: the rank's response."""

    def __init__(self, answer: Any = None) -> None:
        self.sent: list[Any] = []
        self.answer = answer
        self.taken = 0

    def enqueue(self, message: Any) -> None:
        self.sent.append(message)

    def dequeue(self, timeout: float | None = None) -> tuple[Any, Any]:
        self.taken += 1
        return WorkerProc.ResponseStatus.SUCCESS, self.answer


class Both:
    """A fake aggregator of the responses of all ranks."""

    def aggregate(self, outputs: list[Any], output_rank: int) -> list[Any]:
        return outputs


def executor(monkeypatch: pytest.MonkeyPatch) -> tuple[MultiprocExecutor, list[Queue]]:
    """vLLM's executor with two ranks that respond with "rank 0" and "rank 1", and their queues."""
    # so that monkeypatch restores it
    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", MultiprocExecutor.collective_rpc)
    replaced.ask_one_rank()
    replaced.ask_one_rank()  # by a second engine in this process
    made = MultiprocExecutor.__new__(MultiprocExecutor)
    ranks = [Queue("rank 0"), Queue("rank 1")]
    more = {"rpc_broadcast_mq": Queue(), "response_mqs": ranks, "futures_queue": deque(), "is_failed": False}
    for name, value in {**more, "output_rank": 0, "kv_output_aggregator": Both(), "ec_output_aggregator": None}.items():
        setattr(made, name, value)
    return made, ranks


@pytest.mark.parametrize(
    ("metadata", "answers"),
    [(StepMetadata(), "rank 0"), (StepMetadata(report=True), ["rank 0", "rank 1"]), (None, ["rank 0", "rank 1"])],
    ids=["step", "report", "another connector"],
)
def test_all_ranks_answer_where_they_report(metadata: Any, answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ranks = executor(monkeypatch)
    assert made.execute_model(SimpleNamespace(kv_connector_metadata=metadata)) == answers
    assert made.sample_tokens(None) == answers
    assert [rank.taken for rank in ranks] == ([2, 0] if answers == "rank 0" else [2, 2])
    asked = [message[-1] for message in made.rpc_broadcast_mq.sent]
    assert asked == ([0, 0] if answers == "rank 0" else [None, None])


def test_a_step_without_reports_does_not_silence_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = executor(monkeypatch)
    for report in (False, True, False):
        answers = made.execute_model(SimpleNamespace(kv_connector_metadata=StepMetadata(report=report)))
        assert answers == (["rank 0", "rank 1"] if report else "rank 0")


def test_other_calls_reach_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = executor(monkeypatch)
    made.execute_model(SimpleNamespace(kv_connector_metadata=StepMetadata()))
    named: Any = {"unique_reply_rank": 0, "kv_output_aggregator": Both()}
    assert made.collective_rpc("take_draft_token_ids", **named) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("report", [False, True])
def test_an_error_that_nobody_would_hear_of_ends_the_process(rank: int, report: bool) -> None:
    def fail(_metadata: StepMetadata) -> None:
        raise RuntimeError("no memory")

    connector = DMIConnector.__new__(DMIConnector)
    connector.exporter = SimpleNamespace(rank=rank, before_forward=fail, after_forward=fail)  # type: ignore[assignment]
    metadata = StepMetadata(report=report)
    connector.bind_connector_metadata(metadata)
    for step in (lambda: connector.handle_preemptions(metadata), connector.wait_for_save):
        with pytest.raises(RuntimeError if report or rank == 0 else SystemExit):
            step()


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_a_kernel_that_includes_routing_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """What vLLM 0.33 raises while it builds experts with a `moe_backend` that has only such kernels."""
    yes = property(lambda _router: True)
    monkeypatch.setattr(FusedMoERouter, "supports_monolithic_kernels", yes, raising=False)
    theirs = "MoE backend FLASHINFER_TRTLLM does not support the deployment configuration since kernel does not support"
    with (
        pytest.raises(ValueError, match=r"moe_backend: topk_ids .*_TRTLLM .*\); choose another --moe-backend"),
        replaced.decomposed_experts(),
    ):
        raise kind(f"{theirs} routes adjusted after routing.")
    with pytest.raises(kind, match=r"^MoE backend .* support LoRA\.$"), replaced.decomposed_experts():
        raise kind(f"{theirs} LoRA.")
    assert vars(FusedMoERouter)["supports_monolithic_kernels"] is yes
