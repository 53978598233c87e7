# SPDX-License-Identifier: Apache-2.0
"""`dmi tail`: a line for each capture that finishes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dmi_connector.cli.tables import captures_json, format_bytes
from dmi_connector.store.read.index import CaptureInfo, IndexTail
from dmi_connector.wording import cut

_PAUSE_S = 0.5
"""Seconds between two looks at the index."""
_COLUMNS = "{:<19}  {:>7}  {:>9}  {:<10}  {:<16}  {}"
"""Of a table whose later lines are not known: the widths are fixed, and the longest texts stand last."""


def follow(
    directory: Path,
    last: int = 10,
    key: str | None = None,
    once: bool = False,
    as_json: bool = False,
    wait: Callable[[], None] = lambda: time.sleep(_PAUSE_S),
) -> Iterator[str]:
    """Lines of text or JSON: first the `last` captures that have finished, then each that finishes.

    key: only those with this key. once: end after the first. wait: called before each later look at the index.
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


def _lines(found: list[CaptureInfo], as_json: bool) -> Iterator[str]:
    if as_json:
        yield from map(json.dumps, captures_json(found))
        return
    for info in found:
        finished = (info.finished or "-").replace("T", " ").split(".")[0].removesuffix("+00:00")
        tokens = "-" if info.num_tokens is None else info.num_tokens
        store = info.store.name if info.reason is None else f"{info.store.name}  ({info.reason})"
        yield _COLUMNS.format(finished, tokens, format_bytes(info.bytes), info.state, cut(info.key or "-"), store)
