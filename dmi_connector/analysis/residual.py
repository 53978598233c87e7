# SPDX-License-Identifier: Apache-2.0
"""The residual stream of one capture: norms per layer and token, and drift per token."""

from __future__ import annotations

import numpy as np

from dmi_connector.analysis.training.rows import check_one_layer, hook_rows, present_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.reduce import Keeps


def residual_norms(capture: Capture) -> tuple[np.ndarray, list[str]]:
    """(Euclidean norms of the residual stream, float32 [layers, tokens]; the label of each layer).

    The layers are those in which resid_pre was captured, labelled by their numbers, then "final" if resid_final was
    captured. Missing rows are NaN. Raises ValueError if neither hook was captured, or if one was stored as principal
    components (pca).
    """
    rows, labels = [], []
    for hook in ("resid_pre", "resid_final"):
        if hook in capture:
            check_own_values(capture, hook, needs=Keeps.NORMS)
    if "resid_pre" in capture:
        for layer in capture.layers["resid_pre"]:
            rows.append(np.linalg.norm(capture.numpy("resid_pre", layer=layer), axis=-1))
            labels.append(str(layer))
    if "resid_final" in capture:
        rows.append(np.linalg.norm(capture.numpy("resid_final"), axis=-1))
        labels.append("final")
    if not rows:
        raise ValueError(
            f"{capture.path} has no residual stream (hooks resid_pre, resid_final); it has {capture.hooks}"
        )
    norms = np.stack(rows)
    norms[:, ~present_rows(capture)] = np.nan
    return norms, labels


def drift(capture: Capture, hook: str = "resid_final", layer: int | None = None, since: str = "prompt") -> np.ndarray:
    """1 - cosine between each row of a hook and a reference row, float32 [tokens], from 0 to 2.

    since: the reference. "prompt" is the mean of the prompt's rows, "previous" is the row before. layer: required if
    several layers were captured. The result is NaN for a missing row, a row without a reference, and a row or reference
    that is zero or not finite.

    Raises KeyError for a hook or layer that was not captured. Raises ValueError for another `since`, and for several
    layers without `layer`. Raises ValueError for logits, integers, principal components (pca), attention summaries,
    probes and latents. With "prompt", raises ValueError if the store has no row of the prompt.
    """
    if since not in ("prompt", "previous"):
        raise ValueError(f"since {since!r} is not valid; use 'prompt' or 'previous'")
    check_one_layer(capture, hook, layer)
    check_own_values(capture, hook, layer, Keeps.NORMS)
    rows, there = hook_rows(capture, hook, layer, slice(None)), present_rows(capture)
    if rows.dtype.kind in "iu":
        raise ValueError(f"{hook!r} holds integers, which have no direction; name another hook")
    reference = np.full_like(rows, np.nan)
    if since == "previous":
        reference[1:][there[:-1]] = rows[:-1][there[:-1]]
    else:
        prompt = there & (capture.phase == 0)
        if not prompt.any():
            raise ValueError(f"{capture.path} holds no row of the prompt to compare with; use since='previous'")
        reference[:] = rows[prompt].mean(0)
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(reference, axis=1)
    there &= norms > 0  # false for NaN too
    out = np.full(len(rows), np.nan, np.float32)
    out[there] = 1 - (rows * reference).sum(1)[there] / norms[there]
    return out
