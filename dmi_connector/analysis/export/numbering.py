# SPDX-License-Identifier: Apache-2.0
"""Numbers the exported files, so that trainers can match each file with a row of their data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmi_connector.captures.captures import Captures
from dmi_connector.captures.tables import run_entries as entries_beside
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.store.read.run_manifest import MANIFESTS

NUMBERINGS = ("order", "key", "row", "id")
"""Values of --number-by."""
_LARGEST_DIGITS = 18


def number_captures(captures: Captures, number_by: str) -> list[int]:
    """The number of each capture.

    number_by: "order" numbers captures from 0 in the order in which their requests began. "key" takes the key of the
    request as the number. "row" takes the row of the input of `dmi run`, from the manifest of the run. "id" takes the
    id of that row.

    Raises ValueError if a key or id is not an integer, if the manifest lacks a store, or if two captures have the same
    number.
    """
    infos = captures.infos
    if number_by == "order":
        return list(range(len(infos)))
    if number_by == "key":
        numbers = [_key_number(info, captures) for info in infos]
    else:
        entries = run_entries(captures)
        numbers = [_run_number(info, entries, number_by) for info in infos]
    _refuse_twice(infos, numbers, number_by)
    return numbers


def run_entries(captures: Captures) -> dict[str, dict[str, Any]]:
    """Lines of the manifests of `dmi run` beside the stores: {name of a store without its suffix: its latest line}."""
    return entries_beside(captures.infos, captures.directories)


def order_is_no_row(captures: Captures) -> str | None:
    """A warning if the numbers of "order" are not the rows of the input of `dmi run`, else None."""
    entries = run_entries(captures)
    if not entries or not any(info.store.stem in entries for info in captures.infos):
        return None
    for number, info in enumerate(captures.infos):
        entry = entries.get(info.store.stem)
        if entry is None or entry.get("row") != number:
            row = "a row that the manifest lacks" if entry is None else f"row {entry.get('row')}"
            return f"file N is not of row N of the input of dmi run: file {number} is of {row}; use --number-by row"
    return None


def _key_number(info: CaptureInfo, captures: Captures) -> int:
    if info.key is not None and _is_whole(info.key):
        return int(info.key)
    if info.store.stem in run_entries(captures):
        raise ValueError(f"export: the key {info.key!r} of {info.store} is from dmi run; use --number-by row")
    raise ValueError(f"export: the key {info.key!r} of {info.store} is not an integer; use --number-by order")


def _run_number(info: CaptureInfo, entries: dict[str, dict[str, Any]], number_by: str) -> int:
    if not entries:
        raise ValueError(
            f"export: --number-by {number_by}: no {MANIFESTS} of dmi run is beside {info.store}; export the"
            " output directory of dmi run, or use --number-by key"
        )
    entry = entries.get(info.store.stem)
    if entry is None:
        raise ValueError(
            f"export: --number-by {number_by}: no line of {MANIFESTS} names {info.store}; repeat the dmi run, which"
            " adds the line"
        )
    value = entry.get(number_by)
    if number_by == "id" and isinstance(value, str) and _is_whole(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        fix = "use --number-by row" if number_by == "id" else "correct the manifest, or leave the store out"
        raise ValueError(f"export: the {number_by} {value!r} of {info.store} is not an integer of at least 0; {fix}")
    return value


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LARGEST_DIGITS


def _refuse_twice(infos: Sequence[CaptureInfo], numbers: Sequence[int], number_by: str) -> None:
    owners: dict[int, CaptureInfo] = {}
    for info, number in zip(infos, numbers, strict=True):
        other = owners.setdefault(number, info)
        if other is not info:
            raise ValueError(
                f"export: {other.store} and {info.store} have the {number_by} {number}; export them into two"
                " directories"
            )
