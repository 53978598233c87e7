# SPDX-License-Identifier: Apache-2.0
"""Compares reduced hooks of a store with transformers' values after the reduction's numpy twin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmi_connector import Capture
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.basis import Basis
from dmi_connector.reduce.channel import ChannelInt8
from dmi_connector.reduce.channel_projection import ChannelProjection
from dmi_connector.reduce.codebooks import Codebooks
from dmi_connector.reduce.countsketch import CountSketch
from dmi_connector.reduce.fp8 import Fp8
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.pq import ProductQuantisation
from dmi_connector.reduce.projection import RandomProjection, SeededProjection
from dmi_connector.reduce.rounding import Round
from dmi_connector.reduce.scales import Scales
from dmi_connector.reduce.topk import TopK
from dmi_connector.store.read.fitted_files import find_fitted

KEPT = ("embed", "logits")
"""Hooks that may be stored without a reduction."""
NOISE = 1e-5
"""Rounding differences of two float32 programs."""


def whole_rows(values: np.ndarray, hook: str, prompt_len: int, tokens: Sequence[int]) -> np.ndarray:
    """The rows of `check.reference` that a store of a whole request has. tokens: prompt and generated tokens.

    The last token has no row. Logits are those of the generated tokens.
    """
    end = len(tokens) - 1
    return values[prompt_len - 1 : end] if hook == "logits" else values[..., :end, :]


def check(capture: Capture, hook: str, got: np.ndarray, exact: np.ndarray, noise: float = NOISE) -> None:
    """Check that the decoded rows `got` are as close to `exact` [..., width] as the reduction guarantees, slice by
    slice.

    noise: rounding differences of the two programs.
    """
    reduction, shards = capture.reduction(hook), capture.attrs["hooks"][hook]["shards"]
    if isinstance(reduction, TopK):
        magnitude = np.abs(exact)
        kept = got != 0
        assert (kept.sum(-1) == reduction.k).all(), hook
        lowest = np.where(kept, magnitude, np.inf).min(-1)
        step = 0 if reduction.exact else magnitude.max(-1, keepdims=True) / 127
        # Slices are merged by their stored values, so a value that was left out may be larger by one step.
        unsure = step if shards > 1 else 0
        assert (np.where(kept, 0, magnitude).max(-1, keepdims=True) <= lowest[..., None] + unsure + noise).all(), hook
        assert (np.abs(np.where(kept, got - exact, 0)) <= 0.51 * step + noise).all(), hook
        if not reduction.sample:
            return
        width = exact.shape[-1] // shards
        stored = np.split(capture.array(hook)[:], shards, -1)
        for part, values in zip(stored, np.split(exact, shards, -1), strict=True):
            places, sampled = reduction.sampled(part, width, "float32")
            true = np.take_along_axis(values, places, -1)
            fits = reduction.exact & (np.abs(sampled - true) <= noise).all(-1)
            if not reduction.exact:  # sampled values are clipped to the scale of the others
                least = np.sort(np.abs(values), -1)[..., -reduction.k, None]
                # rounding may decide which value is the smallest kept one
                for limit in (least + noise, least, least - noise):
                    largest = np.where(np.abs(true) > limit, 0, np.abs(true)).max(-1, keepdims=True)
                    errors = np.abs(sampled - np.clip(true, -largest, largest))
                    fits |= (errors <= 0.51 * largest / 127 + noise).all(-1)
            assert fits.all(), hook
        return
    if isinstance(reduction, Pca):
        for layer, (scores, values) in enumerate(zip(got, exact, strict=True)):
            part = find_fitted(Basis, reduction.sha256, capture.path).of(hook, layer, 12)
            if reduction.group:  # the heads of a slice share one scale
                components, std = part.of_groups
                cut = (values - part.mean).reshape(len(values), len(std), -1).swapaxes(0, 1)
                want = (cut @ components / std[:, None]).swapaxes(0, 1).reshape(len(values), shards, -1)
                steps = np.abs(want).max(-1, keepdims=True) / 127
                assert (np.abs(scores.reshape(want.shape) - want) <= 0.51 * steps + 100 * noise).all(), hook
                continue
            slices = [
                (mine @ components) / part.std
                for mine, components in zip(
                    np.split(values - part.mean, shards, -1), np.split(part.components, shards), strict=True
                )
            ]
            steps = sum(np.abs(s).max(-1, keepdims=True) / 127 for s in slices)
            assert (np.abs(scores - sum(slices)) <= 0.51 * steps + 100 * noise).all(), hook
        return
    if isinstance(reduction, ProductQuantisation):
        file = find_fitted(Codebooks, reduction.sha256, capture.path)
        for layer, (rows, values) in enumerate(zip(got, exact, strict=True)):
            centroids = file.of(hook, layer)
            read, cut = (x.reshape(len(x), len(centroids), 1, -1) for x in (rows, values))
            assert ((read == centroids).all(-1).any(-1)).all(), hook
            nearest = ((cut - centroids) ** 2).sum(-1).min(-1)
            unsure = 2**-18 * (cut**2).sum((-1, -2)) + noise
            assert (((cut - read) ** 2).sum((-1, -2)) <= nearest + unsure).all(), hook
        return
    if isinstance(reduction, ChannelInt8):
        layers = capture.layers[hook] or [0]
        scales = np.stack([find_fitted(Scales, reduction.sha256, capture.path).of(hook, layer) for layer in layers])
        step = scales[:, None] if capture.layers[hook] else scales
        inside = np.clip(exact, -127 * step, 127 * step)
        assert (np.abs(got - inside) <= 0.51 * step + noise).all(), hook
        assert (exact == inside).mean() > 0.99, "the scales were fitted on other rows"
        return
    if isinstance(reduction, ChannelProjection):
        layers = range(len(got))
        step = np.stack([find_fitted(Scales, reduction.sha256, capture.path).of(hook, n) for n in layers])[:, None]
        # grouped by head, so slices are concatenated
        values = np.stack([reduction.rows_projected(rows) for rows in exact])
        inside = np.clip(values, -127 * step, 127 * step)
        assert (np.abs(got - inside) <= 0.51 * step + noise).all(), hook
        assert (values == inside).mean() > 0.99
        return
    for mine, values in zip(np.split(got, shards, -1), np.split(exact, shards, -1), strict=True):
        width = values.shape[-1]
        if isinstance(reduction, SeededProjection):
            values = values @ np.stack([reduction.slice_projected(unit) for unit in np.eye(width)])
        largest = np.abs(values).max(-1, keepdims=True)
        if isinstance(reduction, Int8) and reduction.group:
            cut = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -width % reduction.group)])
            steps = np.abs(cut.reshape(*cut.shape[:-1], -1, reduction.group)).max(-1) / 127
            allowed = 0.51 * np.repeat(steps, reduction.group, -1)[..., :width]
        elif isinstance(reduction, Int8 | RandomProjection):
            affine = isinstance(reduction, Int8) and reduction.affine
            step = (values.max(-1, keepdims=True) - values.min(-1, keepdims=True)) / 254 if affine else largest / 127
            allowed = 0.51 * step
        elif isinstance(reduction, CountSketch):
            allowed = noise * width / reduction.k  # tolerance for each value of a sum
            allowed = np.full(1, allowed) if reduction.exact else allowed + 0.51 * largest / 127
        elif isinstance(reduction, Fp8):
            allowed = np.abs(values) * 2.0**-4 + largest / 448 * 2.0**-9
        elif isinstance(reduction, Round):
            allowed = np.abs(values) * 2.0 ** -(reduction.bits + 1)
        else:
            assert reduction is None and hook in KEPT, hook
            allowed = np.zeros(1)
        assert (np.abs(mine - values) <= allowed + noise).all(), (hook, np.abs(mine - values).max())


def check_summaries(capture: Capture, want: Sequence[np.ndarray], m: int) -> None:
    """Check that `pattern` has the m largest weights of transformers, `want`: per layer [heads, queries, keys]."""
    reduction = capture.reduction("pattern")
    assert isinstance(reduction, AttentionSummary) and reduction.m == m
    near = {"rtol": 0.001 if reduction.half else 0, "atol": 1e-5}  # tolerance for float16
    tokens = len(capture.token_ids)
    for layer, full in enumerate(want):
        positions, weights, entropy = (x.swapaxes(0, 1) for x in capture.attention_summary(layer))
        assert positions.shape == (full.shape[0], tokens, m)
        best = -np.sort(-full, axis=-1)[..., :m]
        kept = best.shape[-1]  # a prompt may have fewer keys than m
        np.testing.assert_allclose(weights[..., :kept], best, **near)
        there = np.arange(m) <= np.arange(tokens)[:, None]
        assert ((positions >= 0) == there).all() and (weights[..., kept:] == 0).all()
        at = np.take_along_axis(full, np.maximum(positions, 0), -1)
        np.testing.assert_allclose(weights, np.where(there, at, 0), **near, err_msg="weights lie there")
        assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in positions.reshape(-1, m))
        exact = -(full * np.log(np.where(full > 0, full, 1))).sum(-1)
        np.testing.assert_allclose(entropy, exact, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(capture.attention_summary(layer, head=-1)[1], weights[-1])
