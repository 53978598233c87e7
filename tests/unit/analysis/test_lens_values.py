# SPDX-License-Identifier: Apache-2.0
"""Lens, attribution and log-probabilities of a made-up capture, compared with expected values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmi_connector.analysis import attribution, lens, logprobs
from dmi_connector.analysis.attribution import _targets, logit_attribution
from dmi_connector.analysis.lens import likeliest, logit_lens, uncertainty
from dmi_connector.analysis.logprobs import top_logprobs
from dmi_connector.analysis.unembedding import Unembedding, log_softmax

TOKENS, WIDTH, VOCABULARY, LOST, START = 12, 4, 9, (5, 7), 100
RNG = np.random.default_rng(1)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("f4")


IDS = np.array([3, 1, 4, 1, 5, 8, 2, 6, 5, 3, 5, 0], np.int32)
STREAM, FINAL = normal(2, TOKENS, WIDTH), normal(TOKENS, WIDTH)
LAYERS = [0, 2]
BLOCKS = {hook: normal(3, TOKENS, WIDTH) for hook in ("attn_out", "mlp_out")}
END = Unembedding(normal(VOCABULARY, WIDTH), normal(WIDTH), normal(WIDTH), 1e-6, True, 1.5, normal(VOCABULARY))
THERE = np.delete(np.arange(TOKENS), np.arange(*LOST))
SAMPLED = np.array([104, 105, -1, 107, 111])
LOGITS = normal(len(SAMPLED), VOCABULARY)


class Held:
    """A fake capture without rows 5 and 6. attrs: root attributes in addition to the number of layers."""

    def __init__(self, layers: list[int] = LAYERS, **attrs: Any) -> None:
        self.path, self.token_ids, self.logits_positions = "a.zarr", IDS, SAMPLED
        self.layers = {"resid_pre": layers} if layers else {}
        self.media = np.array([-1, -1, 0, 0, 0, -1, 1, 1, -1, 2, -1, -1])
        self.attrs = {"num_layers": 3, "start": START, "num_tokens": TOKENS, "missing": [], "reason": None, **attrs}

    def runs(self, most: int) -> list[slice]:
        assert most > 0
        return [slice(0, LOST[0]), slice(LOST[1], 9), slice(9, TOKENS)]

    def numpy(self, hook: str, layer: int | None = None, tokens: Any = None) -> np.ndarray:
        if hook == "logits":
            return LOGITS[tokens]
        if hook == "resid_final":
            assert layer is None
            return FINAL[tokens]
        return STREAM[LAYERS.index(layer)][tokens] if hook == "resid_pre" else BLOCKS[hook][layer][tokens]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the hooks whose reduction is checked. No hook is reduced here."""
    found: list[tuple[Any, ...]] = []
    for module in (lens, attribution):
        monkeypatch.setattr(module, "check_own_values", lambda _capture, *given, **named: found.append((given, named)))
    return found


def test_a_lens_has_no_values_for_rows_that_are_lost(checks: list[Any]) -> None:
    capture: Any = Held()
    found = logit_lens(capture, END, 2)
    assert found.layers == ["0", "2", "final"] and [given for given, _ in checks] == [("resid_pre",), ("resid_final",)]
    own = np.stack([log_softmax(END.logits(rows)) for rows in (*STREAM, FINAL)]).astype("f8")
    p, final, lost = np.exp(own), own[2], slice(*LOST)
    order = np.argsort(-own, axis=-1)[..., :2]
    wanted = {
        "probabilities": np.take_along_axis(p, order, -1),
        "chance": np.take_along_axis(p, np.broadcast_to(final.argmax(-1)[None, :, None], (3, TOKENS, 1)), -1)[..., 0],
        "entropy": -(p * own).sum(-1),
        "divergence": (np.exp(final) * (final - own)).sum(-1),
    }
    order[:, lost] = -1
    assert found.ids.dtype == np.int32 and found.ids.tolist() == order.tolist()
    for name, values in wanted.items():
        values[:, lost] = np.nan
        own_values = getattr(found, name)
        assert own_values.dtype == np.float32
        np.testing.assert_allclose(own_values, values, rtol=1e-4, atol=1e-6, err_msg=name)
    assert logit_lens(capture, END).ids.shape == (3, TOKENS, 5), "the default is five tokens"
    checks.clear()
    assert logit_lens(Held([]), END, VOCABULARY).layers == ["final"]  # type: ignore[arg-type]
    assert [given for given, _ in checks] == [("resid_final",)]
    for top in (0, VOCABULARY + 1, True, 1.5):
        with pytest.raises(ValueError, match=rf"^top {top} is not valid; use 1 to {VOCABULARY}, the vocabulary$"):
            logit_lens(capture, END, top)


def test_a_token_that_the_model_excludes_adds_nothing_to_a_lens() -> None:
    """Its logit is minus infinity in all layers, because the bias of the head is."""
    offset = normal(VOCABULARY)
    offset[4] = -np.inf
    found = logit_lens(Held(), replace(END, offset=offset), 2)  # type: ignore[arg-type]
    others = Unembedding(**{**vars(END), "weight": np.delete(END.weight, 4, 0), "offset": np.delete(offset, 4)})
    wanted = logit_lens(Held(), others, 2)  # type: ignore[arg-type]
    for name in ("entropy", "divergence", "chance"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_token_outside_the_vocabulary_has_no_surprisal() -> None:
    """For example, the id that stands for an image."""
    capture: Any = Held()
    whole = uncertainty(capture, END).surprisal
    capture.token_ids = np.where(np.arange(TOKENS) == 3, VOCABULARY, IDS)
    found = uncertainty(capture, END).surprisal
    assert np.flatnonzero(np.isnan(found) & ~np.isnan(whole)).tolist() == [2]


def test_the_likeliest_tokens_come_in_order_and_none_of_a_row_with_a_nan() -> None:
    logs = np.log(np.array([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], "f4"))
    logs[2, 3] = np.nan
    ids, shares = likeliest(logs, 3)
    assert ids.tolist() == [[1, 2, 3], [0, 3, 2], [-1, -1, -1]]
    np.testing.assert_allclose(shares, [[0.4, 0.3, 0.2], [0.4, 0.3, 0.2], [np.nan] * 3], rtol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 128])
def test_uncertainty_without_a_model_is_that_of_captured_logits(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost sample has the position -1. No token follows the last one."""
    monkeypatch.setattr(lens, "_SAMPLES", samples)
    found = uncertainty(Held())  # type: ignore[arg-type]
    own = log_softmax(LOGITS[[0, 1, 3, 4]])
    assert found.rows.dtype == np.int64 and found.rows.tolist() == [4, 5, 7, 11]
    np.testing.assert_allclose(found.entropy, -(np.exp(own) * own).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.surprisal, [*-own[np.arange(3), IDS[[5, 6, 8]]], np.nan], rtol=1e-6)
    assert (found.entropy.dtype, found.surprisal.dtype) == (np.float32, np.float32)


def test_uncertainty_with_a_model_is_that_of_the_stream(checks: list[Any]) -> None:
    found = uncertainty(Held(), END)  # type: ignore[arg-type]
    assert found.rows.tolist() == THERE.tolist() and checks == [(("resid_final",), {})]
    own = log_softmax(END.logits(FINAL[THERE]))
    wanted = [*-own[np.arange(len(THERE) - 1), IDS[THERE[:-1] + 1]], np.nan]
    np.testing.assert_allclose(found.surprisal, wanted, rtol=1e-5)
    empty: Any = SimpleNamespace(
        logits_positions=np.array([-1]),
        token_ids=IDS[:0],
        attrs=Held(num_tokens=0).attrs,
    )
    none = uncertainty(empty)
    assert [(a.dtype, a.shape) for a in (none.rows, none.entropy, none.surprisal)] == [
        (np.int64, (0,)),
        (np.float32, (0,)),
        (np.float32, (0,)),
    ]


# ---- attribution ----------------------------------------------------------------------------------------------------


def parts() -> np.ndarray:
    """The parts of the residual stream, [parts, tokens, width]."""
    blocks = [BLOCKS[hook][layer] for layer in range(3) for hook in ("attn_out", "mlp_out")]
    return np.stack([STREAM[0], *blocks]).astype("f8")


def shares_of(targets: np.ndarray, against: int | None, end: Unembedding = END) -> np.ndarray:
    read, offset = end.weight[targets].astype("f8"), 0.0 if end.offset is None else end.offset[targets].astype("f8")
    if against is not None:
        read = read - end.weight[against]
        offset = 0.0 if end.offset is None else offset - end.offset[against]
    whole = FINAL.astype("f8")
    centred = whole - whole.mean(-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    made = parts()
    made = (made - made.mean(-1, keepdims=True)) / spread * end.gain * end.scale
    shares = np.concatenate([(made * read).sum(-1), (read @ end.bias * end.scale + offset)[None]])
    shares[:, slice(*LOST)] = np.nan
    return shares


@pytest.mark.parametrize("end", [END, replace(END, offset=None)], ids=["offset", "none"])
@pytest.mark.parametrize("against", [None, 2])
@pytest.mark.parametrize("targets", [7, np.int64(0), [*range(9), 3, 2, 1]])
@pytest.mark.parametrize("rows", [None, slice(0, 12), slice(2, 6), slice(5, 7), slice(8, 10)])
def test_shares_of_a_logit_are_of_all_parts(
    rows: slice | None, targets: Any, against: int | None, end: Unembedding, checks: list[Any]
) -> None:
    found, labels = logit_attribution(Held(), end, targets, against, rows)  # type: ignore[arg-type]
    assert labels == ["embed", "0.attn", "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp", "bias"]
    wanted = shares_of(np.broadcast_to(targets, TOKENS), against, end)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted[:, rows or slice(None)], rtol=1e-4, atol=1e-4)
    needs = {"needs": attribution.Keeps.EVERY_VALUE}
    assert checks == [((hook,), needs) for hook in ("resid_pre", "attn_out", "mlp_out", "resid_final")]


@pytest.mark.parametrize("rows", [None, slice(2, 11)])
def test_visual_features_added_to_images_are_a_separate_part(rows: slice | None) -> None:
    """In models that add visual features to the stream, the row "visual" has them."""
    capture: Any = Held(identities=False, visual_layers=2)
    shares, labels = logit_attribution(capture, END, 3, rows=rows)
    assert labels[-3:] == ["2.mlp", "visual", "bias"]
    known = shares_of(np.full(TOKENS, 3), None)[:, rows or slice(None)]
    np.testing.assert_allclose(np.delete(shares, -2, axis=0), known, rtol=1e-4, atol=1e-4)
    image, there = capture.media[rows or slice(None)] >= 0, np.isfinite(known[0])
    logits = END.logits(FINAL)[rows or slice(None), 3]
    np.testing.assert_allclose(shares.sum(0)[image & there], logits[image & there], rtol=1e-4, atol=1e-4)
    assert not shares[-2, ~image & there].any() and np.isnan(shares[-2, ~there]).all()


@pytest.mark.parametrize("mlp_layers", [[], [1], [0, 2]])
def test_layers_with_one_block_have_one_share(mlp_layers: list[int]) -> None:
    capture: Any = Held(mlp_layers=mlp_layers)
    shares, labels = logit_attribution(capture, END, 3)
    kinds = ["mlp" if layer in mlp_layers else "attn" for layer in range(3)]
    assert labels == ["embed", *(f"{layer}.{kind}" for layer, kind in enumerate(kinds)), "bias"]
    both = shares_of(np.full(TOKENS, 3), None)
    wanted = both[[0, *(1 + 2 * layer + (kind == "mlp") for layer, kind in enumerate(kinds)), -1]]
    np.testing.assert_allclose(shares, wanted, rtol=1e-4, atol=1e-4)


def test_the_default_target_is_the_next_token() -> None:
    """The target of the last row is the token with the largest logit."""
    last = int(END.logits(FINAL[-1:]).argmax())
    targets = np.array([*IDS[1:], last])
    capture: Any = Held()
    found = _targets(capture, END, None)
    assert found.dtype == np.int64 and found.tolist() == targets.tolist()
    for rows in (None, slice(3, 12), slice(4, 9)):
        shares, _ = logit_attribution(capture, END, rows=rows)
        np.testing.assert_allclose(shares, shares_of(targets, None)[:, rows or slice(None)], rtol=1e-4, atol=1e-4)


def test_attribution_refuses_what_it_cannot_split() -> None:
    for attrs in ({"identities": False}, {"identities": False, "visual_layers": []}):
        with pytest.raises(ValueError, match=r"^a.zarr is of a model whose layers also scale the residual stream, so"):
            logit_attribution(Held(**attrs), END)  # type: ignore[arg-type]
    for attrs in ({"identities": False, "visual_layers": [0]}, {"identities": True}, {"identities": None}):
        logit_attribution(Held(**attrs), END)  # type: ignore[arg-type]
    capture: Any = Held()
    with pytest.raises(ValueError, match=r"^targets have shape \(11,\), the store has 12 rows; give one id, or one"):
        logit_attribution(capture, END, range(11))  # type: ignore[arg-type]
    for targets, against, wrong in ((-1, None, -1), (9, None, 9), ([0] * 11 + [12], None, 12), (1, 9, 9), (1, -3, -3)):
        with pytest.raises(ValueError, match=rf"^token {wrong} does not exist; the vocabulary has 9 tokens$"):
            logit_attribution(capture, END, targets, against)
    logit_attribution(capture, END, 8, 0)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4 * VOCABULARY, 8 * VOCABULARY, 64 << 20])
def test_top_logprobs_are_read_in_blocks(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has as many rows as fit into memory, at least one."""
    monkeypatch.setattr(logprobs, "_BYTES", nbytes)
    after, read = np.array([0, 8, -1, 9, 4]), list[slice]()

    class Rows:
        sampled, width, hook = True, VOCABULARY, "logits"

        def __len__(self) -> int:
            return len(LOGITS)

        def tokens(self) -> dict[str, np.ndarray]:
            return {"next_token_ids": after}

        def read(self, rows: slice) -> np.ndarray:
            read.append(rows)
            return LOGITS[rows]

    view: Any = Rows()
    found = top_logprobs(view, 3)
    step = {1: 1, 36: 1, 72: 2}.get(nbytes, 5)
    assert read == [slice(at, min(at + step, 5)) for at in range(0, 5, step)]
    own = log_softmax(LOGITS)
    order = np.argsort(-own, axis=1)[:, :3]
    assert found.token_ids.dtype == np.int32 and found.token_ids.tolist() == order.tolist()
    np.testing.assert_array_equal(found.logprobs, np.take_along_axis(own, order, 1))
    wanted = [own[0, 0], own[1, 8], np.nan, np.nan, own[4, 4]]
    np.testing.assert_array_equal(found.next_logprobs, np.array(wanted, "f4"))
    assert found.logprobs.dtype == found.next_logprobs.dtype == np.float32
    assert found.tokens["next_token_ids"] is after and top_logprobs(view).token_ids.shape == (5, 5)
    assert top_logprobs(view, VOCABULARY).token_ids.shape == (5, 9) and top_logprobs(view, 1).logprobs.shape == (5, 1)
    for k in (0, 10):
        with pytest.raises(ValueError, match=rf"^top_logprobs: k {k} is not valid; use 1 to 9, the size of the voc"):
            top_logprobs(view, k)
    view.sampled = False
    with pytest.raises(ValueError, match=r"^top_logprobs: 'logits' does not hold logits; give captures.rows\('logits"):
        top_logprobs(view)
