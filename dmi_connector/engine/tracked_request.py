# SPDX-License-Identifier: Apache-2.0
"""What the tracker knows of one request under capture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmi_connector.engine.quota import UNLIMITED
from dmi_connector.hooks import Selection
from dmi_connector.settings import CaptureParams

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Tracked:
    """One request under capture.

    quota_end: first position that `max_request_bytes` has no room for. exported: position up to which rows were handed
    to the workers. due: number of computed tokens at which the next chunk is ready. opened: whether it was ever
    scheduled. blocks: its blocks in the cache group of the rows.
    """

    request: Request
    params: CaptureParams
    capture: int
    path: str
    selection: Selection
    quota_end: int
    exported: int
    due: int
    opened: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """First position that the request does not want."""
        wanted = UNLIMITED if self.params.include_output_tokens else self.request.num_prompt_tokens
        return wanted if self.params.stop is None else min(wanted, self.params.stop)

    @property
    def limit(self) -> int:
        """First position that is not captured."""
        return min(self.wanted, self.quota_end)

    @property
    def first_sample(self) -> int:
        """Position of the first row of logits."""
        return max(self.request.num_prompt_tokens - 1, self.params.start)

    @property
    def has_logits(self) -> bool:
        """Whether logits are captured."""
        return "logits" in self.selection.hooks
