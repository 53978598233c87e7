# SPDX-License-Identifier: Apache-2.0
"""Keeps the reasons why requests are served without a capture."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

from dmi_connector.wording import show

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.dmi_connector")

_OF_BEAM_SEARCH = re.compile(r"-[0-9a-f]{16,32}-beam-\d+(-[0-9a-f]{8})?$")
"""End of the ids of requests for beam search. In vLLM's server each of them is one step of one beam."""
_LONGEST = 2000
"""Maximum characters of a reason, the `dmi_error` of a response."""
_EACH_S = 10.0
"""Minimum seconds between two logged refusals. Each log line has the number of refusals since the previous one."""


class RefusedRequests(dict[str, str]):
    """Request id -> reason, until the response has it. Reasons are also logged, as streaming responses lack them."""

    def __init__(self) -> None:
        super().__init__()
        self._unlogged, self._log_from = 0, 0.0  # refusals since the last log line, earliest time of the next line
        self._beams_logged = False

    def beam_search(self, request: Request) -> bool:
        """Whether a request is one step of a beam in vLLM's server. Such a request lacks the client's options."""
        sampling = request.sampling_params
        found = (
            request.kv_transfer_params is None
            and sampling is not None
            and sampling.max_tokens == 1  # the server sends one request per step
            and not sampling.detokenize
            and _OF_BEAM_SEARCH.search(request.request_id) is not None
        )
        if found and not self._beams_logged:
            logger.warning("dmi: requests of beam search are not captured: vLLM does not hand on their options")
            self._beams_logged = True
        return found

    def add(self, request_id: str, reason: str) -> None:
        """Keep a reason, with characters and a length that any response can contain."""
        reason = reason[:_LONGEST].encode("utf-8", "backslashreplace").decode()
        self[request_id] = reason
        self._unlogged += 1
        if time.monotonic() >= self._log_from:
            others = f" (and {self._unlogged - 1} before it)" if self._unlogged > 1 else ""
            logger.warning("dmi: request %s is not captured: %r%s", show(request_id), reason, others)
            self._unlogged, self._log_from = 0, time.monotonic() + _EACH_S
