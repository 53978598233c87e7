# SPDX-License-Identifier: Apache-2.0
"""Limits of a step of vLLM's scheduler, and the numbers of pool pages that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dmi_connector.engine.messages import STEPS_TOGETHER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Captured

PAGE = 16
"""Positions per page, if vLLM's block size is a multiple of PAGE. A page never spans two blocks."""
_PROMPT_TOKENS = 256
"""Prompt tokens in the smallest budget of a step, beside the tokens of decoding requests. `block` may raise it."""


def page_size(block_size: int) -> int:
    """Positions per page."""
    return math.gcd(PAGE, block_size)


@dataclass
class StepLimits:
    """Limits of a step of vLLM's scheduler.

    scheduler: vLLM's scheduler configuration, whose `max_num_batched_tokens` (the budget) vLLM reads at the beginning
    of each step. stock: the budget at start. tokens: maximum tokens of a step. requests: maximum number of running
    requests. of_request: maximum tokens of a decoding request per step, including draft tokens. whole: whether chunked
    prefill is off, for prompts or for images in them; the budget is then never lowered. block: tokens per block in
    hybrid models whose states are cached, otherwise 0. In these models vLLM splits prompts only at block boundaries, so
    a step with room for less than a block would compute nothing. longest: maximum tokens of a request.
    """

    scheduler: Any
    tokens: int
    requests: int
    of_request: int = 1
    whole: bool = False
    block: int = 0
    longest: int = 1 << 40
    stock: int = field(init=False)

    def __post_init__(self) -> None:
        self.stock = self.scheduler.max_num_batched_tokens

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> StepLimits:
        scheduler, drafts = vllm_config.scheduler_config, vllm_config.speculative_config
        tokens = scheduler.max_num_batched_tokens
        if scheduler.max_num_scheduled_tokens is not None:
            tokens = min(tokens, scheduler.max_num_scheduled_tokens)
        of_request = 1 if drafts is None else 1 + drafts.num_speculative_tokens + drafts.max_num_new_slots_for_drafting
        images = vllm_config.model_config.is_multimodal_model and scheduler.disable_chunked_mm_input
        whole = not scheduler.enable_chunked_prefill or images
        cache = vllm_config.cache_config
        aligned = vllm_config.model_config.is_hybrid and cache.mamba_cache_mode == "align"
        block = cache.block_size if aligned and cache.block_size <= tokens else 0
        longest = vllm_config.model_config.max_model_len
        return cls(scheduler, tokens, scheduler.max_num_seqs, of_request, whole, block, longest)

    def floor(self, requests: int) -> int:
        """The smallest budget of a step while prompts are captured, in tokens. requests: how many requests may run."""
        if self.whole:
            return self.tokens
        return min(self.tokens, requests * self.of_request + self.prompt)

    @property
    def prompt(self) -> int:
        """Number of prompt tokens in the smallest budget."""
        return max(_PROMPT_TOKENS, self.block)

    @property
    def reserve(self) -> int:
        """Number of tokens of a step whose pages are not reserved for admitted requests.

        This is the present budget, but at least the smallest budget with the maximum number of running requests. If
        only the present requests were counted, the budget could fall below the tokens of the running requests once more
        requests run.
        """
        return max(min(self.tokens, self.scheduler.max_num_batched_tokens), self.floor(self.requests))

    @property
    def lookahead(self) -> int:
        """Maximum tokens of a decoding request between two calls of `RowSlots.look`."""
        return STEPS_TOGETHER * self.of_request

    def pages_of_request(self, chunk: int, size: int = PAGE, aligned: bool = True) -> int:
        """Maximum number of pages that a request has at a time, without those for its prompt tokens of one step.

        While the request decodes, its pages hold an incomplete chunk, the tokens of two steps whose results are not
        known yet, the tokens of this step, and those until the next `look`. While its prompt is computed, they hold the
        incomplete chunk before the step, the tokens until the next `look`, and the rest of the last page. chunk: rows
        per chunk. size: positions per page. aligned: whether chunks begin at page boundaries.
        """
        decoding, prompt = chunk - 1 + 3 * self.of_request + self.lookahead, chunk - 1 + self.lookahead + size - 1
        most = max(decoding, prompt)
        return -(-most // size) if aligned else pages_of(most, size)

    def room_of_all(self, tracked: Captured, size: int = PAGE) -> tuple[int, int]:
        """(first position whose row gets no slot, number of pages) for a request whose rows all stay until it ends.

        Its last token may be followed by draft tokens, and by tokens of a step that was planned before the end was
        known. For a session, the number of tokens in later turns is not known.
        """
        request, params = tracked.request, tracked.params
        stop = self.longest if params.stop is None else min(self.longest, params.stop)
        if not request.resumable:
            tokens = request.num_prompt_tokens + request.max_tokens
            stop = min(stop, tracked.limit, tokens + 2 * self.of_request)
        return stop, max(0, -(-stop // size) - params.start // size)

    def pages_of_step(self, tokens: int, size: int = PAGE) -> int:
        """Number of pages for `tokens` prompt tokens of a step, beside the pages reserved for admitted requests."""
        return -(-tokens // size)

    def least_pages(self, chunk: int, requests: int = 1) -> int:
        """Minimum number of pages of a pool that holds `requests` captured requests at a time, under any other load."""
        of_request = self.pages_of_request(chunk, aligned=False)
        return self.pages_of_step(self.floor(self.requests)) + requests * of_request


def pages_of(rows: int, size: int = PAGE) -> int:
    """Maximum number of pages of `rows` consecutive rows. The first row may be anywhere in a page."""
    return (rows + size - 2) // size + 1
