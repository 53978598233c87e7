# SPDX-License-Identifier: Apache-2.0
"""Builds the root attributes of requests with images and other media (docs/FORMAT.md, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from dmi_connector.engine.context import CaptureContext


def media_attributes(request: Request, context: CaptureContext) -> dict[str, Any]:
    """The root attributes of a request with media; {} without media.

    After each of the first `visual_layers` layers, the model adds visual features to the residual stream of media
    positions. So the identities of the residual stream do not hold for every row.
    """
    media = [
        {"modality": feature.modality, "hash": feature.identifier, "positions": _positions(feature.mm_position)}
        for feature in sorted(request.mm_features, key=lambda one: one.mm_position.offset)
    ]
    if not media:
        return {}
    layers = context.visual_layers
    return {"media": media, **({"identities": False, "visual_layers": layers} if layers else {})}


def later_media(request: Request, known: int, context: CaptureContext) -> dict[str, Any]:
    """`media_attributes` for all turns of a session; {} if later turns added none. known: number in the first turn."""
    if len(request.mm_features) == known:
        return {}
    return {**media_attributes(request, context), "last_prompt_len": request.num_prompt_tokens}


def _positions(place: Any) -> list[list[int]]:
    """The [start, stop) ranges of positions whose embeddings come from one item. place: vLLM's `PlaceholderRange`."""
    mask = np.ones(place.length, bool) if place.is_embed is None else np.asarray(place.is_embed, bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))) + place.offset
    return [[int(start), int(stop)] for start, stop in edges.reshape(-1, 2)]
