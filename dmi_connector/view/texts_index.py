# SPDX-License-Identifier: Apache-2.0
"""Decodes the texts of captures, for the list and its search."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dmi_connector.analysis.texts import Texts
from dmi_connector.captures.token_fields import store_fields
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.view.running import RUNNING

_TOKENS = 2048
"""Number of tokens of a capture whose text is searched."""
_SHOWN = 96
"""Number of characters of the prompt in the list."""
_SECONDS = 0.4
"""Time limit for reading texts in one search. The next search continues."""


class TextIndex:
    """Texts of stores, each read once. texts_of: function from the name of a model to its tokenizer."""

    def __init__(self, texts_of: Callable[[str | None], Texts]) -> None:
        self._texts_of = texts_of
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[str, str]] = {}

    def prompt(self, info: CaptureInfo) -> str:
        """The beginning of the prompt on one line; "" if there is no tokenizer, or the store cannot be read."""
        return self._read(info)[0]

    def search(self, infos: Iterable[tuple[CaptureInfo, str]], words: list[str]) -> tuple[list[CaptureInfo], int]:
        """Find captures by words. Returns (matching captures, number of captures whose text was not read yet).

        infos: captures, each with its other searchable facts in lower case. A capture matches if each word occurs in
        these facts or in its text. The next search continues with the texts that were not read.
        """
        until, found, left = time.monotonic() + _SECONDS, [], 0
        for info, known in infos:
            lacking = [word for word in words if word not in known]
            if lacking and _key(info) not in self._known and time.monotonic() >= until:
                left += 1
                continue
            if not lacking or all(word in self._read(info)[1] for word in lacking):
                found.append(info)
        return found, left

    def _read(self, info: CaptureInfo) -> tuple[str, str]:
        """(beginning of the prompt for the list, text for searches)."""
        if info.state == RUNNING:  # the file of token ids is written at the end
            return "", ""
        key = _key(info)
        if key not in self._known:
            read = self._decode(info)
            with self._lock:
                self._known[key] = read
        return self._known[key]

    def _decode(self, info: CaptureInfo) -> tuple[str, str]:
        try:
            ids = store_fields(info.store, ["token_ids"], complete=True)["token_ids"][:_TOKENS].tolist()
            texts = self._texts_of(info.model)
        except (OSError, ValueError):
            return "", ""
        whole = texts.whole(ids)
        prompt = texts.whole(ids[: info.prompt_len if info.prompt_len else len(ids)][:_SHOWN])
        return " ".join((prompt or "").split())[:_SHOWN], (whole or "").lower()


def _key(info: CaptureInfo) -> tuple[str, str]:
    """(name, start time) of a store: a new store may get the name of an old one."""
    return (info.store.name if isinstance(info.store, Path) else str(info.store)), info.started
