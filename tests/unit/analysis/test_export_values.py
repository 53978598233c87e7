# SPDX-License-Identifier: Apache-2.0
"""What exports note, keep and leave out, and how ids are laid out, each compared with what is worked out here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmi_connector.analysis.export import progress as progress_module
from dmi_connector.analysis.export import zip as zip_module
from dmi_connector.analysis.export.progress import NOTE, Done, LeftOut, _export, check_note, make_directory, whole
from dmi_connector.analysis.pictures.text_layout import Piece, lay_out_ids
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite


class Stores:
    """Captures of these names, which note when they are open."""

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
    """bad: what is wrong with a store, "nan" for values that are not finite."""
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
    out, stores = tmp_path / "deep/out", Stores("a", "b", "c", "d", "e")
    bad = {"b": "no token", "c": "nan", "e": "no token"}
    done, told = export(stores, out, FiniteCheck("skip"), bad)
    assert done == Done(out, 2, 0, warnings=("2 left out: no token", f"1 left out: {WHAT}"))
    assert told == [(n, 5) for n in (1, 2, 3, 4, 5)] and stores.opened == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in out.iterdir()) == [NOTE, "0.x", "3.x"]
    assert json.loads((out / NOTE).read_text())["settings"] == {"a": 1}
    (out / "3.x").unlink()
    done, told = export(stores, out, FiniteCheck("skip"), bad)
    assert done == Done(out, 1, 1, warnings=("2 left out: no token", f"1 left out: {WHAT}"))
    assert stores.opened[5:] == [1, 2, 3, 4] and len(told) == 5


def test_stores_that_are_kept_are_noted_and_told(tmp_path: Path) -> None:
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


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
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


def test_no_export_goes_into_a_store_or_under_a_file(tmp_path: Path) -> None:
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


def test_ids_have_a_margin_and_a_gap_and_begin_a_line_where_they_do_not_fit() -> None:
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
