# SPDX-License-Identifier: Apache-2.0
"""Latents, attribution and texts of `dmi view`, compared with expected values, for made-up captures."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmi_connector.reduce.sparse_encoder import SparseEncoder
from dmi_connector.store.format.remote_path import place_of
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.view import data, experts, latents, predictions, server, texts_index
from dmi_connector.view.latents import Latents, _contexts

RNG = np.random.default_rng(3)
WIDTH, LATENTS = 4, 6
WEIGHT, BIAS = RNG.standard_normal((WIDTH, LATENTS)).astype("f4"), RNG.standard_normal(LATENTS).astype("f4")
PLAIN = SparseEncoder(WEIGHT, BIAS, np.zeros(WIDTH, "f4"))
ENCODERS = {
    "plain": PLAIN,
    "threshold": replace(PLAIN, threshold=np.linspace(0, 2, LATENTS).astype("f4")),
    "gate": replace(PLAIN, gate=(np.linspace(1, 2, LATENTS).astype("f4"), BIAS[::-1].copy())),
}
ROWS = RNG.standard_normal((30, WIDTH)).astype("f4")


class Rows:
    """A fake capture of resid_pre in some layers. lost: its missing rows, [first, stop)."""

    def __init__(self, name: str, rows: np.ndarray, layers: list[int], lost: tuple[int, int] = (0, 0)) -> None:
        self.path, self.layers, self._rows = Path(name), {"resid_pre": layers}, rows
        spec = {"layers": layers, "dtype": "float32", "width": rows.shape[1]}
        self.attrs: dict[str, Any] = {"num_tokens": len(rows), "num_layers": 9, "hooks": {"resid_pre": spec}}
        self.token_ids, self._lost, self.entered = np.arange(100, 100 + len(rows)), lost, 0

    def __enter__(self) -> Rows:
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        return

    def numpy(self, hook: str, layer: int | None, rows: slice) -> np.ndarray:
        assert hook == "resid_pre"
        assert isinstance(rows, slice) and rows.start < rows.stop
        return self._rows[None, rows] if layer is None else self._rows[rows]

    def runs(self, most: int) -> list[slice]:
        """Two runs, before and after the missing rows."""
        assert most == 256
        return [slice(0, self._lost[0]), slice(self._lost[1], len(self._rows))]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the checks of captures."""
    monkeypatch.setattr(latents, "hook_and_layer", lambda name, _attrs: (name.split("@")[0], int(name.split("@")[1])))
    monkeypatch.setattr(Latents, "lacking", lambda self, capture: None if capture.attrs["num_tokens"] else "no rows")


@pytest.mark.parametrize("kind", ENCODERS)
def test_one_latent_is_encoded_as_in_the_whole(kind: str) -> None:
    whole = ENCODERS[kind]
    for latent in range(LATENTS):
        one, at = Latents(whole, "resid_pre@3")._only(latent)
        assert at == 0 and one.latents == 1 and (one.bias.shape, one.weight.shape) == ((1,), (WIDTH, 1))
        assert one.weight.flags.c_contiguous
        np.testing.assert_allclose(one.encode(ROWS)[:, 0], whole.encode(ROWS)[:, latent], rtol=1e-5, atol=1e-6)
    for latent in (-1, LATENTS):
        with pytest.raises(
            ValueError, match=rf"^latent {latent} does not exist: the autoencoder has latents 0 to {LATENTS - 1}$"
        ):
            Latents(whole, "resid_pre@3")._only(latent)


def test_a_latent_of_a_top_k_encoder_needs_all_others() -> None:
    whole = replace(PLAIN, k=2)
    for latent in (0, LATENTS - 1):
        assert Latents(whole, "resid_pre@3")._only(latent) == (whole, latent)


def test_the_strongest_latents_come_first_and_equal_ones_in_order(checked: None) -> None:
    many = SparseEncoder(np.ones((1, 40), "f4"), np.zeros(40, "f4"), np.zeros(1, "f4"))
    many.bias[[5, 30]] = 1, -3
    found = Latents(many, "resid_pre@3")
    capture: Any = Rows("a.zarr", np.array([[0], [2]], "f4"), [3])
    wanted = [{"latent": 5, "value": 3.0}, *({"latent": at, "value": 2.0} for at in range(40) if at not in (5, 30))]
    assert found.strongest(capture, 1, 99) == wanted, "an inactive latent must be left out"
    assert found.strongest(capture, 1, 7) == wanted[:7]
    assert found.strongest(capture, 0, 7) == [{"latent": 5, "value": 1.0}]


@pytest.mark.parametrize("rows", [slice(0, 30), slice(3, 25), slice(11, 13), slice(29, 30), slice(2, 9)])
def test_a_latent_of_a_window_has_no_value_where_rows_are_lost_or_not_finite(rows: slice, checked: None) -> None:
    values = ROWS.copy()
    values[5, 1] = np.inf
    values[20, 0] = np.nan
    capture: Any = Rows("a.zarr", values, [3], (10, 14))
    wanted = PLAIN.encode(ROWS)[:, 2]
    wanted[[5, 20, *range(10, 14)]] = np.nan
    found = Latents(PLAIN, "resid_pre@3").window(capture, 2, rows)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted[rows], rtol=1e-5)


def test_contexts_of_a_latent_are_its_largest_values_in_all_stores(
    checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is eight tokens before and four after. Time does not advance."""
    monkeypatch.setattr(latents.time, "monotonic", lambda: 5.0)
    encoder = SparseEncoder(np.ones((1, 1), "f4"), np.zeros(1, "f4"), np.zeros(1, "f4"))
    one, other = np.full((20, 1), -1, "f4"), np.full((3, 1), -1, "f4")
    one[[3, 12], 0], other[1, 0] = (2, 8), 4
    stores: Any = [Rows("a.zarr", one, [3], (6, 8)), Rows("b.zarr", one[:0], [3]), Rows("c.zarr", other, [3])]
    found = Latents(encoder, "resid_pre@3").contexts(stores, 0, 2)
    counts, edges = np.histogram(np.array([2, 8, 4], "f4"), 24, (0, 8))
    near = [0.0, 0.0, None, None, 0.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]
    assert found == {
        "found": [
            {"store": "a.zarr", "row": 12, "value": 8.0, "first": 4, "ids": [*range(104, 117)], "values": near},
            {"store": "c.zarr", "row": 1, "value": 4.0, "first": 0, "ids": [100, 101, 102], "values": [0.0, 4.0, 0.0]},
        ],
        "rows": 21,
        "active": 3,
        "read": 3,
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }
    assert [store.entered for store in stores] == [1, 1, 1]
    none = Latents(encoder, "resid_pre@3").contexts([], 0, 2)
    edges = np.histogram(np.zeros(0, "f4"), 24, (0, float(np.float32(1e-6))))[1]
    assert none == {"found": [], "rows": 0, "active": 0, "read": 0, "edges": edges.tolist(), "counts": [0] * 24}


def test_contexts_stop_after_two_seconds_within_a_store_too(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.9, 12.0, 12.0])
    monkeypatch.setattr(latents.time, "monotonic", lambda: next(times))
    encoder = SparseEncoder(np.ones((1, 1), "f4"), np.zeros(1, "f4"), np.zeros(1, "f4"))
    stores: Any = [Rows(name, np.ones((20, 1), "f4"), [3], (5, 9)) for name in ("a.zarr", "b.zarr")]
    found = Latents(encoder, "resid_pre@3").contexts(stores, 0, 1)
    assert (found["rows"], found["active"], found["read"]) == (16, 16, 1) and next(times, None) is None


def test_contexts_of_one_store_are_in_order_of_their_values() -> None:
    capture: Any = Rows("a.zarr", np.zeros((6, 1), "f4"), [3])
    values = np.array([1, np.nan, 3, 3, 0, -1], "f4")
    found = _contexts(capture, values, 9)
    assert [(one["row"], one["value"]) for one in found] == [(2, 3.0), (3, 3.0), (0, 1.0)]
    assert found[0]["values"] == [1.0, None, 3.0, 3.0, 0.0, -1.0] and found[0]["ids"] == [*range(100, 106)]
    assert [one["row"] for one in _contexts(capture, values, 2)] == [2, 3]


@pytest.mark.parametrize(
    ("facts", "given", "hook"),
    [
        ({"hook_name": "resid_pre@1"}, None, "resid_pre@1"),
        ({"hook_name": "resid_pre@1"}, "resid_pre@2", "resid_pre@2"),
        ({"metadata": {"hook_name": "ln1@0"}}, None, "ln1@0"),
        ({"metadata": None}, "q@0", "q@0"),
        ({"metadata": {}}, None, None),
        ({}, None, None),
    ],
)
def test_the_hook_of_an_autoencoder_is_in_its_files_or_given(
    facts: dict[str, Any], given: str | None, hook: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "sae.safetensors"
    save_file({"W_enc": WEIGHT, "b_enc": BIAS, "b_dec": np.zeros(WIDTH, "f4")}, file)
    (tmp_path / "cfg.json").write_text(json.dumps({"architecture": "standard", **facts}))
    for path in (file, tmp_path):
        if hook is None:
            with pytest.raises(ValueError, match=rf"^--sae {path}: its files name no hook; give --sae-hook, such as"):
                Latents.load(path, given)
        else:
            found = Latents.load(path, given)
            assert found.hook == hook and found.encoder.latents == LATENTS
    assert Latents(PLAIN, "q").described() == {
        "name": "latents",
        "layers": [],
        "dtype": "float32",
        "width": LATENTS,
        "reduce": None,
        "rows": None,
        "statistics": [{"name": "value", "index": "latent", "signed": False}],
    }


@pytest.mark.parametrize("row", [0, 1, 2])
def test_attribution_is_of_the_token_after_a_row(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target of the last row is the token with the largest logit. Row 0 of the store has no known token."""
    asked: list[Any] = []

    def numpy(hook: str, *, tokens: slice) -> np.ndarray:
        assert (hook, tokens) == ("resid_final", slice(2, 3))
        return np.zeros((1, 2), "f4")

    def attribute(*given: Any, **named: Any) -> tuple[np.ndarray, list[str]]:
        asked.append((*given, named))
        return np.array([[1.5], [np.nan if row == 1 else 0.25]], "f4"), ["embed", "bias"]

    capture: Any = SimpleNamespace(token_ids=np.array([5, 6, 7]), numpy=numpy)
    end: Any = SimpleNamespace(logits=lambda rows: np.array([[0, 1, 9, 2]], "f4"))
    monkeypatch.setattr(predictions, "logit_attribution", attribute)
    monkeypatch.setattr(predictions, "known_tokens", lambda _capture: np.array([False, True, True]))
    target = {0: 6, 1: 7, 2: 2}[row]
    values, logit = ([1.5, None], None) if row == 1 else ([1.5, 0.25], 1.75)
    found = predictions.attribution(capture, end, row)
    assert found == {"parts": ["embed", "bias"], "values": values, "logit": logit, "target": target}
    assert asked == [(capture, end, target, {"rows": slice(row, row + 1)})]
    monkeypatch.setattr(predictions, "known_tokens", lambda _capture: np.array([True, True, False]))
    if row == 1:
        with pytest.raises(ValueError, match=r"^the store lacks the token after row 1$"):
            predictions.attribution(capture, end, row)
    else:
        assert predictions.attribution(capture, end, row) == found


@pytest.mark.parametrize(
    ("count", "order"),
    [(0, []), (1, [0]), (2, [1, 0]), (3, [2, 0, 1]), (6, [5, 0, 2, 1, 3, 4]), (8, [7, 0, 3, 1, 5, 2, 4, 6])],
)
def test_layers_of_the_lens_come_last_first_and_then_halfway(count: int, order: list[int]) -> None:
    assert predictions.halving(count) == order


def test_a_text_is_known_by_the_name_and_the_beginning_of_its_store(tmp_path: Path) -> None:
    info = CaptureInfo(tmp_path / "a.zarr", None, None, "complete", None, "2026-01-01", None, None, None)
    assert texts_index._key(info) == ("a.zarr", "2026-01-01")
    there = replace(info, store=place_of("s3://bucket/folder/a.zarr"))
    assert texts_index._key(there) == ("s3://bucket/folder/a.zarr", "2026-01-01")


def test_the_port_of_a_server_that_ended_can_be_taken_at_once() -> None:
    with server._listen(0) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(
            ValueError, match=rf"^--port {port} cannot be used \(.*\); give another, or 0 for a free one"
        ):
            server._listen(port)
    with pytest.raises(ValueError, match=r"^--port 70000 cannot be used"):
        server._listen(70000)


@pytest.mark.parametrize(
    ("rows", "found"),
    [([], []), ([4], [[4, 5]]), ([3, 1, 2, 2], [[1, 4]]), ([0, 2, 3, 7], [[0, 1], [2, 4], [7, 8]])],
)
def test_rows_are_given_as_ranges(rows: list[int], found: list[list[int]]) -> None:
    assert data.ranges(np.array(rows, int)) == found


def test_a_line_of_the_list_has_the_name_of_the_model_without_its_directory() -> None:
    info = CaptureInfo(Path("/x/A.zarr"), "K", "r", "complete", None, "2026", "2027", 7, 5, 3, "/models/Tiny")
    line = {"name": "A.zarr", "key": "K", "model": "Tiny", "state": "complete", "started": "2026"}
    assert data._line(info) == {**line, "tokens": 5, "prompt": 3, "bytes": 7}
    assert data._text(info) == "a.zarr k r /models/tiny complete"
    bare = replace(info, key=None, request_id=None, model=None)
    assert data._line(bare)["model"] is None and data._text(bare) == "a.zarr complete"


def test_texts_are_read_once_and_searched_with_what_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words must match. If the time is over, captures that were not read wait for the next search. A store that
    cannot be read is read again after half a minute.
    """
    read: list[str] = []
    now, clock, failing = [0.0], [100.0], ["c"]
    monkeypatch.setattr(texts_index.time, "time", lambda: clock[0])
    monkeypatch.setattr(texts_index.time, "monotonic", lambda: now[0])
    ids = {"a": [1] * 3000, "b": [2, 3], "c": [4]}
    prompts: dict[str, int] = {}

    def fields(store: Path, names: list[str], complete: bool) -> Any:
        assert (names, complete) == (["token_ids", "phase"], True)
        read.append(store.stem)
        if store.stem in failing:
            raise OSError
        rows = np.arange(len(ids[store.stem]))
        return {"token_ids": np.array(ids[store.stem]), "phase": (rows >= prompts.get(store.stem, 1)).astype(np.uint8)}

    def whole(given: list[int]) -> str:
        return " ".join(f"W{i}\n" for i in given)

    monkeypatch.setattr(texts_index, "store_fields", fields)
    index = texts_index.TextIndex(lambda model: SimpleNamespace(whole=whole))  # type: ignore[arg-type,return-value]
    base = CaptureInfo(Path("a.zarr"), None, None, "complete", None, "1", None, None, None, 1)
    infos = {name: replace(base, store=Path(f"{name}.zarr")) for name in "abc"}
    assert index.prompt(infos["b"]) == "W2" and index.prompt(infos["c"]) == "" and read == ["b", "c"]
    assert index.prompt(replace(infos["b"], state="running")) == "" and read == ["b", "c"]
    every = [(info, f"{name}.zarr known") for name, info in infos.items()]
    assert index.search(every, ["w3"]) == ([infos["b"]], 0) and read == ["b", "c", "a"]
    assert index.search(every, ["known", "w3"]) == ([infos["b"]], 0)
    assert index.search(every, ["w1"]) == ([infos["a"]], 0) and index.search(every, ["w1", "w2"]) == ([], 0)
    assert index.search(every, []) == (list(infos.values()), 0) and len(read) == 3
    clock[0] += 29
    assert index.prompt(infos["c"]) == "" and len(read) == 3
    clock[0] += 2
    assert index.prompt(infos["c"]) == "" and len(read) == 4, "the store must be read again"
    failing.clear()
    clock[0] += 31
    assert index.prompt(infos["c"]) == "W4" and index.search(every, ["w4"]) == ([infos["c"]], 0)
    clock[0] += 31
    assert index.prompt(infos["c"]) == "W4" and len(read) == 5
    failing.append("c")
    slow = texts_index.TextIndex(lambda model: SimpleNamespace(whole=whole))  # type: ignore[arg-type,return-value]
    times = iter([0.0, 0.39, 0.4, 0.4])
    monkeypatch.setattr(texts_index.time, "monotonic", lambda: next(times))
    assert slow.search(every, ["w1"]) == ([infos["a"]], 2)
    longer = replace(infos["a"], prompt_len=None)
    prompts["a"] = 3000
    assert len(texts_index.TextIndex(lambda m: SimpleNamespace(whole=whole)).prompt(longer)) == 96  # type: ignore[arg-type,return-value]


def test_experts_of_a_store_without_rows_are_none() -> None:
    """The number of experts is that of the largest index plus 1, unless an attribute has it."""

    class Routed:
        attrs: dict[str, Any] = {}
        layers = {"topk_ids": [1]}

        def __init__(self, *runs: list[list[int]]) -> None:
            self.parts = [np.array([run]).reshape(1, -1, 2) for run in runs]

        def __contains__(self, hook: str) -> bool:
            return hook == "topk_ids"

        def runs(self, most: int) -> range:
            return range(len(self.parts))

        def numpy(self, hook: str, layer: int | None, run: int) -> np.ndarray:
            assert (hook, layer) == ("topk_ids", None)
            return self.parts[run]

        def shape(self, hook: str) -> tuple[int, ...]:
            return (1, 0, 2)

    for runs, count in (([], 0), ([[]], 0), ([[[0, 1]], [[5, 2], [1, 0]], []], 6)):
        found = experts.shown(Routed(*runs))  # type: ignore[arg-type]
        assert found == {"layers": [1], "count": count, "each": 2, "weights": False}


def test_stores_that_cannot_be_opened_are_passed_over() -> None:
    """Other stores follow, whatever the error was."""
    errors = {"a": KeyError("x"), "b": OSError("x"), "c": ValueError("x")}

    def opened(name: str) -> str:
        if name in errors:
            raise errors[name]
        return name

    library: Any = SimpleNamespace(_stores=lambda: dict.fromkeys("abcd"), open=opened)
    assert list(data.Library.all(library)) == ["d"]


def test_tokens_after_captured_logits_have_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after the first row counts. A lost sample has the position -1, and no token follows the last row."""
    monkeypatch.setattr(predictions, "lacking", lambda *_: None)
    monkeypatch.setattr(predictions.lens, "lacking", lambda *_: "no model")
    for start in (0, 3):
        positions = np.array([0, 1, 4, 5]) + start
        attrs = {"start": start, "num_tokens": 6}
        capture: Any = SimpleNamespace(attrs=attrs, logits_positions=np.append(positions, -1))
        (entry,) = predictions.described(capture, None)
        assert entry["rows"] == [[1, 3], [5, 6]]
