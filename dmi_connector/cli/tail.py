# SPDX-License-Identifier: Apache-2.0
"""`dmi tail`: prints a line for each capture when it finishes, or for each row of one capture when it is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.tables import captures_json, format_bytes
from dmi_connector.layout import ALL_TOKEN_ARRAYS, TOKEN_ARRAYS
from dmi_connector.store.format.remote_path import local_path
from dmi_connector.store.read.index import CaptureInfo, IndexTail, find_captures
from dmi_connector.wording import cut

_PAUSE_S = 0.5
"""Seconds between two reads of the index, and between two searches for a key."""
_COLUMNS = "{:<19}  {:>7}  {:>9}  {:<10}  {:<16}  {}"
"""Format of a line. Widths are fixed, because later lines are not known yet. The last column has no fixed width."""


def follow(
    directory: Path,
    last: int = 10,
    key: str | None = None,
    once: bool = False,
    as_json: bool = False,
    wait: Callable[[], None] = lambda: time.sleep(_PAUSE_S),
) -> Iterator[str]:
    """Yield lines of text or JSON: the `last` finished captures, then each capture that finishes.

    key: only captures with this key. once: end after these `last` captures. as_json: yield JSON objects, without a
    header line. wait: called before each later read of the index.
    """
    tail = IndexTail(directory)

    def new() -> list[CaptureInfo]:
        return [info for info in tail.read() if key in (None, info.key)]

    if not as_json:
        yield _COLUMNS.format("finished (UTC)", "tokens", "bytes", "state", "key", "store")
    found = new()
    yield from _lines(found[max(0, len(found) - last) :], as_json)
    while not once:
        wait()
        yield from _lines(new(), as_json)


class RowTail:
    """Yields lines of text or JSON for the rows of the newest capture with a key, when the rows are written.

    hooks: names of hooks whose norms are printed, as in `Capture[...]`. once: raise ValueError if no capture has the
    key, instead of waiting for one. A capture that is still running is followed to its end in any case. complete:
    whether the capture has all its rows; false until the last line.

    Raises ValueError for a name in `hooks` that is an array with one value per token, not a hook.
    """

    def __init__(
        self, directory: Path, key: str, hooks: Sequence[str] = (), once: bool = False, as_json: bool = False
    ) -> None:
        for name in hooks:
            if name in ALL_TOKEN_ARRAYS:
                raise ValueError(f"--hook {name}: it has one value per token, which has no norm; name a hook")
        self._directory, self._key, self._hooks, self._json = directory, key, list(hooks), as_json
        self._once, self.complete = once, False

    def __iter__(self) -> Iterator[str]:
        with open_capture(self._store(), follow=True) as capture:
            names = [*TOKEN_ARRAYS, *self._hooks]
            if not self._json:
                yield self._columns().format("row", "position", "phase", "token id", *self._hooks)
            for first, rows in capture.follow(names):
                norms = [_norms(rows[name]) for name in self._hooks]
                for i in range(len(rows["token_ids"])):
                    yield self._line(first + i, {name: rows[name][i] for name in TOKEN_ARRAYS}, [n[i] for n in norms])
            self.complete = bool(capture.complete)
            state, count = "complete" if capture.complete else "incomplete", int(capture.attrs["num_tokens"])
            end = {"store": str(capture.path), "state": state, "reason": capture.reason, "num_tokens": count}
            why = "" if capture.complete else f" ({capture.reason})"
            yield json.dumps(end) if self._json else f"{capture.path.name}: {state}, {count} rows{why}"

    def _store(self) -> Path:
        while True:
            stores = [info.store for info in find_captures(self._directory, self._key)]
            if stores:
                return local_path(str(stores[-1]))
            if self._once:
                raise ValueError(f"--rows {self._key}: no capture in {self._directory} has this key; dmi ls lists them")
            time.sleep(_PAUSE_S)

    def _columns(self) -> str:
        return "  ".join(["{:>7}", "{:>8}", "{:<9}", "{:>8}", *(f"{{:>{max(10, len(hook))}}}" for hook in self._hooks)])

    def _line(self, row: int, token: Mapping[str, Any], norms: Sequence[float]) -> str:
        position, phase, token_id = int(token["positions"]), int(token["phase"]), int(token["token_ids"])
        if self._json:
            known = {"row": row, "position": position, "phase": phase, "token_id": token_id}
            finite = [float(norm) if np.isfinite(norm) else None for norm in norms]
            return json.dumps(known | {"norms": dict(zip(self._hooks, finite, strict=True))})
        named = "generated" if phase else "prompt"
        return self._columns().format(row, position, named, token_id, *(f"{norm:.4g}" for norm in norms))


def _norms(rows: np.ndarray) -> np.ndarray:
    """Euclidean norms of rows, float64 [n]. rows: [n, width], or [layers, n, width] for a norm over all layers."""
    flat = rows if rows.ndim == 2 else np.moveaxis(rows, 0, 1).reshape(rows.shape[1], -1)
    return np.linalg.norm(flat.astype(np.float64), axis=-1)  # in float32, squares of large values overflow


def _lines(found: list[CaptureInfo], as_json: bool) -> Iterator[str]:
    if as_json:
        yield from map(json.dumps, captures_json(found))
        return
    for info in found:
        finished = (info.finished or "-").replace("T", " ").split(".")[0].removesuffix("+00:00")
        tokens = "-" if info.num_tokens is None else info.num_tokens
        store = info.store.name if info.reason is None else f"{info.store.name}  ({info.reason})"
        yield _COLUMNS.format(finished, tokens, format_bytes(info.bytes), info.state, cut(info.key or "-"), store)
