# SPDX-License-Identifier: Apache-2.0
"""`importance`: mean |x| of neurons over stores that hold them whole, in 8 bits, and as top k with a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dmi_connector import importance, open_capture
from dmi_connector.reduce import parse
from dmi_connector.store.persist import Persistence
from dmi_connector.store.schema import ArraySpec
from tests import storekit as kit

WIDTH, TOKENS, STORES = 64, 300, 3
SPECS = {"mlp_post": "topk(8)", "mlp_out": "topk(8,exact,sample=0)", "z": "int8", "ln2": "rp(16)"}
IDS = ArraySpec("topk_ids", "int32", (0,), 2)
SCALES = np.linspace(0.5, 1.5, WIDTH) ** 2


def values(seed: int, layer: int) -> np.ndarray:
    """Float32 [TOKENS, WIDTH]: neurons of growing strength, in layer 1 the other way round."""
    drawn = np.random.default_rng([seed, layer]).normal(size=(TOKENS, WIDTH)) * SCALES[:: 1 - 2 * layer]
    return drawn.astype(np.float32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, persistence = tmp_path_factory.mktemp("neurons"), Persistence(4 << 20)
    arrays, encode = [ArraySpec("q", "float32", (0, 1), WIDTH), IDS], {}
    for hook, spec in SPECS.items():
        reduction = parse(spec)
        assert reduction is not None
        settings = {**reduction.settings(), "dtype": "float32", "width": WIDTH}
        arrays.append(ArraySpec(hook, "uint8", (0, 1), reduction.stored_width(WIDTH, "float32"), reduce=settings))
        encode[hook] = reduction.encode
    for i in range(STORES):
        rows = [values(i, layer) for layer in (0, 1)]
        stored = {h: np.stack([f(torch.from_numpy(r)).numpy() for r in rows]) for h, f in encode.items()}
        kit.store(
            persistence,
            folder / f"{i}.zarr",
            arrays,
            TOKENS,
            values={"q": np.stack(rows).view("u4"), "topk_ids": kit.random_bits(IDS, TOKENS), **stored},
        )
    assert persistence.shutdown(30)
    return [folder / f"{i}.zarr" for i in range(STORES)]


@pytest.mark.parametrize("layer", [0, 1])
def test_means_of_neurons(stores: list[Path], layer: int) -> None:
    captures = [open_capture(store, 0) for store in stores]
    rows = np.concatenate([values(i, layer) for i in range(STORES)]).astype(np.float64)
    true = np.abs(rows).mean(0)
    np.testing.assert_allclose(importance(captures, "q", layer), true, rtol=1e-6)
    np.testing.assert_allclose(importance(captures, "z", layer - 2), true, rtol=0.02)
    np.testing.assert_allclose(importance(captures[0], "q", layer), np.abs(rows[:TOKENS]).mean(0), rtol=1e-6)
    # A neuron that is not kept is sampled in 2 of 64 rows, some 25 times: 3 standard errors are half of its mean.
    found = importance(captures, "mlp_post", layer)
    assert np.abs(found / true - 1).max() < 0.6 and abs(found.mean() / true.mean() - 1) < 0.05
    kept = np.abs(rows) >= np.sort(np.abs(rows), axis=1)[:, -8:-7]
    np.testing.assert_allclose(importance(captures, "mlp_out", layer), np.where(kept, np.abs(rows), 0).mean(0))


def test_missing_rows_do_not_count(stores: list[Path]) -> None:
    capture = open_capture(stores[0], 0)
    capture.missing = [[0, 10], [290, 300]]
    for hook in ("q", "mlp_post"):
        left = capture.tally(hook, 0, np.arange(10, 290)).mean()
        np.testing.assert_array_equal(importance([capture], hook, 0), left)
    capture.missing = [[0, 300]]
    with pytest.raises(ValueError, match="no capture has a row of 'q'"):
        importance([capture], "q", 0)


def test_what_has_no_neurons_is_refused(stores: list[Path]) -> None:
    capture = open_capture(stores[0], 0)
    with pytest.raises(ValueError, match="'ln2' was stored as rp, which keeps no neurons"):
        importance(capture, "ln2", 0)
    with pytest.raises(ValueError, match="name one layer"):
        importance(capture, "q")
    with pytest.raises(ValueError, match="'topk_ids' holds whole numbers"):
        importance(capture, "topk_ids", 0)
    with pytest.raises(KeyError):
        importance(capture, "resid_pre", 0)
    with pytest.raises(KeyError):
        importance(capture, "q", 7)
