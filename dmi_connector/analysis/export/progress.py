# SPDX-License-Identifier: Apache-2.0
"""Writes one file for each store, so that an interrupted export can continue.

A note in the output directory records stores and options. A second run continues an export only if it has the same
options, and gives each recorded store the same file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dmi_connector.analysis.export.numbering import number_captures, order_is_no_row
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite
from dmi_connector.store.format.remote_path import Place

Progress = Callable[[int, int], None]
PARTIAL = ".partial"
"""Suffix of a file that is being written."""
NOTE = ".dmi-export.json"
"""Name of the note: JSON file in the output directory with options, stores, and which stores are not finite."""


class LeftOut(ValueError):
    """Raised for one store that cannot be exported, so that the export continues without the store.

    The message is "{store} holds {what}; {fix}". what: such as "no token to train on". `Done.warnings` has the number
    of stores for each `what`. fix: what the user can do.
    """

    def __init__(self, store: Place, what: str, fix: str) -> None:
        super().__init__(f"{store} holds {what}; {fix}")
        self.what = what


def refuse_later_part(capture: Capture) -> None:
    """Raise LeftOut for a store without the first tokens of its request.

    A trainer would take the first row of such a store for the row of token 0.
    """
    if capture.attrs.get("start", 0):
        fix = "capture all tokens (dmi.tokens from 0 on)"
        raise LeftOut(capture.path, "no rows of the first tokens of its request", fix)


@dataclass(frozen=True)
class Done:
    """The result of an export.

    out: the directory or file. written: number of files that the export wrote. kept: number of files that existed
    before. notes: lines that `dmi export` prints instead of these two numbers. warnings: lines for the user.
    not_finite: {store: index of its first row with a NaN or an infinity}.
    """

    out: Path
    written: int
    kept: int = 0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    not_finite: Mapping[str, int] = field(default_factory=dict)


def export_each(
    captures: Captures,
    out: Path,
    path_of: Callable[[int], Path],
    write: Callable[[Capture, Path], None],
    progress: Progress,
    settings: Mapping[str, Any],
    finite: FiniteCheck,
    number_by: str = "order",
) -> Done:
    """Write one file per store, with one store open at a time. Existing files are kept.

    path_of: returns the path of a store's file, relative to `out`, from the store's number. write: writes one store to
    a path. If it raises LeftOut, or NotFinite with `finite.policy` "skip", the store is left out and counted. progress:
    called with (number of stores done, number of all stores). settings: the options on which the files depend. finite:
    the check that `write` uses. number_by: see `number_captures`.

    Raises ValueError if the output directory was written with other settings, if a store in it would change its number,
    or if a file exists that no export wrote. Raises ValueError as `number_captures` does, and if all stores are left
    out. Raises NotFinite with policy "fail", and if the last of all stores that were left out is not finite.
    """
    numbers = number_captures(captures, number_by)
    done = _export(captures, numbers, out, path_of, write, progress, {**settings, "number_by": number_by}, finite)
    warning = order_is_no_row(captures) if number_by == "order" else None
    return done if warning is None else replace(done, warnings=(*done.warnings, warning))


def export_by_name(
    captures: Captures,
    out: Path,
    suffix: str,
    write: Callable[[Capture, Path], None],
    progress: Progress,
    settings: Mapping[str, Any],
    finite: FiniteCheck,
) -> Done:
    """Like `export_each`, but files are named like the stores. Raises ValueError if two stores have the same name."""
    names = [f"{info.store.stem}{suffix}" for info in captures.infos]
    if len(set(names)) < len(names):
        raise ValueError("export: several stores have the same name; export their directories one by one")
    return _export(captures, names, out, Path, write, progress, {**settings, "number_by": "name"}, finite)


def _export(
    captures: Captures,
    numbers: Sequence[int] | Sequence[str],
    out: Path,
    path_of: Callable[[Any], Path],
    write: Callable[[Capture, Path], None],
    progress: Progress,
    settings: Mapping[str, Any],
    finite: FiniteCheck,
) -> Done:
    """Export capture i to the file `path_of(numbers[i])`. numbers: different numbers or names, one per capture."""
    make_directory(out)
    settings = {**settings, **finite.settings}
    noted = check_note(out, settings) or {"stores": {}}
    own = dict(zip(_names(captures), numbers, strict=True))
    stores = _with_noted(out, noted["stores"], own)
    _refuse_foreign(out / path_of(number) for name, number in own.items() if name not in noted["stores"])
    finite.recall(_not_finite_of(noted, captures))
    written, left = 0, Counter[str]()
    last: LeftOut | NotFinite | None = None
    for done, number in enumerate(numbers):
        path = out / path_of(number)
        if not path.exists():
            try:
                with captures[done] as capture, whole(path) as partial:
                    before = len(finite.first)
                    write(capture, partial)
                    # The note is written before the first file is renamed. If no file is written, no note is written.
                    if not written or len(finite.first) > before:
                        now = check_note(out, settings) or noted  # another run may have written it meanwhile
                        write_note(out, settings, {**now["stores"], **stores}, finite)
                written += 1
            except NotFinite as one:
                if finite.policy == "fail":
                    raise
                left[WHAT] += 1
                last = one
            except LeftOut as one:
                left[one.what] += 1
                last = one
        progress(done + 1, len(numbers))
    if last is not None and left.total() == len(numbers):
        error = NotFinite if isinstance(last, NotFinite) else ValueError
        raise error(f"export: no store is left: {last}")
    warnings = tuple(f"{count} left out: {what}" for what, count in left.items())
    if finite.policy == "keep" and finite.first:
        warnings += (f"{len(finite.first)} kept: {WHAT}",)
    return Done(out, written, len(numbers) - written - left.total(), warnings=warnings)


def make_directory(path: Path) -> None:
    """Create a directory, if it does not exist.

    Raises OSError if it cannot be created or is not writable. Raises ValueError if it is inside a store, because `dmi
    verify` would report its files as damage.
    """
    if store := next((folder for folder in (path, *path.parents) if (folder / "zarr.json").exists()), None):
        raise ValueError(f"export: {store} is a store, and an export must not add files to it; give another -o")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"export: {path} cannot be created ({error.strerror}); give another -o") from error
    if not os.access(path, os.W_OK):
        raise PermissionError(f"export: {path} is not writable by this user; change its mode or give another -o")


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if `path` exists."""
    if os.path.lexists(path):
        raise FileExistsError(f"export: {path} exists; give a new name")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path. It is renamed to `path` at the end of the `with` block, or removed after an exception."""
    partial = path.with_name(path.name + PARTIAL)
    make_directory(partial.parent)
    try:
        yield partial
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)


def check_note(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the note of an output directory; None if there is no note. Raises ValueError if it has other settings."""
    path = out / NOTE
    if not path.exists():
        return None
    noted: dict[str, Any] = json.loads(path.read_bytes())
    if noted["settings"] != json.loads(json.dumps(dict(settings))):
        raise ValueError(
            f"export: {out} was written with {noted['settings']}, not {dict(settings)}; give another directory"
        )
    return noted


def write_note(out: Path, settings: Mapping[str, Any], stores: Any, finite: FiniteCheck) -> None:
    """Write the note of an output directory: settings, stores, and which of the stores are not finite."""
    noted = {"settings": dict(settings), "stores": stores, "not_finite": finite.first}
    with whole(out / NOTE) as partial:
        partial.write_bytes(json.dumps(noted, indent=1).encode() + b"\n")


def note_not_finite(out: Path, finite: FiniteCheck) -> None:
    """Replace the list of stores that are not finite in an existing note."""
    noted = json.loads((out / NOTE).read_bytes())
    write_note(out, noted["settings"], noted["stores"], finite)


def fix_stores(out: Path, settings: Mapping[str, Any], captures: Captures, finite: FiniteCheck, files: str) -> None:
    """Record the stores of an export whose files form one data set. A later run must export the same stores.

    `finite` gets the results of earlier runs. files: glob pattern of the files of the export. Raises ValueError for a
    directory that was written with other settings or from other stores, and for one with such files but no note.
    """
    make_directory(out)
    settings = {**settings, **finite.settings}
    noted, names = check_note(out, settings), _names(captures)
    if noted is not None and noted["stores"] != names:
        raise ValueError(f"export: {out} was written from other stores; give another directory")
    if noted is None:
        _refuse_foreign(out.glob(files))
    finite.recall(_not_finite_of(noted or {}, captures))
    write_note(out, settings, names, finite)


def _refuse_foreign(paths: Iterable[Path]) -> None:
    """Raise ValueError if one of the paths exists. paths: files that the note does not list."""
    if (path := next((path for path in paths if path.exists()), None)) is not None:
        raise ValueError(f"export: {path} exists, but no export recorded in {NOTE} wrote it; give another directory")


def _not_finite_of(noted: Mapping[str, Any], captures: Captures) -> dict[str, int]:
    """{store: index of its first row that is not finite} of these captures, from a note."""
    names = set(_names(captures))
    return {name: row for name, row in noted.get("not_finite", {}).items() if name in names}


def _with_noted(out: Path, noted: Mapping[str, Any], stores: dict[str, Any]) -> dict[str, Any]:
    """{store: number or name of its file} of this run and of earlier runs. Raises ValueError if a file would change.

    noted: the entries of the note. stores: those of this run.
    """
    owners = {number: name for name, number in stores.items()}
    for name, number in noted.items():
        owner = owners.get(number, name)
        if isinstance(number, str) and owner != name:
            raise ValueError(
                f"export: {out} holds {name} as {number}, and {owner} has the same name; give another directory"
            )
        if stores.get(name, number) != number or owner != name:
            raise ValueError(
                f"export: {out} holds {name} as number {number}, and its number would change; give another directory"
            )
    return {**noted, **stores}


def _names(captures: Captures) -> list[str]:
    return [str(info.store.absolute()) for info in captures.infos]


def row_blocks(rows: int, size: int = 256) -> Iterator[slice]:
    """Yield slices of at most `size` rows, so that memory does not grow with the length of the request."""
    for first in range(0, rows, size):
        yield slice(first, min(rows, first + size))
