# SPDX-License-Identifier: Apache-2.0
"""State of one captured request in the tracker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.engine.scheduler.quota import UNLIMITED
from dmi_connector.hooks import Selection
from dmi_connector.layout import DRAFT_UNKNOWN
from dmi_connector.request_options import CaptureParams

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from dmi_connector.engine.messages import Open
    from dmi_connector.engine.scheduler.request_scores import RequestScores

_NUMBERS = bytes(range(1, DRAFT_UNKNOWN))
"""Values of `Close.draft_index` for the draft tokens of a step, in order."""
_UNKNOWN = bytes([DRAFT_UNKNOWN])
_STEPS = [_NUMBERS[:count] + b"\0" for count in range(16)]
"""Values of `Close.draft_index` for the tokens of a step, by its number of accepted draft tokens."""


@dataclass
class Tracked:
    """One captured request.

    capture: number of its capture. path: path of its store. quota_end: first position whose row exceeds
    `max_request_bytes`. exported: position up to which rows were handed to the workers. due: number of computed tokens
    at which the next chunk is full; UNLIMITED if the remaining rows are exported when the request ends. ignored: a
    sentence on options that are ignored. opened: whether the request was scheduled at least once. media: number of
    multimodal inputs in its first turn. blocks: its blocks in the cache group of the rows. scores: its scores, if the
    scheduler needs them. opening: with `keep_if`, the message that begins its capture, which is sent after the request
    has ended. stopped: why `stop_if` ended it. kept: in a session, number of tokens before the latest turn's prompt.

    The next fields are for speculative decoding. last_step: the last step that computed its tokens. reached: position
    up to which that step computes them. decided: position up to which logits of accepted tokens were requested from the
    workers. drafted: `Close.draft_index` of the tokens that `note_tokens` has seen. scheduled: number of draft tokens
    that steps verified.
    """

    request: Request
    params: CaptureParams
    capture: int
    path: str
    selection: Selection
    quota_end: int
    exported: int
    due: int
    ignored: str = ""
    opened: bool = False
    media: int = 0
    blocks: list[int] = field(default_factory=list)
    scores: RequestScores | None = None
    opening: Open | None = None
    stopped: str = ""
    kept: int = 0
    last_step: int = 0
    reached: int = 0
    decided: int = 0
    drafted: bytearray = field(default_factory=bytearray)
    scheduled: int = 0
    # Prompt lengths identify the turns of a session, because the prompt grows with each turn.
    turn: int = -1  # the turn that `note_tokens` last processed
    _samples: int = 0  # number of rows of logits that were requested
    _begun: int = -1  # the running turn
    _turn: int = -1  # the turn of the last sample
    # For each turn with samples: position of a sample minus its number, and the first number.
    _numbering: list[tuple[int, int]] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """End of the positions whose rows the request wants."""
        wanted = UNLIMITED if self.params.include_output_tokens else self.request.num_prompt_tokens
        return wanted if self.params.stop is None else min(wanted, self.params.stop)

    @property
    def limit(self) -> int:
        """End of the positions that are captured: `wanted`, or `quota_end` if it is lower."""
        return min(self.wanted, self.quota_end)

    def why_empty(self) -> str:
        """Why the ended request has none of the rows that it wants."""
        start, generated = self.params.start, self.request.num_tokens - 1  # the last token has no row
        span = [start, self.params.stop]
        if not self.params.include_output_tokens and self.request.num_prompt_tokens <= start < generated:
            return f"dmi.tokens: {span} is after the prompt; set include_output_tokens for rows of generated tokens"
        return f"dmi.tokens: {span} is after the last row of the request, so there are no rows"

    def skip(self, rows: int) -> None:
        """Skip the first `rows` rows, which come from another store."""
        self.exported += rows
        self.due += rows

    def begin_turn(self) -> None:
        """The request enters a batch, maybe with a new turn of a session.

        With asynchronous scheduling, logits may have been requested for a token after the last turn's stop, which vLLM
        discards. The first sample of the new turn takes the number of these logits.
        """
        if self.turn == -1:  # the first turn, which may end before `note_tokens` is called elsewhere
            self.note_tokens()
        if self._begun != self.request.num_prompt_tokens:
            self._begun, self._samples = self.request.num_prompt_tokens, self.samples_until(self.kept)

    @property
    def turn_ended(self) -> bool:
        """Whether a session got its next prompt since `note_tokens`."""
        return self.turn not in (-1, self.request.num_prompt_tokens)

    def note_tokens(self, mixed: bool = False) -> int:
        """Process the tokens that a step added: accepted draft tokens, then one sampled token.

        If the request stops at an accepted draft token, this token counts as the sampled one, which has no row.
        mixed: whether the tokens may come from two steps. Returns the number of accepted draft tokens.
        """
        request, drafted = self.request, self.drafted
        if self.turn == request.num_prompt_tokens:  # most calls
            count = request.num_tokens - 1 - len(drafted)
            if count >= 0:
                drafted += _STEPS[count] if count < len(_STEPS) and not mixed else _indexes(count, mixed) + b"\0"
            return max(0, count)
        count = max(0, self.kept - len(drafted)) if self.turn_ended else 0
        self.turn = request.num_prompt_tokens
        self.drafted = (drafted + _indexes(count, mixed))[: self.kept].ljust(self.turn, b"\0")
        self.decided = max(self.decided, self.turn - 1)
        return count + self.note_tokens(mixed)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.drafted) - self.drafted.count(0)

    def draft_index(self, start: int, end: int) -> np.ndarray:
        """uint8 [end - start]: `Close.draft_index` of positions [start, end)."""
        index = np.zeros(end - start, np.uint8)
        known = np.frombuffer(self.drafted[start:end], np.uint8)
        index[: len(known)] = known
        return index

    def number_sample(self, position: int, turn: int | None = None) -> int:
        """The number of the row of logits of a position. Numbers continue from one turn of a session to the next.

        turn: prompt length of the turn; None for the running turn.
        """
        turn = self.request.num_prompt_tokens if turn is None else turn
        if self._turn != turn:
            self._turn = turn
            self._numbering.append((position - self._samples, self._samples))
        number = position - self._numbering[-1][0]
        self._samples = max(self._samples, number + 1)
        return number

    def samples_until(self, end: int) -> int:
        """Number of rows of logits at positions below `end`."""
        samples = self._samples
        for shift, first in reversed(self._numbering):
            if end - shift > first:
                return min(samples, end - shift)
            samples = first
        return 0

    @property
    def has_logits(self) -> bool:
        """Whether logits are captured."""
        return "logits" in self.selection.hooks


def _indexes(count: int, mixed: bool) -> bytes:
    """Values of `Close.draft_index` for `count` accepted draft tokens. mixed: see `Tracked.note_tokens`."""
    return (b"" if mixed else _NUMBERS[:count]).ljust(count, _UNKNOWN)
