# SPDX-License-Identifier: Apache-2.0
"""The rows on which files are fitted, and results on made-up rows: codebooks, normalisation, neurons, means of sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dmi_connector.analysis import directions, fit_rows, neurons
from dmi_connector.analysis.fit_pq import _first, _k_means, _nearest, _sample, k_means
from dmi_connector.analysis.fit_rows import finite_rows, layers_of
from dmi_connector.analysis.neurons import Activation, top_tokens
from dmi_connector.analysis.training import normalization
from dmi_connector.analysis.training.normalization import Normalization, load_normalizations, of_views
from dmi_connector.reduce import Keeps

RNG = np.random.default_rng(4)
INF = float("inf")


# ---- codebooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 20])
@pytest.mark.parametrize("most", [5, 19, 20, 99])
def test_a_sample_has_the_rows_with_the_smallest_random_numbers(most: int, size: int) -> None:
    """Each row gets a random number from seed 0. The sample keeps the order of rows, in whatever blocks they arrive."""
    rows = RNG.standard_normal((20, 3)).astype("f2")
    found = _sample((rows[first : first + size] for first in range(0, 20, size)), most)
    draw = np.random.default_rng(0)
    numbers = np.concatenate([draw.random(len(rows[first : first + size])) for first in range(0, 20, size)])
    kept = np.sort(np.argsort(numbers)[:most])
    assert found.dtype == np.float32 and found.tolist() == rows[kept].astype("f4").tolist()


def test_a_sample_of_nothing_is_empty() -> None:
    found = _sample(iter([]), 5)
    assert found.shape == (0, 0) and found.dtype == np.float32


def test_each_value_goes_to_its_nearest_centroid() -> None:
    x, centroids = torch.randn(2, 30, 3), torch.randn(2, 4, 3)
    numbers, squares = _nearest(torch.nn.functional.pad(x, (0, 1), value=1), x.square().sum(2), centroids)
    distances = (x[:, :, None] - centroids[:, None]).square().sum(3)
    assert numbers.tolist() == distances.argmin(2).tolist()
    torch.testing.assert_close(squares, distances.amin(2), atol=1e-5, rtol=1e-5)


def test_k_means_begins_with_rows_that_are_far_apart() -> None:
    """Each group of points is one point repeated, so a row of a chosen group cannot be drawn again."""
    points = torch.tensor([[0.0, 0], [9, 0], [0, 7]])
    x = points[torch.tensor([0, 0, 0, 0, 0, 0, 1, 2, 0, 0])][None]
    assert sorted(_first(x, 3)[0].tolist()) == sorted(points.tolist())
    again = _first(torch.cat([x, x + 1]), 3)
    assert again.shape == (2, 3, 2) and sorted(again[1].tolist()) == sorted((points + 1).tolist())


def test_a_centroid_without_a_row_takes_the_farthest_one() -> None:
    x = torch.tensor([[[0.0], [1], [2], [50], [90]]])
    centroids, error = _k_means(x, torch.tensor([[[1.0], [1000], [2000]]]))
    assert sorted(centroids.ravel().tolist()) == [1.0, 50.0, 90.0] and error == pytest.approx(2)
    centroids, error = _k_means(x, torch.tensor([[[0.0], [60]]]))
    assert centroids.ravel().tolist() == [1.0, 70.0] and error == pytest.approx(2 + 800)


def test_each_sub_vector_has_its_own_centroids() -> None:
    rows = np.zeros((40, 2, 2), "f4")
    rows[::2, 0], rows[::4, 1] = 3, (5, -1)
    centroids, error = k_means(rows, 2)
    assert error == pytest.approx(0) and type(error) is float and centroids.shape == (2, 2, 2)
    assert [sorted(one.tolist()) for one in centroids] == [[[0, 0], [3, 3]], [[0, 0], [5, -1]]]
    assert k_means(rows, 1)[1] == pytest.approx(20 * 2 * 2.25 * 2 + 30 * (1.25**2 + 0.25**2) + 10 * (3.75**2 + 0.75**2))


# ---- rows -----------------------------------------------------------------------------------------------------------


class Held:
    """A fake store of layers 2 and 4 of q, with runs of rows."""

    def __init__(self, *runs: list[list[float]]) -> None:
        self.rows = np.array([row for run in runs for row in run], "f4").reshape(-1, 2)
        self.ends = np.cumsum([0, *map(len, runs)]).tolist()
        self.layers = {"q": [2, 4], "embed": []}

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def runs(self, most: int) -> list[slice]:
        assert most == 4096
        return [slice(a, b) for a, b in zip(self.ends, self.ends[1:], strict=False)]

    def numpy(self, hook: str, layer: int | None, rows: slice) -> np.ndarray:
        assert (hook, layer) == ("q", 2)
        return self.rows[rows]

    def sources(self, hook: str, layer: int) -> list[Any]:
        return [SimpleNamespace(layer=self.layers[hook][{-1: 1, -2: 0, 2: 0, 4: 1}[layer]])]


def test_rows_that_are_not_finite_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fit_rows, "_opened", lambda store: store)
    stores: Any = [Held([[1, 2], [INF, 3]], [[INF, 0]]), Held([[5, 6]], [[7, float("nan")], [8, 9]])]
    found = [block.tolist() for block in finite_rows(stores, "q", 2, "fit-x")]
    assert found == [[[1, 2]], [[5, 6]], [[8, 9]]]
    assert [record.getMessage() for record in caplog.records] == [
        "fit-x: 3 of 6 rows of q layer 2 hold a value that is not finite; they are left out"
    ]
    caplog.clear()
    assert len(list(finite_rows(stores[1:], "q", 2, "fit-x"))) == 2 and "fit-x: 1 of 3 rows" in caplog.text
    lost: Any = [Held([[INF, 0], [0, INF]])]
    with pytest.raises(ValueError, match=r"^fit-x: each of the 2 rows of q layer 2 holds a value that is not finite;"):
        list(finite_rows(lost, "q", 2, "fit-x"))
    assert list(finite_rows([], "q", 2, "fit-x")) == []


def test_layers_to_fit_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_rows, "_opened", lambda store: store)
    store: Any = Held()
    assert layers_of(store, "q", None) == [2, 4] and layers_of(store, "embed", [3]) == [None]
    assert layers_of(store, "q", [-1, 2, 4, -2]) == [4, 2]


# ---- normalisation --------------------------------------------------------------------------------------------------


class View:
    """Fake rows of one hook that record which rows are read."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.shape, self.width, self.hook, self.layers = rows, rows.shape, rows.shape[-1], "q", [0]
        self.read_rows: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, chosen: np.ndarray) -> np.ndarray:
        self.read_rows.append(chosen.tolist())
        return self.rows[chosen]


def test_whitening_does_not_amplify_directions_without_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimum standard deviation is a thousandth of the largest one."""
    monkeypatch.setattr(normalization, "_BLOCK", 7)
    spread = np.array([50.0, 2.0, 1e-6])
    rows = (RNG.standard_normal((40, 3)) * spread + 5).astype("f4")
    rows[3, 1] = INF
    view: Any = View(rows)
    found = Normalization.fit(view, "whiten")
    assert view.read_rows == [list(range(at, min(at + 7, 40))) for at in range(0, 40, 7)]
    kept = np.delete(rows, 3, axis=0).astype("f8")
    centred = kept - kept.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred / (len(kept) - 1))
    std = np.sqrt(np.maximum(values, 0))
    wanted = (vectors / np.maximum(std, 1e-3 * std.max())) @ vectors.T
    assert found.matrix is not None and found.kind == "whiten" and found.scale == 1.0
    np.testing.assert_allclose(found.matrix, wanted, rtol=2e-2, atol=1e-3)
    np.testing.assert_allclose(found.mean, kept.mean(0), rtol=1e-5)
    given = torch.from_numpy(rows[:2])
    np.testing.assert_allclose(found.apply(given).numpy(), (rows[:2] - found.mean) @ found.matrix, rtol=1e-3, atol=1e-3)


def test_a_mean_norm_needs_a_row_that_is_not_zero() -> None:
    for rows in (np.zeros((4, 3), "f4"), np.full((4, 3), INF, "f4"), np.zeros((0, 3), "f4")):
        view: Any = View(rows)
        with pytest.raises(ValueError, match=r"^normalize: 'q' has no finite row whose norm is not 0; give other rows"):
            Normalization.fit(view)
    view = View(np.array([[3, 4], [0, 0], [INF, 1]], "f4"))
    assert Normalization.fit(view).scale == pytest.approx(np.sqrt(2) / 2.5)


def test_the_option_becomes_a_normalisation_of_each_hook(tmp_path: Path) -> None:
    views: Any = {"q": View(np.array([[3, 4]], "f4")), "k": View(np.array([[6, 8]], "f4"))}
    assert of_views(views, None, 0) == {}
    fitted = of_views(views, "mean_norm", 0)
    assert {name: one.scale for name, one in fitted.items()} == {
        "q": pytest.approx(np.sqrt(2) / 5),
        "k": pytest.approx(np.sqrt(2) / 10),
    }
    one = fitted["q"]
    assert of_views(views, one, 0) == {"q": one, "k": one} and of_views(views, {**fitted, "v": one}, 0) == fitted
    with pytest.raises(ValueError, match=r"^normalize: 'k' is not fitted, only q; fit on 'k' too$"):
        of_views(views, {"q": one}, 0)
    wide = Normalization("mean_norm", np.zeros(3, "f4"))
    with pytest.raises(ValueError, match=r"^normalize: 'k' has 2 values per row, not 3$"):
        of_views(views, {"q": one, "k": wide}, 0)
    file = tmp_path / "n.safetensors"
    white = Normalization("whiten", np.ones(2, "f4"), 1.0, np.eye(2, dtype="f4") * 2)
    normalization.save_normalizations(file, {"q": white, "k": one})
    again = load_normalizations(file)
    assert list(again) == ["q", "k"] and [n.digest for n in again.values()] == [white.digest, one.digest]
    assert [n.kind for n in of_views(views, file, 0).values()] == ["whiten", "mean_norm"]
    assert len({white.digest, one.digest, wide.digest}) == 3
    for metadata in (None, {"other": "1"}):
        save_file({"x": np.zeros(1)}, tmp_path / "x.safetensors", metadata)
        with pytest.raises(
            ValueError, match=r"^normalize: .*x.safetensors holds no normalisation; give a file of save_n"
        ):
            load_normalizations(tmp_path / "x.safetensors")
    (tmp_path / "text").write_text("no file of tensors")
    with pytest.raises(ValueError, match=r"^normalize: .*text is not a safetensors file .*; give a file of save_n"):
        of_views(views, tmp_path / "text", 0)
    with pytest.raises(OSError, match=r"^normalize: .*gone/x cannot be written .*; give another path"):
        normalization.save_normalizations(tmp_path / "gone/x", {"k": one})
    for given in ("mean", tmp_path / "gone"):
        with pytest.raises(ValueError, match=rf"^normalize '{given}' is not valid; use one of mean_norm, whiten, or a"):
            of_views(views, given, 0)


# ---- neurons --------------------------------------------------------------------------------------------------------


class Tokens:
    """A fake capture with some values of neuron 1. Row 2 is missing."""

    def __init__(self, name: str, values: list[float], lost: tuple[int, ...] = ()) -> None:
        self.path, self.values, self.lost = Path(name), np.array(values, "f4"), lost
        self.token_ids = np.arange(10, 10 + len(values))

    def runs(self, most: int) -> list[slice]:
        there = [i for i in range(len(self.values)) if i not in self.lost]
        return [slice(i, i + 1) for i in there[:1]] + [
            slice(part[0], part[-1] + 1)
            for part in np.split(there[1:], np.flatnonzero(np.diff(there[1:]) > 1) + 1)
            if len(part)
        ]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two fake captures, without checks of their hooks."""

    def rows(capture: Tokens, hook: str, layer: int | None, rows: slice) -> np.ndarray:
        assert (hook, layer) == ("mlp_post", 3)
        return np.stack([np.zeros_like(capture.values), capture.values], 1)[rows]

    monkeypatch.setattr(neurons, "of_one_model", lambda captures: captures)
    monkeypatch.setattr(neurons, "check_neuron", lambda *_: None)
    monkeypatch.setattr(neurons, "hook_rows", rows)
    there = lambda capture: ~np.isin(np.arange(len(capture.values)), capture.lost)  # noqa: E731
    monkeypatch.setattr(neurons, "present_rows", there)
    nan = float("nan")
    return [Tokens("a.zarr", [4, 1, 9, 7, nan, 7], lost=(2,)), Tokens("b.zarr", [7, -8, 8])]


def test_the_largest_values_come_first_and_equal_ones_in_order(held: list[Any]) -> None:
    def found(count: int, **more: Any) -> list[tuple[str, int, float]]:
        tokens = top_tokens(held, "mlp_post", 1, 3, count, **more)
        return [(one.store.name, one.row, one.value) for one in tokens]

    order = [("b.zarr", 2, 8.0), ("a.zarr", 3, 7.0), ("a.zarr", 5, 7.0), ("b.zarr", 0, 7.0), ("a.zarr", 0, 4.0)]
    for count in (1, 2, 3, 4, 5):
        assert found(count) == order[:count], count
    assert found(3, lowest=True) == [("b.zarr", 1, -8.0), ("a.zarr", 1, 1.0), ("a.zarr", 0, 4.0)]
    assert len(found(20)) == 8 and len(top_tokens(held, "mlp_post", 1, 3)) == 8
    with pytest.raises(ValueError, match=r"^count 0 is not valid; use 1 or more$"):
        found(0)


def test_a_token_has_its_context_and_the_values_of_the_context(held: list[Any]) -> None:
    one = top_tokens(held, "mlp_post", 1, 3, 2, context=1)[1]
    assert one.values[1:2] == (7.0,) and np.isnan([one.values[0], one.values[2]]).all()
    (first,) = top_tokens(held[1:], "mlp_post", 1, 3, 1, context=5)
    assert first == Activation(8.0, Path("b.zarr"), 2, 12, (10, 11, 12), 2, (7.0, -8.0, 8.0))
    (left,) = top_tokens(held[1:], "mlp_post", 1, 3, 1, context=1)
    assert (left.context, left.before, left.values) == ((11, 12), 1, (-8.0, 8.0))
    many: Any = [Tokens("c.zarr", [*range(9, 0, -1), 30, *range(20)])]
    (middle,) = top_tokens(many, "mlp_post", 1, 3, 1)
    assert middle.before == 8 and middle.context == tuple(range(11, 28)), (
        "the context must have eight tokens on either side"
    )


# ---- means of sets --------------------------------------------------------------------------------------------------


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A capture of eight rows at positions 3 to 10. Row 1 is missing. The prompt ends at position 6."""
    rows = np.arange(16, dtype="f4").reshape(8, 2)
    capture: Any = SimpleNamespace(positions=np.arange(3, 11), prompt_len=7, phase=(np.arange(3, 11) >= 7).astype("u1"))
    checked: list[Any] = []
    monkeypatch.setattr(directions, "BLOCK", 3)
    monkeypatch.setattr(directions, "of_one_model", lambda captures: captures)
    monkeypatch.setattr(directions, "check_one_layer", lambda *given: checked.append(given[1:]))
    monkeypatch.setattr(directions, "check_own_values", lambda *given: checked.append(given[1:]))
    monkeypatch.setattr(directions, "other_values", lambda *_given: None)
    monkeypatch.setattr(directions, "hook_rows", lambda capture, hook, layer, wanted: rows[wanted] + 100 * layer)
    monkeypatch.setattr(directions, "present_rows", lambda capture: np.arange(8) != 1)
    capture.checked = checked
    return capture


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("all", [[0, 2, 3], [4, 5, 6], [7]]),
        ("prompt", [[0, 2, 3]]),
        ("generated", [[4, 5, 6], [7]]),
        ("last", [[3]]),
    ],
)
def test_rows_that_count_come_in_blocks(rows: str, wanted: list[list[int]], phases: Any) -> None:
    found = list(directions.row_blocks([phases], "q", 2, rows))
    assert [block.tolist() for block in found] == [[[200.0 + 2 * i, 201.0 + 2 * i] for i in part] for part in wanted]
    assert phases.checked == [("q", 2), ("q", 2, Keeps.DIRECTIONS)]
    every = np.concatenate(found).astype("f8")
    assert directions._mean([phases, phases], "q", 2, rows).tolist() == every.mean(0).tolist()


def test_the_difference_of_two_means_scores_rows_between_them() -> None:
    found = directions.MeanDifference(np.array([4.0, 1]), np.array([0.0, 1]), (np.zeros(0), np.zeros(0)))
    assert found.vector.dtype == np.float32 and found.vector.tolist() == [4, 0]
    scores = found.score(np.array([[4, 9], [0, 5], [2, 1], [-4, 0]]))
    assert scores.dtype == np.float32 and scores.tolist() == [1, 0, 0.5, -1]
    same = directions.MeanDifference(np.ones(2), np.ones(2), (np.zeros(2), np.zeros(2)))
    assert np.isnan(same.score(np.ones((1, 2)))).all() and np.isnan(same.separation)
    apart = directions.MeanDifference(np.ones(2), np.zeros(2), (np.array([0.5, 1.5]), np.array([0.0, 0.5, 0.25])))
    assert apart.separation == pytest.approx(1 / np.sqrt((0.5 + 0.125) / 3))
    few = directions.MeanDifference(np.ones(2), np.zeros(2), (np.array([1.0]), np.array([0.0])))
    assert np.isnan(few.separation)


def test_the_error_of_k_means_is_added_in_float64() -> None:
    x = torch.from_numpy(RNG.standard_normal((2, 5000, 3)).astype("f4"))
    centroids, error = _k_means(x, x[:, :4])
    own = torch.stack(
        [(c[None] - part[:, None]).square().sum(2).argmin(1) for c, part in zip(centroids, x, strict=True)]
    )
    squares = (x - centroids.gather(1, own[..., None].expand_as(x))).square()
    assert error == pytest.approx(float(squares.double().sum()), rel=1e-12)
