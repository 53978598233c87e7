# SPDX-License-Identifier: Apache-2.0
"""Files of probes, and their expected scores in float64."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dmi_connector import Capture
from dmi_connector.reduce.probe_file import NORM_EPS, Matrices, ProbeFacts, load, save


def matrices(*sizes: int, seed: int = 0) -> Matrices:
    """Random weights and biases of the layers of a network from sizes[0] values to sizes[-1]."""
    rng = np.random.default_rng(seed)
    return [
        ((rng.standard_normal((n, m)) / m**0.5).astype(np.float32), rng.standard_normal(n).astype(np.float32))
        for m, n in itertools.pairwise(sizes)
    ]


def save_probe(path: Path, hook: str, layers: tuple[int, ...], *sizes: int, seed: int = 0, **facts: Any) -> Path:
    """Write a probe file with random matrices of these sizes for each layer."""
    outputs = tuple(f"out{number}" for number in range(sizes[-1]))
    kind = "linear" if len(sizes) == 2 else "mlp"
    stacks = {layer: matrices(*sizes, seed=layer + seed) for layer in layers or (0,)}
    save(path, ProbeFacts(hook, layers, outputs, kind, **facts), stacks)
    return path


def scores(path: Path, rows: np.ndarray, layer: int = 0) -> np.ndarray:
    """The scores of a probe for rows [n, width] of one of its layers, computed with numpy. The activation is relu."""
    file = load(path)
    found = rows.astype(np.float64)
    if file.facts.norm == "unit":
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
    elif file.facts.norm == "layer":
        found = (found - found.mean(1, keepdims=True)) / np.sqrt(found.var(1, keepdims=True) + NORM_EPS)
    for number, (weight, bias) in enumerate(file.of(layer)):
        found = (np.maximum(found, 0) if number else found) @ weight.T.astype(np.float64) + bias
    if file.facts.output == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-found)))
    if file.facts.output == "softmax":
        return np.asarray(np.exp(found) / np.exp(found).sum(1, keepdims=True))
    return found


def check_scores(capture: Capture, probes: dict[str, Path], want: dict[str, np.ndarray]) -> None:
    """Fail unless the scores in a capture equal those of `probes` for the transformers rows `want`, within 1e-5. The
    capture's last row belongs to the token before the last.
    """
    rows = len(capture.token_ids)
    for name, path in probes.items():
        facts, got = load(path).facts, capture.numpy(f"probe.{name}")
        # these probes read resid_post of the last layer, which is resid_final
        hook = "resid_final" if facts.hook == "resid_post" else facts.hook
        every = want[hook].reshape(-1, *want[hook].shape[-2:])
        exact = every if hook == "resid_final" else every[list(facts.layers or (0,))]
        shape = (rows, len(facts.outputs)) if len(exact) == 1 else (len(exact), rows, len(facts.outputs))
        assert got.shape == shape and got.dtype == np.float32, (name, got.shape)
        for mine, values, layer in zip(got.reshape(-1, *shape[-2:]), exact, facts.layers or (0,), strict=True):
            np.testing.assert_allclose(mine, scores(path, values[:rows], layer), rtol=0, atol=1e-5, err_msg=name)


def check_inline(capture: Capture, name: str, found: dict[str, Any]) -> None:
    """Fail unless `found`, the scores of a probe in a response (max and mean), equals what the store holds. Borrowed
    rows do not count.
    """
    borrowed = capture.attrs.get("borrowed_tokens", 0)
    stored = capture.numpy(f"probe.{name}")[..., borrowed:, :]
    start = int(capture.attrs["start"]) + borrowed
    squeezed = lambda values: values[..., 0] if stored.shape[-1] == 1 else values  # noqa: E731
    want = {"max": stored.max(-2), "at": start + stored.argmax(-2), "last": stored[..., -1, :], "mean": stored.mean(-2)}
    assert set(found) == {*want, "from", "through"}
    assert (found["from"], found["through"]) == (start, start + stored.shape[-2] - 1)
    for what, values in want.items():
        np.testing.assert_allclose(found[what], squeezed(values), rtol=1e-6, atol=1e-6, err_msg=f"{name} {what}")


def check_largest(found: np.ndarray, want: np.ndarray, k: int) -> None:
    """Fail unless `found` [layers, tokens, 2 k] has the k largest values of the transformers rows `want` [layers,
    tokens, width], within 1e-5, in order of decreasing magnitude, each with its index.
    """
    assert found.shape == (*want.shape[:2], 2 * k) and found.dtype == np.float32
    ids, values = found[..., :k].astype(int), found[..., k:]
    assert (ids == found[..., :k]).all() and all(len(set(row)) == k for row in ids.reshape(-1, k).tolist())
    assert (np.diff(np.abs(values), axis=-1) <= 0).all()
    np.testing.assert_allclose(values, np.take_along_axis(want, ids, -1), rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.abs(values), -np.sort(-np.abs(want), -1)[..., :k], rtol=0, atol=1e-5)


def check_neurons(said: dict[str, Any], want: np.ndarray, k: int, first: int) -> None:
    """Fail unless a summary lists the k neurons of a hook with the largest values in the transformers rows `want`
    [layers, tokens, width], from position `first` on. Values have four digits.
    """
    neurons, values, at = (np.array(said[what]).reshape(len(want), k) for what in ("neuron", "value", "at"))
    assert ((at >= first) & (at < first + want.shape[1])).all()
    most = np.abs(want).max(1)
    for layer, rows in enumerate(want):
        assert len(set(neurons[layer].tolist())) == k
        np.testing.assert_allclose(values[layer], rows[at[layer] - first, neurons[layer]], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(np.abs(values[layer]), -np.sort(-most[layer])[:k], rtol=1e-3, atol=1e-5)


def save_encoder(folder: Path, width: int, latents: int, shift: float = 0.5, **config: Any) -> Path:
    """Write a random autoencoder in SAELens's format. shift: how far latents are below 0 for an input of 0."""
    rng = np.random.default_rng(0)
    sizes = {"W_enc": (width, latents), "b_dec": (width,)}
    sizes |= {name: (latents,) for name in ("b_enc", "b_gate", "b_mag", "r_mag", "threshold")}
    made = {name: rng.standard_normal(size, dtype=np.float32) / width**0.5 for name, size in sizes.items()}
    made |= {name: made[name] - np.float32(shift) for name in ("b_enc", "b_gate")}
    folder.mkdir(exist_ok=True)
    save_file(made, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard", **config}))
    return folder
