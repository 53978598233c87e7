# SPDX-License-Identifier: Apache-2.0
"""Makes tables of captures and of their tokens, in pandas or polars."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.captures.capture import open_capture
from dmi_connector.captures.filters import parse_time, whole
from dmi_connector.captures.token_fields import rows_present
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.store.read.run_manifest import MANIFESTS, read_manifest

Decode = Callable[[list[int]], str]
_COUNTS = ("bytes", "num_tokens", "prompt_len", "draft_tokens_scheduled", "draft_tokens_accepted", "row")
"""Columns of integers or nulls."""
_OF_RUN = ("row", "id", "finish_reason")
"""Columns from the manifests of `dmi run`."""
_TIMES = ("started", "finished")
_FLAGS = ("remove_local", "only_complete")


def run_entries(infos: Iterable[CaptureInfo], directories: Iterable[Path] = ()) -> dict[str, dict[str, Any]]:
    """Lines of the manifests of `dmi run` next to stores: {name of a store without suffix: its latest line}."""
    beside = {info.store.parent for info in infos if isinstance(info.store, Path)}
    found: dict[str, dict[str, Any]] = {}
    for directory in sorted(beside.union(directories)):
        for path in sorted(directory.glob(MANIFESTS)):
            for entry in read_manifest(path):
                if isinstance(entry.get("store"), str):
                    found[entry["store"].removesuffix(".zarr")] = entry
    return found


def of_captures(infos: Sequence[CaptureInfo], directories: Iterable[Path], to: str, text: Decode | None) -> Any:
    """See `Captures.table`."""
    library = _library(to)
    rows = [{**vars(whole(info)), "store": str(info.store)} for info in infos]
    names = [name for name in CaptureInfo.__dataclass_fields__ if name != "scores"]  # see `Captures.scores`
    columns = {name: [row[name] for row in rows] for name in names}
    columns |= {name: list(map(_time, columns[name])) for name in _TIMES}
    columns["name"] = [info.store.name for info in infos]
    entries = run_entries(infos, directories)
    of_run = [entries.get(info.store.stem, {}) for info in infos]
    if entries:
        columns |= {name: [entry.get(name) for entry in of_run] for name in _OF_RUN}
        columns["id"] = [None if value is None else str(value) for value in columns["id"]]
    if text is not None:
        columns["prompt"] = [_prompt(info, text) for info in infos]
    counts = [name for name in _COUNTS if name in columns]
    if to == "pandas":
        frame = library.DataFrame(columns).astype(dict.fromkeys(counts, "Int64"))
        return frame.assign(**{n: library.to_datetime(frame[n], utc=True, format="ISO8601") for n in _TIMES})
    kinds = dict.fromkeys(counts, library.Int64) | dict.fromkeys(_FLAGS, library.Boolean)
    made = library.DataFrame(columns, schema={name: kinds.get(name, library.String) for name in columns})
    return made.with_columns(library.col(*_TIMES).str.to_datetime(time_zone="UTC", time_unit="us"))


def _time(text: str | None) -> str | None:
    """A time of the index in a common format, because polars infers the format from the first time. None if invalid."""
    try:
        at = parse_time("started", text or None)
    except ValueError:
        return None
    return None if at is None else at.astimezone(datetime.UTC).isoformat(timespec="microseconds")


def _prompt(info: CaptureInfo, text: Decode) -> str | None:
    """The text of the prompt; None if one of its rows is missing or was not captured."""
    with open_capture(info.store, timeout=0, allow_incomplete=True) as capture:
        of_prompt = capture.phase == 0
        whole_prompt = not capture.attrs.get("start", 0) and int(of_prompt.sum()) == capture.prompt_len
        if not whole_prompt or not rows_present(capture.attrs)[of_prompt].all():
            return None
        return text(capture.token_ids[of_prompt].tolist())


def of_tokens(infos: Sequence[CaptureInfo], to: str, text: Decode | None) -> Any:
    """See `Captures.token_table`."""
    library = _library(to)
    names = ("row", "position", "token_id", "phase")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    stores: list[str] = []
    keys: list[str | None] = []
    for info in infos:
        with open_capture(info.store, timeout=0, allow_incomplete=True) as capture:
            there = np.flatnonzero(rows_present(capture.attrs))
            values = (there, capture.positions[there], capture.token_ids[there], capture.phase[there])
        for name, part in zip(names, values, strict=True):
            parts[name].append(part)
        stores += [info.store.name] * len(there)
        keys += [info.key] * len(there)
    joined = {name: np.concatenate(part) if part else np.empty(0, np.int64) for name, part in parts.items()}
    columns: dict[str, Any] = {"store": stores, "key": keys, **joined}
    if text is not None:
        decode = functools.cache(lambda token: text([token]))
        columns["text"] = [decode(token) for token in joined["token_id"].tolist()]
    if to == "pandas":
        return library.DataFrame(columns)
    of_text = {name: library.String for name in ("store", "key", "text") if name in columns}
    return library.DataFrame(columns, schema_overrides=of_text)


def _library(to: str) -> Any:
    """Import the library `to`. Raises ImportError if it is not installed, ValueError for another name."""
    try:
        if to == "pandas":
            import pandas

            return pandas
        if to == "polars":
            import polars

            return polars
    except ImportError as error:
        raise ImportError(f"table: {to} is not installed; install dmi_connector[{to}]") from error
    raise ValueError(f"table: {to!r} is not valid; use 'pandas' or 'polars'")
