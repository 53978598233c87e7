# SPDX-License-Identifier: Apache-2.0
"""`dmi fidelity` of queries and keys: the share of the largest attention weights that decoded queries and keys keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.analysis.attention_overlap import AttentionOverlap
from dmi_connector.analysis.fidelity import fidelity
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.reduce import parse
from tests import oraclestore

LENGTHS = (40, 25)
HEADS, SIZE = 4, 32


@pytest.fixture(scope="module")
def stores(oracle: Callable[..., Oracle], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    hooks = ("q_rot", "k_rot", "v")
    return [
        oraclestore.write(oracle("qwen3"), folder / f"{n}.zarr", rng.integers(10, 500, n).tolist(), hooks=hooks).path
        for n in LENGTHS
    ]


def largest(q: np.ndarray, k: np.ndarray, head: int) -> list[set[int]]:
    """For each query with more than eight keys: the keys with the eight largest weights."""
    mine, keys = q[:, head * SIZE : (head + 1) * SIZE], k[:, head // 2 * SIZE : (head // 2 + 1) * SIZE]
    return [set(np.argsort(-(mine[i] @ keys[: i + 1].T), kind="stable")[:8].tolist()) for i in range(8, len(q))]


@pytest.mark.parametrize("hook", ["q_rot", "k_rot"])
def test_the_share_of_the_largest_weights_is_counted(stores: list[Path], hook: str) -> None:
    """The expected share is counted with sets, over all stores and heads. Two query heads share a key head."""
    import torch

    reduction = parse("topk(16,exact,sample=0)")
    assert reduction is not None
    kept = counted = 0
    for store in stores:
        capture = open_capture(store, 0)
        rows = {name: capture.numpy(name, 1) for name in ("q_rot", "k_rot")}
        stored = reduction.encode(torch.from_numpy(rows[hook])).numpy()
        restored = {**rows, hook: reduction.decode(stored, rows[hook].shape[1], "float32")}
        for head in range(HEADS):
            pairs = zip(largest(*rows.values(), head), largest(*restored.values(), head), strict=True)
            for one, other in pairs:
                kept, counted = kept + len(one & other), counted + 8
    [found] = fidelity(stores, ["topk(16,exact,sample=0)"], hook, [1])
    assert 0.3 < found.measures["attention"] < 0.95
    assert found.measures["attention"] == pytest.approx(kept / counted, abs=1e-3)
    [same] = fidelity(stores, ["round(23)"], hook, [1])
    assert same.measures["attention"] == 1


def test_attention_that_cannot_be_computed_is_not_measured(
    stores: list[Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    assert AttentionOverlap.of(stores, "v", 1) is None
    alone = oraclestore.write(oracle("qwen3"), tmp_path / "a.zarr", list(range(20)), hooks=("q_rot",)).path
    assert AttentionOverlap.of([alone], "q_rot", 1) is None
    assert AttentionOverlap.of([*stores, alone], "q_rot", 1) is None
    facts = {"scale": SIZE**-0.5, "image_blocks": True}
    oraclestore.write(oracle("qwen3"), tmp_path / "text.zarr", list(range(20)), facts)
    assert AttentionOverlap.of([tmp_path / "text.zarr"], "q_rot", 1) is not None
    image = [{"positions": [[3, 7]]}]
    oraclestore.write(oracle("qwen3"), tmp_path / "image.zarr", list(range(20)), facts, media=image)
    assert AttentionOverlap.of([tmp_path / "image.zarr"], "q_rot", 1) is None, (
        "tokens of an image attend to later tokens"
    )
    [projected] = fidelity(stores, ["rp(16)"], "q_rot", [1])
    assert "attention" not in projected.measures
