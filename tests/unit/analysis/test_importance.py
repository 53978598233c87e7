# SPDX-License-Identifier: Apache-2.0
"""`importance`: mean |x| of neurons over stores of full rows, of 8-bit rows, and of top k with a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dmi_connector import importance, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.reduce.tally import Tally
from dmi_connector.reduce.topk import TopK
from tests import storekit as kit

WIDTH, TOKENS, STORES = 64, 300, 3
SPECS = {"mlp_post": "topk(8)", "mlp_out": "topk(8,exact,sample=0)", "z": "int8", "ln2": "rp(16)"}
IDS = ArraySpec("topk_ids", "int32", (0,), 2)
SCALES = np.linspace(0.5, 1.5, WIDTH) ** 2


def values(seed: int, layer: int) -> np.ndarray:
    """Float32 [TOKENS, WIDTH]: neurons of increasing strength, in layer 1 of decreasing strength."""
    drawn = np.random.default_rng([seed, layer]).normal(size=(TOKENS, WIDTH)) * SCALES[:: 1 - 2 * layer]
    return drawn.astype(np.float32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, owner = tmp_path_factory.mktemp("neurons"), kit.Store(4 << 20)
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
        values_of_all = {"q": np.stack(rows).view("u4"), "topk_ids": kit.random_bits(IDS, TOKENS), **stored}
        owner.write(folder / f"{i}.zarr", arrays, TOKENS, values=values_of_all)
    assert owner.shutdown(kit.PATIENCE)
    return [folder / f"{i}.zarr" for i in range(STORES)]


@pytest.mark.parametrize("layer", [0, 1])
def test_importance_is_the_mean_magnitude_of_each_neuron(stores: list[Path], layer: int) -> None:
    captures = [open_capture(store, 0) for store in stores]
    rows = np.concatenate([values(i, layer) for i in range(STORES)]).astype(np.float64)
    true = np.abs(rows).mean(0)
    np.testing.assert_allclose(importance(captures, "q", layer), true, rtol=1e-6)
    np.testing.assert_allclose(importance(captures, "z", layer - 2), true, rtol=0.02)
    np.testing.assert_allclose(importance(captures[0], "q", layer), np.abs(rows[:TOKENS]).mean(0), rtol=1e-6)
    # A neuron that is not kept is sampled in 2 of 64 rows, about 25 times. Three standard errors are half of its mean.
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


def test_a_massive_value_does_not_hide_the_means_of_other_neurons() -> None:
    """In 8 bits, a value a thousand times as large rounds the other kept values to 0."""
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(2000, 256)) * np.linspace(0.5, 1.5, 256)).astype(np.float32)
    rows[:, 77] = 1000
    true, others = np.abs(rows).mean(0), np.arange(256) != 77
    for spec, least in (("topk(32)", 0.9), ("topk(32,exact)", 0.9)):
        reduction = TopK(32, exact="exact" in spec, sample=8)
        stored = reduction.encode(torch.from_numpy(rows)).numpy()
        found = reduction.tally(stored, 256, "float32").mean()
        assert np.corrcoef(found[others], true[others])[0, 1] > least
        assert np.abs(found / true - 1).max() < 0.6


def test_means_from_few_samples_are_not_biased() -> None:
    """Half of the values are 0, and the variance of few samples grows with their mean."""
    rng = np.random.default_rng(2)
    rows = np.maximum(rng.normal(size=(300, 512)) * np.linspace(0.2, 1.2, 512), 0).astype(np.float32)
    reduction = TopK(32, exact=True, sample=8)
    stored = reduction.encode(torch.from_numpy(rows)).numpy()
    found = reduction.tally(stored, 512, "float32").mean()
    assert abs(found.sum() / rows.mean(0).sum() - 1) < 0.08 and found.min() > 0


def test_the_mean_of_rows_without_a_value_is_drawn_towards_that_of_all_neurons() -> None:
    """The expected values are computed neuron by neuron, from samples of 0, 1, 2 and 5 of 10 rows."""
    counts = [0, 1, 2, 5]
    samples = [[], [4.0], [1.0, 3.0], [6.0, 7.0, 9.0, 6.0, 7.0]]
    kept, kept_rows = [20.0, 3.0, 0.0, 8.0], [2, 1, 0, 1]
    squares = [sum(x * x for x in each) for each in samples]
    sums = (kept, kept_rows, [sum(each) for each in samples], counts, squares)
    tally = Tally(10, *(np.asarray(each, np.float64) for each in sums))
    everywhere = sum(map(sum, samples)) / sum(counts)
    own = [sum(each) / len(each) if each else everywhere for each in samples]
    within = sum((x - m) ** 2 for each, m in zip(samples, own, strict=True) for x in each) / sum(
        c - 1 for c in counts if c
    )
    noise = [within / c if c else np.inf for c in counts]
    signal = max(0.0, np.var([own[2], own[3]]) - np.mean([noise[2], noise[3]]))
    assert signal > 0
    rest = [everywhere + signal / (signal + n) * (m - everywhere) for m, n in zip(own, noise, strict=True)]
    expected = [(k + (10 - n) * r) / 10 for k, n, r in zip(kept, kept_rows, rest, strict=True)]
    np.testing.assert_allclose(tally.mean(), expected, rtol=1e-12)
    equal = Tally(10, *(np.asarray(v, np.float64) for v in ([0, 0], [0, 0], [4, 8], [2, 2], [8, 32])))
    np.testing.assert_allclose(equal.mean(), [2, 4], rtol=1e-12, err_msg="samples without noise are trusted")
    single = Tally(2, *(np.asarray(v, np.float64) for v in ([9, 0, 0], [1, 0, 0], [0, 2, 4], [0, 1, 1], [0, 4, 16])))
    np.testing.assert_allclose(single.mean(), [6, 3, 3], rtol=1e-12, err_msg="one sample each: their mean is used")


def test_tallies_add_up_in_float64() -> None:
    rows = np.abs(np.random.default_rng(0).normal(size=(7, 20))).astype(np.float32)
    parts = [TopK(4, sample=2).encode(torch.from_numpy(part)).numpy() for part in (rows[:3], rows[3:])]
    tallies = [TopK(4, sample=2).tally(part, 20, "float32") for part in parts]
    both = tallies[0] + tallies[1]
    assert both.rows == 7 and both.kept_rows.sum() == 28 and both.sampled_rows.sum() <= 14
    for name, value in vars(both).items():
        if name != "rows":
            assert value.dtype == np.float64
            np.testing.assert_array_equal(value, getattr(tallies[0], name) + getattr(tallies[1], name))
    whole = Tally.of(rows)
    assert whole.rows == 7 and whole.kept.dtype == np.float64 and not whole.sampled_rows.any()
    np.testing.assert_allclose(whole.mean(), rows.mean(0, np.float64), rtol=1e-12)


def test_importance_joins_the_slices_of_two_ranks(tmp_path: Path) -> None:
    """It also reads the output of the last layer, which has another name and another reduction."""
    rows = [values(0, layer) for layer in (0, 1)]
    halves = TopK(4, sample=2)
    stored = [np.concatenate([halves.encode(torch.from_numpy(h)).numpy() for h in np.split(r, 2, 1)], 1) for r in rows]
    final = TopK(8, exact=True).encode(torch.from_numpy(rows[1])).numpy()
    of_values = {"dtype": "float32", "width": WIDTH}
    arrays = [
        ArraySpec("mlp_post", "uint8", (0, 1), stored[0].shape[1], 2, reduce={**halves.settings(), **of_values}),
        ArraySpec("resid_pre", "float32", (0, 1), WIDTH),
        ArraySpec("resid_final", "uint8", (0,), final.shape[1], reduce={**TopK(8, True).settings(), **of_values}),
    ]
    held = {"mlp_post": np.stack(stored), "resid_pre": np.stack(rows).view("u4"), "resid_final": final[None]}
    ranks = [kit.Store(4 << 20) for _ in range(2)]
    for rank, own in enumerate(ranks):
        specs = kit.shard_specs(arrays, 2, rank)
        own.write(tmp_path / "tp.zarr", specs, TOKENS, values=held, wait=rank == 1, rank=rank, ranks=2)
    assert [own.shutdown(kit.PATIENCE) for own in ranks] == [True, True]
    capture = open_capture(tmp_path / "tp.zarr", 0)
    found = importance(capture, "mlp_post", 1)
    assert np.corrcoef(found, np.abs(rows[1]).mean(0))[0, 1] > 0.8
    np.testing.assert_allclose(importance(capture, "resid_post", 0), np.abs(rows[1]).mean(0), rtol=1e-6)
    kept = np.abs(rows[1]) >= np.sort(np.abs(rows[1]), axis=1)[:, -8:-7]
    true = np.where(kept, np.abs(rows[1]), 0).mean(0)
    np.testing.assert_allclose(importance(capture, "resid_post", 1), true, rtol=1e-5)


def test_captures_of_different_widths_and_no_captures_are_refused(stores: list[Path], tmp_path: Path) -> None:
    owner = kit.Store(4 << 20)
    owner.write(tmp_path / "other.zarr", [ArraySpec("q", "float32", (0, 1), 32)], 100)
    assert owner.shutdown(kit.PATIENCE)
    captures = [open_capture(path, 0) for path in (stores[0], tmp_path / "other.zarr")]
    with pytest.raises(ValueError, match="has 32 values of q per row, others 64"):
        importance(captures, "q", 0)
    with pytest.raises(ValueError, match="no capture has a row of 'q'"):
        importance([], "q", 0)


def test_importance_refuses_hooks_without_neurons_and_absent_layers(stores: list[Path]) -> None:
    capture = open_capture(stores[0], 0)
    with pytest.raises(ValueError, match="'ln2' was stored as rp, from which this cannot be computed"):
        importance(capture, "ln2", 0)
    with pytest.raises(ValueError, match="name one layer"):
        importance(capture, "q")
    with pytest.raises(ValueError, match="'topk_ids' holds integers"):
        importance(capture, "topk_ids", 0)
    with pytest.raises(KeyError, match=r"0\.zarr: hook 'mlp_pst' is not in this store: did you mean 'mlp_post'\?"):
        importance(capture, "mlp_pst")
    with pytest.raises(KeyError):
        importance(capture, "resid_pre", 0)
    with pytest.raises(KeyError):
        importance(capture, "q", 7)
