# SPDX-License-Identifier: Apache-2.0
"""Compares a store with the oracle, hook by hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector import Capture, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.captures.attention import image_blocks
from dmi_connector.hooks import HOOKS, USUAL
from dmi_connector.store.read.verify import verify_store
from tests.runner import ATOL


def hooks_of(arch: str) -> list[str]:
    """The hooks of a tiny model of `arch` (one of ARCHS, or GLM-4-MoE) that can be captured without a reduction."""
    mlp = {"qwen3_moe": ("moe",), "glm4_moe": ("dense", "moe")}.get(arch, ("dense",))
    has = {None, *mlp, *USUAL} - ({"rotary"} if arch == "gpt2" else set())
    ungated = "mlp_pre_linear" if arch == "gpt2" else ""
    return [name for name, hook in HOOKS.items() if hook.only in has and name not in ("pattern", ungated)]


@lru_cache(maxsize=256)
def _run(oracle: Oracle, tokens: tuple[int, ...]) -> dict[str, np.ndarray]:
    return oracle.run(tokens)


def reference(oracle: Oracle, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """`oracle.run(tokens)`, cached."""
    return _run(oracle, tuple(tokens))


def same(got: np.ndarray, want: np.ndarray, where: str, atol: float = ATOL) -> None:
    """Fail unless shapes are equal and values differ by at most `atol`. The message names the largest difference."""
    assert got.shape == want.shape, f"{where}: shape {got.shape}, transformers has {want.shape}"
    if got.size == 0:
        return
    error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    at = np.unravel_index(int(error.argmax()), error.shape)
    assert error[at] <= atol, f"{where}: off by {error[at]:.2e} at {tuple(map(int, at))}: {got[at]} for {want[at]}"


def check_header(
    capture: Capture,
    tokens: Sequence[int],
    prompt_len: int,
    start: int,
    stop: int,
    name: str,
    missing: Sequence[list[int]] = (),
) -> None:
    """Check token ids, positions, phase, lengths and missing rows of a capture of rows [start, stop) of `tokens`."""
    assert capture.missing == list(missing), f"{name}: it misses {capture.missing}: {capture.reason}"
    assert capture.complete == (not missing) == (capture.reason is None), f"{name}: {capture.reason}"
    assert capture.prompt_len == prompt_len, f"{name}: prompt_len {capture.prompt_len}, not {prompt_len}"
    assert capture.token_ids.tolist() == list(tokens[start:stop]), f"{name}: token_ids differ"
    assert capture.positions.tolist() == list(range(start, stop)), f"{name}: positions {capture.positions}"
    phase = [int(at >= prompt_len) for at in range(start, stop)]
    assert capture.phase.tolist() == phase, f"{name}: phase {capture.phase}"


def check_store(
    path: Path,
    oracle: Oracle,
    tokens: Sequence[int],
    prompt_len: int,
    hooks: Sequence[str],
    *,
    rows: tuple[int, int] | None = None,
    layers: dict[str, list[int]] | None = None,
    greedy: bool = True,
    missing: Sequence[list[int]] = (),
    by_number: bool = False,
) -> dict[str, float]:
    """Check a whole store against the oracle's forward over `tokens` (prompt and all generated tokens).

    hooks: the exact set of hooks in the store. rows: [start, stop) of the positions in the store; default: all
    positions with a row. The last token has no row, because it was never an input. layers: {hook: captured layers} for
    hooks without some of their layers. greedy: whether the argmax of logits must be the next token. missing: row ranges
    that the store lists as missing. by_number: compare experts sorted by number, as `relative_errors` does. Returns
    {hook: largest error}.
    """
    name = path.name
    start, stop = rows or (0, len(tokens) - 1)
    want = reference(oracle, tokens)
    capture = open_capture(path, timeout=300, allow_incomplete=True)
    check_header(capture, tokens, prompt_len, start, stop, name, missing)
    assert set(capture.attrs["hooks"]) == set(hooks), f"{name}: it holds {list(capture.attrs['hooks'])}"
    errors = {}
    for hook in hooks:
        value = capture.numpy(hook)
        if hook == "logits":
            first = max(prompt_len - 1, start)
            assert capture.logits_positions.tolist() == list(range(first, stop)), f"{name}: logits_positions"
            expected = want["logits"][first:stop]
            if greedy:
                following = list(tokens[first + 1 : stop + 1])
                assert value.argmax(-1).tolist() == following, f"{name}: argmax of logits is not the sampled token"
        else:
            expected = want[hook][:, start:stop]
            if HOOKS[hook].scope == "layer":
                there = [*range(oracle.config.num_hidden_layers)]
                there = there[-len(expected) :] if HOOKS[hook].only == "moe" else there[: len(expected)]
                picked = (layers or {}).get(hook) or there
                assert capture.layers[hook] == picked, f"{name}: {hook} has layers {capture.layers[hook]}"
                expected = expected[[there.index(layer) for layer in picked]]
            else:
                expected = expected[0]
        if by_number and hook in ("topk_ids", "topk_weights"):
            value, expected = (
                np.take_along_axis(values, ids.argsort(-1), -1)
                for values, ids in (
                    (value, capture.numpy("topk_ids")),
                    (expected, want["topk_ids"][:, start:stop]),
                )
            )
        for index, (got, ref) in enumerate(zip(value, expected, strict=False)):
            layer = f" layer {capture.layers[hook][index]}" if HOOKS[hook].scope == "layer" else f" row {index}"
            # Logits sum the errors of all layers, so their tolerance is relative to the largest one.
            scale = float(np.abs(ref).max(initial=1.0)) if hook == "logits" else 1.0
            same(got, ref, f"{name}: {hook}{layer}", ATOL * scale)
        assert value.shape == expected.shape, f"{name}: {hook} has shape {value.shape}, not {expected.shape}"
        errors[hook] = float(np.abs(value - expected).max(initial=0.0))
    problems = verify_store(path)
    assert problems == [], f"{name}: verify says {list(map(str, problems))}"
    return errors


def relative_errors(
    path: Path, oracle: Oracle, tokens: Sequence[int], prompt_len: int, images: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """{hook: largest error} of a whole store, relative to the hook's largest absolute value in transformers.

    images: see `Oracle.run`. The store must have every hook of the oracle. Experts are compared sorted by number,
    because their weights may be almost equal.
    """
    capture = open_capture(path, timeout=300)
    check_header(capture, tokens, prompt_len, 0, len(tokens) - 1, path.name)
    want = oracle.run(tokens, images, image_blocks(capture)) if images else reference(oracle, tokens)
    assert set(capture.attrs["hooks"]) == set(want) - {"token_ids", "positions"}, f"{path.name}: {capture.hooks}"
    errors = {}
    for hook, whole in want.items():
        if hook in ("token_ids", "positions"):
            continue
        rows = capture.logits_positions if hook == "logits" else slice(0, len(tokens) - 1)
        expected = whole[..., rows, :]
        value = capture.numpy(hook).reshape(expected.shape)
        if hook in ("topk_ids", "topk_weights"):
            value = np.take_along_axis(value, capture.numpy("topk_ids").argsort(-1), -1)
            expected = np.take_along_axis(expected, want["topk_ids"][..., rows, :].argsort(-1), -1)
        if hook == "indexer_topk":  # the order of vLLM's kernels is undefined
            value = np.sort(value, -1)[..., ::-1]
        errors[hook] = float(np.abs(value - expected).max() / np.abs(expected).max())
    problems = verify_store(path)
    assert problems == [], f"{path.name}: verify says {list(map(str, problems))}"
    return errors


def cosines(
    path: Path, oracle: Oracle, tokens: Sequence[int], prompt_len: int, hooks: Sequence[str]
) -> dict[str, float]:
    """{hook: minimum cosine of a row with the oracle's} of a whole store, for rounded or quantised values."""
    capture = open_capture(path, timeout=300)
    check_header(capture, tokens, prompt_len, 0, len(tokens) - 1, path.name)
    want, least = reference(oracle, tokens), {}
    for hook in hooks:
        at = capture.logits_positions if hook == "logits" else slice(0, len(tokens) - 1)
        value = capture.numpy(hook)
        expected = want[hook][..., at, :].reshape(value.shape)
        norms = np.linalg.norm(value, axis=-1) * np.linalg.norm(expected, axis=-1)
        # NaN counts as -1, because `min` over hooks may skip NaN.
        least[hook] = float(np.nan_to_num(((value * expected).sum(-1) / norms).min(), nan=-1.0))
    return least


def attention_weights(model: Path | Oracle, tokens: list[int]) -> list[np.ndarray]:
    """Eager attention weights of transformers: for each layer [heads, queries, keys]."""
    import torch

    twin = model if isinstance(model, Oracle) else Oracle(model)
    with torch.no_grad():
        out = twin.model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
    return [weights[0].float().numpy() for weights in out.attentions]
