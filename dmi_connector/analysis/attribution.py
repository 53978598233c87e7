# SPDX-License-Identifier: Apache-2.0
"""Direct logit attribution: the contribution of each block of each layer to the logit of one token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dmi_connector.analysis.training.rows import BLOCK, attribute, known_tokens
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.reduce import Keeps

_BLOCKS = {"attn_out": "attn", "mlp_out": "mlp"}
"""{hook: name of its block in labels}."""


def logit_attribution(
    capture: Capture,
    unembedding: Unembedding,
    targets: Sequence[int] | np.ndarray | int | None = None,
    against: int | None = None,
    rows: slice | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Split the logit of one token into a share for each part of the residual stream (Elhage et al., 2021).

    The residual stream is the sum of the input of layer 0 ("embed") and of each layer's `attn_out` and `mlp_out`
    ("0.attn", "0.mlp"). The divisor of the final norm is held fixed, so that the norm is linear and each part
    contributes a share of the logit. The shares of a row, including the one of biases ("bias"), sum to the logit before
    a soft cap. In models that add visual features after their first layers (Qwen3-VL), these are the part "visual".

    targets: ids of the tokens whose logits are split, one for all rows or one per row of the store. None: the next
    token; for the last row, the likeliest next token. against: id of a token whose logit is subtracted. The shares then
    sum to the difference of the two logits. rows: rows of the store in the result, a slice with step 1; None: all.

    Returns (shares, float32 [parts, tokens]; a label for each part). Missing rows are NaN. Without `targets`, rows
    whose next token is unknown are NaN too.

    Raises KeyError if `resid_pre` of layer 0, `attn_out` or `mlp_out` of a layer, or `resid_final` was not captured.
    Raises ValueError for a model whose layers scale the stream (Gemma 4), for tokens outside the vocabulary, if the
    number of targets is not the number of rows, and for hooks stored as projections or topk.
    """
    if capture.attrs.get("identities") is False and not capture.attrs.get("visual_layers"):
        raise ValueError(
            f"{capture.path} is of a model whose layers also scale the residual stream, so the outputs of its blocks "
            "do not sum to the stream; use the logit lens"
        )
    tokens, layers = len(capture.token_ids), range(int(attribute(capture, "num_layers")))
    for hook in ("resid_pre", "attn_out", "mlp_out", "resid_final"):
        check_own_values(capture, hook, needs=Keeps.EVERY_VALUE)
    blocks = output_blocks(capture.attrs, layers)
    labels = ["embed", *(f"{layer}.{_BLOCKS[hook]}" for hook, layer in blocks)]
    labels += ["visual"] * bool(capture.attrs.get("visual_layers")) + ["bias"]
    chosen = _targets(capture, unembedding, targets)
    _check_tokens(unembedding, chosen if against is None else np.append(chosen, against))
    window = range(tokens)[rows or slice(None)]
    shares = np.full((len(labels), len(window)), np.nan, np.float32)
    for run in capture.runs(BLOCK):
        rows = slice(max(run.start, window.start), min(run.stop, window.stop))
        if rows.start >= rows.stop:
            continue
        to = slice(rows.start - window.start, rows.stop - window.start)
        read = unembedding.weights_of(chosen[rows])
        offset = np.zeros(len(read), np.float32) if unembedding.offset is None else unembedding.offset[chosen[rows]]
        if against is not None:
            read = read - unembedding.weights_of(against)
            offset = offset if unembedding.offset is None else offset - unembedding.offset[against]
        direction = read * unembedding.gain * np.float32(unembedding.scale)
        final = capture.numpy("resid_final", tokens=rows)
        direction /= unembedding.spread(final)
        added = np.zeros_like(final)
        for i, part in enumerate(_parts(capture, blocks, rows)):
            shares[i, to] = (unembedding.centre(part) * direction).sum(-1)
            added += part
        if "visual" in labels:
            visual = np.where(capture.media[rows, None] >= 0, final - added, np.float32(0))
            shares[-2, to] = (unembedding.centre(visual) * direction).sum(-1)
        shares[-1, to] = read @ unembedding.bias * np.float32(unembedding.scale) + offset
    if targets is None:
        known = np.append(known_tokens(capture)[1:], True)
        shares[:, ~known[window.start : window.stop]] = np.nan
    return shares, labels


def output_blocks(attrs: Mapping[str, Any], layers: range) -> list[tuple[str, int]]:
    """(hook, layer) of the output of each block, in order. A layer may have one block (attribute `mlp_layers`)."""
    one_block = attrs.get("mlp_layers")
    if one_block is not None:
        return [("mlp_out" if layer in one_block else "attn_out", layer) for layer in layers]
    return [(hook, layer) for layer in layers for hook in _BLOCKS]


def _parts(capture: Capture, blocks: Sequence[tuple[str, int]], rows: slice) -> Iterator[np.ndarray]:
    """Yield the parts whose sum is the residual stream, each [rows, width]."""
    yield capture.numpy("resid_pre", 0, rows)
    for hook, layer in blocks:
        yield capture.numpy(hook, layer, rows)


def _targets(
    capture: Capture, unembedding: Unembedding, targets: Sequence[int] | np.ndarray | int | None
) -> np.ndarray:
    """The id of the target token of each row of the store, int64 [tokens]."""
    count = len(capture.token_ids)
    if targets is not None:
        given = np.asarray(targets, np.int64)
        if given.ndim and given.shape != (count,):
            raise ValueError(
                f"targets have shape {given.shape}, the store has {count} rows; give one id, or one id per row"
            )
        return np.broadcast_to(given, count)
    last = capture.numpy("resid_final", tokens=slice(max(0, count - 1), count))
    likeliest = unembedding.logits(last).argmax(-1)
    return np.concatenate([capture.token_ids[1:], likeliest]).astype(np.int64)


def _check_tokens(unembedding: Unembedding, ids: np.ndarray) -> None:
    """Raise ValueError for an id outside the vocabulary."""
    wrong = ids[(ids < 0) | (ids >= len(unembedding.weight))]
    if len(wrong):
        raise ValueError(f"token {wrong[0]} does not exist; the vocabulary has {len(unembedding.weight)} tokens")
