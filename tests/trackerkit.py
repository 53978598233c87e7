# SPDX-License-Identifier: Apache-2.0
"""A Tracker for a small model, and requests with the attributes that the scheduler passes. No engine is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.owners.paged import PagedSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import row_layouts
from dmi_connector.probes import with_probes
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.completeness import Cause, Loss

DIMS = ModelDims("Qwen3ForCausalLM", 3, 64, 4, 2, 32, 192, 512)


def make_tracker(
    store_dir: object, hooks: str = "resid_pre,mlp_out,logits", blocks: int = 0, **options: Any
) -> Tracker:
    """A tracker of a float32 model with chunks of 16 tokens and blocks of 16 slots. blocks: number of cache blocks."""
    parsed = ServerOptions.parse({"store_dir": str(store_dir), "hooks": hooks, "chunk_tokens": 16, **options})
    dims, probes = with_probes(DIMS, parsed.probes, 1)
    selection = parse_selection(parsed.hooks, dims)
    layouts = row_layouts(selection, dims, "float32", 1, {**probes})
    arch = ARCHITECTURES["Qwen3ForCausalLM"]
    context = CaptureContext(parsed, arch, dims, selection, layouts, "float32", 1, OWNERS["target"])
    return Tracker(context, PagedSlots(context, 16, blocks), 1 << 60)


@dataclass
class FakeRequest:
    """The attributes of vLLM's Request that the tracker reads. tokens: all token ids; the first `num_prompt_tokens` are
    the prompt.
    """

    request_id: str
    kv_transfer_params: object
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    max_tokens: int = 64
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(seed=None, max_tokens=64, detokenize=True))

    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @staticmethod
    def get_finished_reason() -> str:
        return "length"


def dropped(*rows: list[int]) -> Loss:
    """The loss of these row ranges [start, stop) under policy "drop"."""
    return Loss.of(Cause.FELL_BEHIND, rows)


def ask(kv: object, prompt: int = 40, request_id: str = "cmpl-1") -> FakeRequest:
    """A request that has just arrived."""
    return FakeRequest(request_id, kv, list(range(prompt)), prompt)


def generate(
    tracker: Tracker, request: FakeRequest, count: int, ended: bool = True
) -> tuple[list[Any], dict[str, Any] | None]:
    """Run a request to its end: one prefill step and `count` tokens. Returns (all step metadata, its response).

    ended: with False, the request stays unfinished.
    """
    blocks = list(range(1, (request.num_tokens + count) // 16 + 2))
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    new = [SimpleNamespace(req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=0)]
    steps, scheduled = [], request.num_tokens
    for _ in range(count):
        output: Any = SimpleNamespace(
            preempted_req_ids=None,
            num_scheduled_tokens={request.request_id: scheduled},
            total_num_scheduled_tokens=scheduled,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
        )
        steps.append(tracker.step(output))
        request.num_computed_tokens += scheduled
        request.tokens.append(7)
        new, scheduled = [], 1
        cached = SimpleNamespace(
            req_ids=[request.request_id],
            new_block_ids=[None],
            resumed_req_ids=set(),
            num_computed_tokens=[request.num_computed_tokens],
        )
    return steps, tracker.finish(request, blocks)[1] if ended else None
