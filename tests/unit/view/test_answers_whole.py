# SPDX-License-Identifier: Apache-2.0
"""Full return values of the functions behind the panels of `dmi view`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.analysis.texts import Texts
from dmi_connector.analysis.unembedding import Unembedding, log_softmax
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.view import attention, experts, lens, predictions
from dmi_connector.view.data import Library, NoSuchStore, describe
from dmi_connector.view.texts_index import TextIndex
from tests import storekit as kit
from tests import viewkit

LENGTH, START, HOLE, LAYERS, VOCABULARY = 40, 5, (4, 7), (1, 2), 16
IDS = (np.arange(LENGTH) % VOCABULARY).astype("<i4")
RNG = np.random.default_rng(8)
EXPERTS = np.argsort(RNG.random((2, LENGTH, 6)), axis=-1)[..., :2].astype("<i4")
EXPERTS[1, 39, 0] = 6  # the largest number is in the last row and layer
WEIGHTS = np.sort(RNG.random((2, LENGTH, 2)).astype("f4"))[..., ::-1]
LOGITS = RNG.standard_normal((12, VOCABULARY)).astype("f4")
"""Logits of positions 20 to 31, which are rows 15 to 26. They predict the tokens of rows 16 to 27."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of 40 tokens: "said" has the number of experts as an attribute, "routed" has router logits, "plain" has
    neither, and its rows 4 to 6 are missing.
    """
    root, owner = tmp_path_factory.mktemp("whole"), kit.Store(1 << 22)
    ids, weights = ArraySpec("topk_ids", "int32", LAYERS, 2), ArraySpec("topk_weights", "float32", LAYERS, 2)
    router, logits = ArraySpec("router_logits", "float32", LAYERS, 9), ArraySpec("logits", "float32", (), VOCABULARY)
    values = {"topk_ids": kit.bits(EXPERTS), "topk_weights": kit.bits(np.ascontiguousarray(WEIGHTS))}
    about = {"num_layers": 4, "start": START}
    said = {**about, "start": 0, "experts": {"count": 11, "layers": [1, 2]}}
    owner.write(root / "said.zarr", [ids], LENGTH, values=values, attrs=said, wait=False)
    routed = {**values, "router_logits": kit.random_bits(router, LENGTH)}
    owner.write(root / "routed.zarr", [ids, router], LENGTH, values=routed, attrs=about, wait=False)
    plain = {**values, "logits": kit.bits(LOGITS)}
    lost = [Loss.of(Cause.FELL_BEHIND, [HOLE])]
    specs = [ids, weights, logits]
    owner.write(root / "plain.zarr", specs, LENGTH, 12, values=plain, attrs=about, losses=lost, ids=IDS, wait=False)
    assert owner.shutdown(kit.PATIENCE)
    return root


@pytest.fixture(scope="module")
def plain(root: Path) -> Iterator[Capture]:
    with open_capture(root / "plain.zarr", allow_incomplete=True) as capture:
        yield capture


@pytest.mark.parametrize(("name", "count"), [("said", 11), ("routed", 9), ("plain", 7)])
def test_the_number_of_experts_is_noted_or_that_of_the_router_or_of_the_largest_number(
    name: str, count: int, root: Path
) -> None:
    with open_capture(root / f"{name}.zarr", allow_incomplete=True) as capture:
        found = experts.shown(capture)
    assert found == {"layers": [1, 2], "count": count, "each": 2, "weights": name == "plain"}


@pytest.mark.parametrize("rows", [slice(0, 40), slice(0, 5), slice(5, 9), slice(6, 7), slice(7, 9), slice(2, 4)])
@pytest.mark.parametrize("weights", [False, True])
def test_experts_of_a_window_lack_the_missing_rows(rows: slice, weights: bool, plain: Capture) -> None:
    wanted = (WEIGHTS if weights else EXPERTS).astype("f4")
    wanted[:, slice(*HOLE)] = np.nan
    found = experts.window(plain, rows, weights)
    assert found.dtype == np.float32 and np.array_equal(found, wanted[:, rows], equal_nan=True)


def test_the_load_of_a_layer_counts_the_experts_that_are_shown(plain: Capture) -> None:
    there = np.delete(EXPERTS[1], np.arange(*HOLE), axis=0).ravel()
    wanted = np.bincount(there, minlength=9)
    for count in (9, 7, 5):
        found = experts.load(plain, 2, count)
        assert found.dtype == np.int64 and found.tolist() == wanted[:count].tolist()


def test_alternatives_are_the_likeliest_tokens_of_the_row_before(plain: Capture) -> None:
    """There are none for the first row, or if the previous row has no logits."""
    row = 15 + 6
    own = log_softmax(LOGITS[5:6])[0]
    came = float(np.exp(own[IDS[row]]))
    order = np.argsort(-own)
    rank = int(np.flatnonzero(order == IDS[row])[0]) + 1
    for count in (1, 3, VOCABULARY, VOCABULARY + 1):
        found = predictions.alternatives(plain, None, row, count)
        shares = found.pop("p")
        assert found == {"ids": order[:count].tolist(), "rank": rank, "came": pytest.approx(came)}
        assert shares == pytest.approx(np.exp(own[order[:count]]))
    best = 16 + int(np.flatnonzero(LOGITS.argmax(1) != IDS[16:28])[0])
    assert (predictions.alternatives(plain, None, best, 2)["rank"] or 0) > 1
    for row in (0, 6, 15, 28):
        assert predictions.alternatives(plain, None, row, 3) == {"ids": [], "p": [], "rank": None, "came": None}, row
    found_all = predictions.predicted(plain, None, "final", slice(13, 31))
    wanted = np.full(18, np.nan, "f4")
    wanted[3:15] = log_softmax(LOGITS)[np.arange(12), IDS[16:28]]
    np.testing.assert_allclose(found_all.logprobs, wanted, rtol=1e-5)
    assert found_all.best.tolist() == [-1, -1, -1, *LOGITS.argmax(1).tolist(), -1, -1, -1]
    assert (found_all.logprobs.dtype, found_all.entropy.dtype, found_all.best.dtype) == ("f4", "f4", "i8")
    with pytest.raises(ValueError, match=r"^the lens needs the option --model of dmi view$"):
        predictions.predicted(plain, None, "1", slice(0, 4))


def test_a_capture_lacks_what_its_lens_or_predictions_need(plain: Capture, root: Path) -> None:
    needs = "Predictions need the hook logits, or resid_final and the option --model of dmi view."
    stream = "The store has no residual stream. Capture the hooks resid_pre and resid_final (preset hidden-states)."
    with open_capture(root / "said.zarr") as said:
        assert predictions.lacking(said, root) == needs and predictions.described(said, root) == []
        assert lens.lacking(said, root) == stream and predictions.places(said, root) == []
        assert predictions.attribution_lacks(said, root) == (
            "Capture the hooks resid_pre@0, attn_out and mlp_out of all layers, and resid_final."
        )
    assert predictions.lacking(plain, None) is None
    (entry,) = predictions.described(plain, None)
    assert entry["rows"] == [[16, 28]]


def test_attribution_needs_only_the_blocks_that_a_layer_has(tmp_path: Path) -> None:
    """In Nemotron-H, for example, each layer has only one block."""
    owner = kit.Store(1 << 20)
    layers = {"resid_pre": (0,), "attn_out": (0, 2), "mlp_out": (1,), "resid_final": ()}
    specs = [ArraySpec(hook, "float32", numbers, 8) for hook, numbers in layers.items()]
    for name, mlp in (("one", [1]), ("other", [1, 2])):
        owner.write(tmp_path / f"{name}.zarr", specs, 4, attrs={"num_layers": 3, "mlp_layers": mlp})
    assert owner.shutdown(kit.PATIENCE)
    with open_capture(tmp_path / "one.zarr") as one, open_capture(tmp_path / "other.zarr") as other:
        assert predictions.attribution_lacks(one, tmp_path) is None
        assert (predictions.attribution_lacks(other, tmp_path) or "").startswith("Capture the hooks")


def test_pooled_attention_has_at_most_so_many_cells() -> None:
    weights = np.arange(35, dtype="f4").reshape(5, 7)
    for most, rows, columns in ((7, range(5), range(7)), (8, range(5), range(7)), (4, (1, 3, 4), (1, 3, 5, 6))):
        found = attention.pooled(weights, most)
        assert np.array_equal(found, weights[np.ix_(rows, columns)]), most
    assert attention.pooled(weights, 1).tolist() == [[34]]
    assert attention.pooled(weights, 6).shape == (3, 4)


def test_attention_of_a_window_and_the_largest_weights(tmp_path: Path) -> None:
    rng, owner, size = np.random.default_rng(4), kit.Store(1 << 20), 4
    q, k = rng.standard_normal((1, 30, 2 * size)).astype("f4"), rng.standard_normal((1, 30, size)).astype("f4")
    specs = [ArraySpec("q_rot", "float32", (0,), 2 * size), ArraySpec("k_rot", "float32", (0,), size)]
    dims = {"heads": 2, "kv_heads": 1, "head_dim": size}
    about = {"num_layers": 2, "rotary": True, "dims": dims}
    values = {"q_rot": kit.bits(q), "k_rot": kit.bits(k)}
    lost = [Loss.of(Cause.FELL_BEHIND, [(25, 28)])]
    owner.write(tmp_path / "a.zarr", specs, 30, values=values, attrs=about, losses=lost, wait=False)
    late = {**about, "start": 2}
    owner.write(tmp_path / "late.zarr", specs, 30, values=values, attrs=late, wait=False)
    assert owner.shutdown(kit.PATIENCE)
    scores = np.einsum("qd,kd->qk", q[0, :, size:].astype("f8"), k[0].astype("f8")) / np.sqrt(size)
    scores[np.triu_indices(30, 1)] = -np.inf
    whole = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    with open_capture(tmp_path / "a.zarr", allow_incomplete=True) as capture:
        assert attention.shown(capture) == {"layers": [0], "until": 25}
        rows = slice(6, 14)
        found = attention.window(capture, 0, 1, rows)
        both = list(attention.windows(capture, 0, rows))
        top = attention.largest(capture, 0, 1, 20)
        few = attention.largest(capture, 0, 1, 4, 2)
    assert found.dtype == np.float32 and found.shape == (8, 9)
    wanted = np.concatenate([whole[rows, :6].sum(1, keepdims=True), whole[rows, rows]], axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert len(both) == 2 and np.array_equal(both[1], found) and not np.array_equal(both[0], found)
    order = np.argsort(-whole[20], kind="stable")
    assert [one["row"] for one in top] == order[:10].tolist(), "at most ten keys must be returned"
    assert [one["weight"] for one in top] == pytest.approx(whole[20][order[:10]], rel=1e-4)
    assert [one["row"] for one in few] == np.argsort(-whole[4], kind="stable")[:2].tolist()
    with open_capture(tmp_path / "late.zarr") as capture:
        assert attention.shown(capture)["until"] == 0, "without earlier keys, no row may have attention"


# ---- the list -------------------------------------------------------------------------------------------------------


def names_of(library: Library, again: bool) -> list[str]:
    page = library.page("", 0, 10, TextIndex(lambda model: Texts(None)), again=again)
    return [line["name"] for line in page["captures"]]


def test_a_list_that_is_shown_takes_up_new_stores_alone(root: Path, tmp_path: Path) -> None:
    """The newest store comes first. Removed stores, links, files, unfinished stores and directories without a capture
    are left out. Stores that are already listed are not read again.
    """
    for name in ("said", "plain"):
        shutil.copytree(root / f"{name}.zarr", tmp_path / f"{name}.zarr")
    library = Library(tmp_path)
    begun = names_of(library, again=True)
    assert sorted(begun) == ["plain.zarr", "said.zarr"], "the first list must have all stores"
    shutil.copytree(root / "routed.zarr", tmp_path / "routed.zarr")
    (tmp_path / "none.zarr").mkdir()
    (tmp_path / "file.zarr").touch()
    shutil.copytree(root / "said.zarr", tmp_path / "other")
    (tmp_path / "link.zarr").symlink_to(root / "said.zarr")
    shutil.rmtree(tmp_path / "said.zarr")
    os.truncate(tmp_path / "plain.zarr/zarr.json", 0)  # a known store is not read again
    found = library._with_new()
    started = [info.started for info, _ in found.values()]
    assert set(found) == {"plain.zarr", "routed.zarr"} and started == sorted(started, reverse=True)
    info, text = found["routed.zarr"]
    assert (info.store, info.num_tokens, info.state) == (tmp_path / "routed.zarr", LENGTH, "complete")
    assert text == "routed.zarr tiny complete"
    assert set(names_of(library, again=True)) == {"plain.zarr", "routed.zarr"}
    shutil.rmtree(tmp_path / "routed.zarr")
    assert list(library._with_new()) == ["plain.zarr"]
    one = Library.at(root / "said.zarr")
    for again in (False, True, True):
        assert names_of(one, again) == ["said.zarr"], "other stores of its directory must not be listed"


def test_a_lost_sample_is_not_a_row_with_logits(tmp_path: Path) -> None:
    specs = [ArraySpec("q", "float32", (0,), 4), ArraySpec("logits", "float32", (), 9, per_sample=True)]
    owner, rows = kit.Store(1 << 20), {spec.name: kit.random_bits(spec, 8) for spec in specs}
    record = owner.open(tmp_path / "a.zarr", *specs, attrs={"prompt_len": 4})
    owner.feed(record, rows, 8)
    for sample in (0, 1, 3, 4):
        owner.put_rows(record, "logits", rows["logits"][sample : sample + 1], sample, 3 + sample)
    owner.close(record, 8, {"logits": 5})
    assert owner.shutdown(kit.PATIENCE)
    with open_capture(tmp_path / "a.zarr", allow_incomplete=True) as capture:
        assert capture.logits_positions.tolist() == [3, 4, -1, 6, 7]
        assert {hook["name"]: hook["rows"] for hook in describe(capture)["hooks"]} == {
            "q": None,
            "logits": [[3, 5], [6, 8]],
        }


def test_problems_that_verify_finds_have_a_kind(root: Path, tmp_path: Path) -> None:
    library = Library(root)
    sound = library.verify("said.zarr")
    assert sound == {"problems": [], "not_finite": [], "unseen": None}, sound
    with pytest.raises(NoSuchStore, match=r"^'other.zarr' is not a finished store of .*; reload the list$"):
        library.verify("other.zarr")
    shutil.copytree(root / "said.zarr", tmp_path / "said.zarr")
    (tmp_path / "said.zarr/topk_ids/zarr.json").write_text("{")
    found = Library(tmp_path).verify("said.zarr")
    assert found["not_finite"] == [] and found["problems"], found
    assert all(problem.startswith("topk_ids") and ": " in problem for problem in found["problems"]), found


def test_the_lens_of_a_row_names_its_places(tmp_path: Path, model: Path) -> None:
    """The chosen token comes first if it is in the window and its previous row is not missing."""
    rng, owner = np.random.default_rng(6), kit.Store(1 << 22)
    stream = rng.standard_normal((2, 20, viewkit.HIDDEN)).astype("f4")
    final = rng.standard_normal((1, 20, viewkit.HIDDEN)).astype("f4")
    specs = [ArraySpec("resid_pre", "float32", (0, 3), viewkit.HIDDEN)]
    specs += [ArraySpec("resid_final", "float32", (), viewkit.HIDDEN)]
    values = {"resid_pre": kit.bits(stream), "resid_final": kit.bits(final)}
    lost = [Loss.of(Cause.FELL_BEHIND, [(8, 10)])]
    owner.write(tmp_path / "a.zarr", specs, 20, values=values, attrs={"num_layers": 4}, losses=lost, wait=False)
    assert owner.shutdown(kit.PATIENCE)
    end, window = Unembedding.load(model), slice(2, 14)
    with open_capture(tmp_path / "a.zarr", allow_incomplete=True) as capture:
        names = predictions.places(capture, model)
        assert names == ["0", "3", "final"]
        for token, first in ((2, True), (13, True), (1, False), (14, False), (9, False), (10, False), (8, True)):
            pieces = list(predictions.lens_map(capture, end, names, window, token))
            assert [piece[:2] for piece in pieces] == [(None, token)] * first + [("final", 2), ("0", 2), ("3", 2)]
            if first:
                own = log_softmax(end.logits(np.concatenate([stream[:, token - 1], final[:, token - 1]])))
                ids = np.full(3, capture.token_ids[token])
                np.testing.assert_allclose(pieces[0][2].logprobs, own[np.arange(3), ids], rtol=1e-4)
                assert pieces[0][2].best.tolist() == own.argmax(1).tolist()
        assert len(list(predictions.lens_map(capture, end, names, slice(0, 4), 0))) == 3, (
            "the first row has no previous row"
        )
        places, ids, shares = lens.predictions(capture, end, 5, 4)
        own = log_softmax(end.logits(np.concatenate([stream[:, 5], final[:, 5]])))
        assert places == names and np.array_equal(ids, np.argsort(-own, axis=1)[:, :4])
        np.testing.assert_allclose(shares, -np.sort(-np.exp(own), axis=1)[:, :4], rtol=1e-4)
        none = {"ids": [], "p": [], "rank": None, "came": None}
        for row in (0, 9, 10):
            assert predictions.alternatives(capture, end, row, 2) == none, row
        own = log_softmax(end.logits(final[:, 5]))[0]
        found = predictions.alternatives(capture, end, 6, 2)
        assert found["ids"] == np.argsort(-own)[:2].tolist()
        assert found["came"] == pytest.approx(float(np.exp(own[capture.token_ids[6]])), rel=1e-4)
        assert predictions.described(capture, model)[0]["rows"] == [[1, 9], [11, 20]]
        outcomes = predictions.predicted(capture, end, "3", slice(0, 20))
        own = log_softmax(end.logits(stream[1]))
        wanted = np.append(np.nan, own[np.arange(19), capture.token_ids[1:]])
        wanted[[9, 10]] = np.nan
        known = np.isfinite(outcomes.logprobs)
        np.testing.assert_allclose(outcomes.logprobs[known], wanted[known], rtol=1e-4)
        assert np.flatnonzero(outcomes.best == -1).tolist() == [0, 9, 10]
