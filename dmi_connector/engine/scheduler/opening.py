# SPDX-License-Identifier: Apache-2.0
"""Builds the message to the workers at the beginning of a capture."""

from __future__ import annotations

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.messages import Borrow, Open
from dmi_connector.engine.scheduler.media import media_attributes
from dmi_connector.engine.scheduler.tracked_request import Tracked


def opening(tracked: Tracked, borrow: Borrow | None, context: CaptureContext) -> Open:
    """The message for a request that is scheduled for the first time. borrow: its first rows, if another store has
    them.
    """
    request = tracked.request
    tracked.skip(0 if borrow is None else len(borrow.token_ids))
    sampling = request.sampling_params
    end = min(request.num_prompt_tokens + request.max_tokens, tracked.limit)
    tracked.media = len(request.mm_features)
    return Open(
        capture=tracked.capture,
        path=tracked.path,
        hooks=dict(tracked.selection.hooks),
        request_id=request.request_id,
        key=tracked.params.key,
        start=tracked.params.start,
        most_rows=max(0, end - tracked.params.start),
        attrs={
            "prompt_len": request.num_prompt_tokens,
            "seed": None if sampling is None else sampling.seed,
            **tracked.params.store_attributes,
            "adapter": None if request.lora_request is None else request.lora_request.lora_name,
            **media_attributes(request, context),
            **({} if borrow is None else borrow.attributes),
        },
        borrow=borrow,
    )
