# SPDX-License-Identifier: Apache-2.0
"""What limits a step of vLLM's scheduler, and how many pages of a pool follow from that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dmi_connector.engine.messages import STEPS_TOGETHER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Captured

PAGE = 16
"""Positions of a page, if blocks of vLLM are a multiple of it. A page never reaches over two blocks."""
_PROMPT_TOKENS = 256
"""Smallest budget of a step beside the tokens that running requests decode, unless blocks are larger."""


def page_size(block_size: int) -> int:
    """Positions of a page."""
    return math.gcd(PAGE, block_size)


@dataclass
class StepLimits:
    """What limits a step of vLLM's scheduler.

    scheduler: its configuration, whose `max_num_batched_tokens` is read at the beginning of each step. stock: its value
    at start. tokens: maximum tokens of a step. requests: maximum number of running requests. of_request: tokens of a
    decoding request in a step, draft tokens included. whole: whether chunked prefill is off for prompts, or for images
    in them; then a step is never made smaller. block: tokens of a block in hybrid models whose states are cached; else
    0. vLLM then ends pieces of prompts where blocks end, so a step with room for less would compute nothing. longest:
    maximum tokens of a request.
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
        """Minimum tokens of a step while prompts are captured. requests: the number of running requests."""
        if self.whole:
            return self.tokens
        return min(self.tokens, requests * self.of_request + self.prompt)

    @property
    def prompt(self) -> int:
        """Tokens of prompts that the smallest step has room for."""
        return max(_PROMPT_TOKENS, self.block)

    @property
    def lookahead(self) -> int:
        """Tokens of a decoding request between two looks at it."""
        return STEPS_TOGETHER * self.of_request

    def pages_of_request(self, chunk: int, size: int = PAGE, aligned: bool = True) -> int:
        """Maximum pages that a request has at a time, without those of its prompt in one step.

        While it decodes, it has the beginning of a chunk, tokens of two steps that are not known yet, and places for
        what it decodes in this step and until the scheduler next looks at it. In its prompt it has the beginning of a
        chunk before the step, places until the next look, and a part of a page after them. aligned: whether chunks
        begin where pages begin.
        """
        decoding, prompt = chunk - 1 + 3 * self.of_request + self.lookahead, chunk - 1 + self.lookahead + size - 1
        most = max(decoding, prompt)
        return -(-most // size) if aligned else pages_of(most, size)

    def room_of_all(self, tracked: Captured, size: int = PAGE) -> tuple[int, int]:
        """(position from which on no row has a place, pages) of a request whose rows all wait until it ends.

        Behind its last token it may have drafts, and tokens of a step that was planned before that was known. How many
        tokens the turns of a session have is not known.
        """
        request, params = tracked.request, tracked.params
        stop = self.longest if params.stop is None else min(self.longest, params.stop)
        if not request.resumable:
            tokens = request.num_prompt_tokens + request.max_tokens
            stop = min(stop, tracked.limit, tokens + 2 * self.of_request)
        return stop, max(0, -(-stop // size) - params.start // size)

    def pages_of_step(self, tokens: int, size: int = PAGE) -> int:
        """Pages for `tokens` tokens of prompts in a step, in addition to those that requests are admitted with."""
        return -(-tokens // size)

    def least_pages(self, chunk: int, requests: int = 1) -> int:
        """Minimum pages of a pool that holds `requests` captured requests at a time, whatever else runs."""
        of_request = self.pages_of_request(chunk, aligned=False)
        return self.pages_of_step(self.floor(self.requests)) + requests * of_request


def pages_of(rows: int, size: int = PAGE) -> int:
    """Maximum pages of `rows` consecutive rows, wherever the first one begins in a page."""
    return (rows + size - 2) // size + 1
