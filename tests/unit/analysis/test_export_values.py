# SPDX-License-Identifier: Apache-2.0
"""The records, kept files and omissions of exports, and the layout of ids, compared with expected values."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dmi_connector.analysis.export import progress as progress_module
from dmi_connector.analysis.export import zip as zip_module
from dmi_connector.analysis.export.progress import NOTE, Done, LeftOut, _export, check_note, make_directory, whole
from dmi_connector.analysis.export.safetensors import write_file
from dmi_connector.analysis.neurons import Activation
from dmi_connector.analysis.pictures import plot_sets
from dmi_connector.analysis.pictures.plot_text import SIZE, colour_map, ink_on
from dmi_connector.analysis.pictures.text_layout import Piece, lay_out_ids
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite


class Stores:
    """Fake captures with these names, which record when they are opened."""

    def __init__(self, *names: str) -> None:
        self.infos = [SimpleNamespace(store=Path(f"/s/{name}.zarr")) for name in names]
        self.opened: list[int] = []

    def __len__(self) -> int:
        return len(self.infos)

    def __getitem__(self, number: int) -> Any:
        @contextmanager
        def opened() -> Iterator[Any]:
            self.opened.append(number)
            yield SimpleNamespace(path=self.infos[number].store)

        return opened()


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_names", lambda captures: [info.store.stem for info in captures.infos])
    monkeypatch.setattr(progress_module, "_not_finite_of", lambda noted, captures: noted.get("not_finite", {}))


def export(stores: Stores, out: Path, finite: FiniteCheck, bad: dict[str, str] | None = None) -> tuple[Done, Any]:
    """Export the stores. bad: {name of a store: its fault}; "nan" is values that are not finite."""
    told: list[tuple[int, int]] = []

    def write(capture: Any, path: Path) -> None:
        wrong = (bad or {}).get(capture.path.stem)
        if wrong == "nan":
            finite.see(capture.path, [3])
            if finite.policy == "skip":
                raise finite.error(capture.path, 3)
        elif wrong is not None:
            raise LeftOut(capture.path, wrong, "capture it")
        path.write_text(capture.path.stem)

    numbers = list(range(len(stores)))
    captures: Any = stores
    done = _export(
        captures,
        numbers,
        out,
        lambda number: Path(f"{number}.x"),
        write,
        lambda *given: told.append(given),
        {"a": 1},
        finite,
    )
    return done, told


def test_an_export_counts_what_it_writes_keeps_and_leaves_out(tmp_path: Path) -> None:
    out, stores = tmp_path / "deep/out", Stores("a", "b", "c", "d", "e", "f")
    bad = {"b": "no token", "c": "nan", "e": "no token", "f": "nan"}
    done, told = export(stores, out, FiniteCheck("skip"), bad)
    assert done == Done(out, 2, 0, warnings=("2 left out: no token", f"2 left out: {WHAT}"))
    assert told == [(n, 6) for n in range(1, 7)] and stores.opened == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in out.iterdir()) == [NOTE, "0.x", "3.x"]
    assert json.loads((out / NOTE).read_text())["settings"] == {"a": 1}
    (out / "3.x").unlink()
    done, told = export(stores, out, FiniteCheck("skip"), bad)
    assert done == Done(out, 1, 1, warnings=("2 left out: no token", f"2 left out: {WHAT}"))
    assert stores.opened[6:] == [1, 2, 3, 4, 5] and len(told) == 6


def test_stores_that_are_kept_are_recorded_and_printed(tmp_path: Path) -> None:
    done, _ = export(Stores("a", "b", "c"), tmp_path, FiniteCheck("keep"), {"b": "nan"})
    assert done == Done(tmp_path, 3, 0, warnings=(f"1 kept: {WHAT}",))
    noted = json.loads((tmp_path / NOTE).read_text())
    assert noted["not_finite"] == {"/s/b.zarr": 3} and noted["settings"] == {"a": 1, "finite": "keep"}
    finite = FiniteCheck("keep")
    assert export(Stores("a", "b", "c"), tmp_path, finite)[0] == Done(tmp_path, 0, 3, warnings=(f"1 kept: {WHAT}",))
    with pytest.raises(
        ValueError, match=r"was written with .*'finite': 'keep'.*, not {'a': 1}; give another directory"
    ):
        check_note(tmp_path, {"a": 1})


def test_an_export_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    for bad, kind, why in (
        ({"a": "nan", "b": "no token"}, ValueError, "/s/b.zarr holds no token; capture it"),
        ({"a": "no token", "b": "nan"}, NotFinite, "row 3"),
    ):
        with pytest.raises(ValueError, match=rf"^export: no store is left: .*{why}") as caught:
            export(Stores("a", "b"), tmp_path / "out", FiniteCheck("skip"), bad)
        assert type(caught.value) is kind and list((tmp_path / "out").iterdir()) == []
    with pytest.raises(NotFinite):
        export(Stores("a", "b"), tmp_path / "out", FiniteCheck("fail"), {"b": "nan"})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [NOTE, "0.x"]
    none, told = export(Stores(), tmp_path / "none", FiniteCheck("skip"))
    assert none == Done(tmp_path / "none", 0, 0) and told == []


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    with whole(tmp_path / "deep/x.zip") as partial:
        partial.write_text("x")
        assert partial == tmp_path / "deep/x.zip.partial" and not (tmp_path / "deep/x.zip").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.zip"]
    for left in (True, False):
        with pytest.raises(KeyError), whole(tmp_path / "deep/y.zip") as partial:
            if left:
                partial.write_text("x")
            raise KeyError
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.zip"]


def test_exports_into_a_store_or_below_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr/zarr.json").touch()
    for path in (tmp_path / "a.zarr", tmp_path / "a.zarr/deep/out"):
        with pytest.raises(
            ValueError, match=rf"^export: {tmp_path}/a.zarr is a store, and an export must not add files"
        ):
            make_directory(path)
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=rf"^export: {tmp_path}/file/x cannot be created \(Not a directory\); give another"
    ):
        make_directory(tmp_path / "file/x")
    make_directory(tmp_path / "new/deep")
    make_directory(tmp_path / "new/deep")
    assert (tmp_path / "new/deep").is_dir()


def test_one_store_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def write(capture: Any, path: Path, progress: Any) -> None:
        calls.append((capture.path.name, path.name, progress))
        path.touch()

    monkeypatch.setattr(zip_module, "_check", lambda capture, finite: calls.append((capture.path.name, finite)))
    monkeypatch.setattr(zip_module, "write_zip", write)
    stores: Any = Stores("a", "b")
    done = zip_module.export_file(stores, tmp_path / "x.zip", print, "finite")  # type: ignore[arg-type]
    assert done == Done(tmp_path / "x.zip", 1) and (tmp_path / "x.zip").exists()
    assert calls == [("a.zarr", "finite"), ("a.zarr", "x.zip.partial", print)]
    with pytest.raises(FileExistsError, match=rf"^export: {tmp_path}/x.zip exists; give a new name$"):
        zip_module.export_file(stores, tmp_path / "x.zip", print, "finite")  # type: ignore[arg-type]


def test_ids_have_a_margin_and_a_gap_and_begin_a_line_if_they_do_not_fit() -> None:
    from dmi_connector.analysis.pictures.text_layout import _ID_GAP as GAP
    from dmi_connector.analysis.pictures.text_layout import _ID_PAD as PAD

    def piece(token: int, line: int, start: float, text: str) -> Piece:
        return Piece(token, line, start, start + len(text) + 2 * PAD, ((start + PAD, text),))

    one = 1 + 2 * PAD
    assert lay_out_ids(["1", "2", "345678"], 9) == [
        piece(0, 0, 0, "1"),
        piece(1, 0, one + GAP, "2"),
        piece(2, 1, 0, "345678"),
    ]
    wide = "1" * 30
    assert lay_out_ids([wide, "2", wide], 9) == [piece(0, 0, 0, wide), piece(1, 1, 0, "2"), piece(2, 2, 0, wide)]
    exact = int(2 * one + GAP) if (2 * one + GAP).is_integer() else 2 * one + GAP
    assert [p.line for p in lay_out_ids(["1", "2", "3"], exact)] == [0, 0, 1]  # type: ignore[arg-type]
    assert [p.line for p in lay_out_ids(["1", "2", "3"], exact - 0.01)] == [0, 1, 2]  # type: ignore[arg-type]


# ---- bytes of safetensors -------------------------------------------------------------------------------------------


def test_a_file_of_tensors_is_written_block_by_block(tmp_path: Path) -> None:
    """Wider dtypes come first, then names in order. The length of the header is a multiple of eight bytes."""
    tensors: dict[str, Any] = {
        "b": (np.dtype("<f2"), (3,), [np.array([1, 2], "f2"), np.array([3.0])]),
        "a": (np.dtype("<f2"), (), [np.array(7, "f2")]),
        "ids": (np.dtype("<i8"), (2, 2), [np.array([[1, 2]]), np.array([[3, 4]])]),
        "none": (np.dtype("<i4"), (0, 3), []),
    }
    write_file(tmp_path / "x", tensors)
    data = (tmp_path / "x").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0 and data[8 : 8 + size].rstrip(b" ").endswith(b"}}")
    assert list(json.loads(data[8 : 8 + size]).items()) == [
        ("ids", {"dtype": "I64", "shape": [2, 2], "data_offsets": [0, 32]}),
        ("none", {"dtype": "I32", "shape": [0, 3], "data_offsets": [32, 32]}),
        ("a", {"dtype": "F16", "shape": [], "data_offsets": [32, 34]}),
        ("b", {"dtype": "F16", "shape": [3], "data_offsets": [34, 40]}),
    ]
    values = np.array([1, 2, 3, 4], "<i8").tobytes() + np.array([7, 1, 2, 3], "<f2").tobytes()
    assert data[8 + size :] == values
    found = load_file(tmp_path / "x")
    assert found["ids"].tolist() == [[1, 2], [3, 4]] and found["none"].shape == (0, 3)
    with pytest.raises(ValueError, match=r"^safetensors has no complex64; export another hook$"):
        write_file(tmp_path / "y", {"a": (np.dtype("c8"), (1,), [])})
    assert not (tmp_path / "y").exists()


# ---- contexts of a neuron -------------------------------------------------------------------------------------------


def activation(values: list[float], before: int) -> Activation:
    ids = tuple(range(len(values)))
    return Activation(values[before], Path("a"), 9, before, ids, before, tuple(values))


def texts_of(*words: str) -> Any:
    return SimpleNamespace(of=lambda ids: [words[i] for i in ids] if words else None)


def test_a_context_begins_left_of_its_token_and_leaves_out_what_does_not_fit() -> None:
    words = ["x" * 30, " " + "y" * 20, "ab\n", "z" * 50, "\tq"]
    found = plot_sets._pieces(activation([0.0] * 5, 2), texts_of(*words), None)
    assert [(p.token, p.line, p.start, p.stop) for p in found] == [(1, 0, -21, 0), (2, 0, 0, 3), (3, 0, 3, 53)]
    assert [p.words for p in found] == [((-20, "y" * 20),), ((0, "ab↵"),), ((3, "z" * 50),)]
    found = plot_sets._pieces(activation([0.0] * 5, 2), texts_of(*words), frozenset(map(ord, "abz\n\tq")))
    drawn = [(p.token, p.start, p.words[0][1]) for p in found]
    assert drawn == [(0, -6, "⟨0⟩"), (1, -3, "⟨1⟩"), (2, 0, "ab↵"), (3, 3, "z" * 50)], "the font lacks x and y"
    (last,) = plot_sets._pieces(activation([0.0] * 5, 4), texts_of(*words), None)
    assert last == Piece(4, 0, 0, 2, ((0, "→q"),))
    mark = plot_sets._pieces(activation([0.0] * 3, 1), texts_of("a", "\u0301", "z"), None)
    assert [piece.words[0][1] for piece in mark] == ["a", "⟨1⟩", "z"] and mark[1].start == 0
    ids = plot_sets._pieces(activation([0.0] * 3, 1), texts_of(), None)
    assert [p.token for p in ids] == [0, 1, 2] and ids[1].start == 0 and ids[0].stop < 0 < ids[2].start
    edge = plot_sets._pieces(activation([0.0] * 3, 1), texts_of("x" * 46, "a", "z" * 53), None)
    assert [p.token for p in edge] == [0, 1, 2]
    edge = plot_sets._pieces(activation([0.0] * 3, 1), texts_of("x" * 47, "a", "z" * 54), None)
    assert [p.token for p in edge] == [1]


class Panel:
    """Fake panel that records boxes and texts."""

    def __init__(self) -> None:
        self.boxes: list[Any] = []
        self.words: list[tuple[Any, ...]] = []

    def add_patch(self, box: Any) -> None:
        self.boxes.append(box)

    def text(self, *given: Any, **look: Any) -> None:
        self.words.append((*given, look["color"], look["fontsize"], look["family"], look["parse_math"]))


@pytest.mark.parametrize(("low", "limits"), [(-1.0, (-4.0, 4.0)), (1.0, (1.0, 4.0))])
def test_tokens_around_a_neuron_have_the_colours_of_their_values(
    low: float, limits: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token itself has a frame. Values that are not finite have no colour and a cross, missing ones no cross."""
    crossed: list[Any] = []
    monkeypatch.setattr(plot_sets.canvas, "cross_out", lambda on, cells: crossed.extend((on, cell) for cell in cells))
    nan, inf = float("nan"), float("inf")
    found = [activation([low, 4.0, nan], 1), activation([inf, nan], 1)]
    pieces = [
        [Piece(t, 0, 2 * t, 2 * t + 2, ((2 * t + 0.5, f"w{t}"),)) for t in range(len(one.values))] for one in found
    ]
    panel: Any = Panel()
    scale = plot_sets._write_contexts(panel, found, pieces, ["font"])
    assert (scale.norm.vmin, scale.norm.vmax) == limits and scale.cmap.name == colour_map(low < 0).name
    cells = [box for box in panel.boxes if box.get_fill()]
    assert [box.get_bbox().bounds for box in cells] == [
        pytest.approx((2 * token, line + 0.08, 2, 0.84)) for line, token in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    ]
    wanted = [scale.to_rgba(low), scale.to_rgba(4.0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)]
    assert [box.get_facecolor() for box in cells] == [pytest.approx(tuple(colour)) for colour in wanted]
    assert all(box.get_linewidth() == 0 for box in cells)
    frames = [(box.get_bbox().bounds, box.get_linewidth()) for box in panel.boxes if not box.get_fill()]
    assert frames == [(pytest.approx((2, line + 0.04, 2, 0.92)), 1.2) for line in (0, 1)]
    assert crossed == [(panel, (0, 1.08, 2, 0.84)), (panel, (2, 1.08, 2, 0.84))]
    inks = [ink_on(np.array(colour)) for colour in wanted]
    places = [(0.5, 0.66, "w0"), (2.5, 0.66, "w1"), (4.5, 0.66, "w2"), (0.5, 1 + 0.66, "w0"), (2.5, 1 + 0.66, "w1")]
    assert panel.words == [(*place, ink, SIZE, ["font"], False) for place, ink in zip(places, inks, strict=True)]
    none = plot_sets._write_contexts(Panel(), [activation([nan], 0)], [[]], [])  # type: ignore[arg-type]
    assert (none.norm.vmin, none.norm.vmax) == (0.0, 1.0)


def test_files_of_a_zip_file_can_be_read_by_all_and_are_not_compressed(tmp_path: Path) -> None:
    held = {"zarr.json": [b"{}"], "b": [b"12", b"345"], "a": [b""]}
    files = SimpleNamespace(size=lambda name: sum(map(len, held[name])), blocks=lambda name: held[name])
    capture: Any = SimpleNamespace(attrs={"files": {"b": (5, 0), "a": (0, 0)}}, files=files, path="a.zarr")
    zip_module.write_zip(capture, tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        found = [(one.filename, one.external_attr, one.compress_type) for one in archive.infolist()]
        assert archive.read("b") == b"12345"
    assert found == [(name, 0o644 << 16, zipfile.ZIP_STORED) for name in ("zarr.json", "a", "b")]
