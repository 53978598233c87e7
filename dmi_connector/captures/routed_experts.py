# SPDX-License-Identifier: Apache-2.0
"""Reads which experts each token was routed to, in the format of vLLM's `CompletionOutput.routed_experts`."""

from __future__ import annotations

import numpy as np

from dmi_connector.option_values import whole_number
from dmi_connector.store.read.reader import StoreReader

_MOST_UINT8 = 256
"""Maximum number of experts for which vLLM uses uint8."""
_ROWS = 4096
"""Number of rows read at a time."""
_FEW = 32
"""With one expert per token, fewer tokens than this may all have expert 0."""


def routed_experts(capture: StoreReader, prompt_start: int = 0, check: bool = True) -> np.ndarray:
    """The experts of tokens, [tokens - prompt_start, layers, top_k], as vLLM's `enable_return_routed_experts` gives.

    tokens: the rows of the store. With `include_output_tokens` these are all tokens of the request except the last one,
    which is never fed to the model. layers: all layers of the model, with zeros for layers without experts. Experts are
    in descending order of weight, uint8 for at most 256 experts, else uint16.

    prompt_start: number of tokens to leave out at the start of the prompt, at most the whole prompt, as in
    `SamplingParams.routed_experts_prompt_start`. check: refuse a layer with experts if all expert numbers are 0, as
    from a kernel without accessible routing. With one expert per token, this check needs at least 32 tokens.

    Raises KeyError if `topk_ids` was not captured. Raises ValueError for a store that lacks layers or rows, for a store
    that is too old to have the number of experts, for an invalid prompt_start, and for a layer of zeros.
    """
    count, layers = _experts(capture)
    held = capture.layers["topk_ids"] if "topk_ids" in capture else []
    lacking = [layer for layer in layers if layer not in held]
    if held and lacking:
        raise ValueError(f"{capture.path} lacks topk_ids of layers {lacking}; capture all layers with experts")
    first = _first_row(capture, prompt_start)
    _, tokens, top_k = capture.shape("topk_ids")
    dtype = np.dtype(np.uint8 if count <= _MOST_UINT8 else np.uint16)
    found = np.zeros((max(tokens - first, 0), int(capture.attrs["num_layers"]), top_k), dtype)
    for start in range(first, tokens, _ROWS):
        rows = slice(start, min(start + _ROWS, tokens))
        found[rows.start - first : rows.stop - first, held] = capture.numpy("topk_ids", tokens=rows).swapaxes(0, 1)
    empty = [layer for layer in held if len(found) and not found[:, layer].any()]
    if check and empty and (top_k > 1 or len(found) >= _FEW):
        raise ValueError(
            f"{capture.path}: all experts of layers {empty} are number 0, so the kernel probably does not report its"
            " routing; check=False returns them as they are"
        )
    return found


def _first_row(capture: StoreReader, prompt_start: int) -> int:
    """The first row to return. Raises ValueError if it or a later row is missing."""
    number = whole_number(prompt_start)
    if number is None or number < 0:
        raise ValueError(f"prompt_start {prompt_start!r} is not valid; use 0 or more tokens")
    start, prompt = int(capture.attrs["start"]), capture.prompt_len
    if start > prompt:
        raise ValueError(
            f"{capture.path} begins at position {start}, after the prompt of {prompt} tokens, and prompt_start can"
            " leave out only tokens of the prompt; read numpy('topk_ids') instead"
        )
    first = min(prompt_start, prompt) - start
    if first < 0:
        raise ValueError(
            f"{capture.path} begins at position {start}, and prompt_start {prompt_start} asks for rows before it; give"
            f" {start} or more"
        )
    lacking = [rows for rows in capture.missing if rows[1] > first]
    if lacking:
        raise ValueError(f"{capture.path} lacks rows {lacking} of the routing; read numpy('topk_ids') instead")
    return first


def _experts(capture: StoreReader) -> tuple[int, list[int]]:
    """(number of experts, layers that have them)."""
    facts = capture.attrs.get("experts")
    if facts is not None:
        return int(facts["count"]), list(facts["layers"])
    capture.sources("topk_ids")  # raises KeyError for a model without experts
    if "router_logits" not in capture:
        raise ValueError(
            f"{capture.path} has an old format that does not record the number of experts; read numpy('topk_ids')"
        )
    return capture.shape("router_logits")[-1], capture.layers["topk_ids"]
