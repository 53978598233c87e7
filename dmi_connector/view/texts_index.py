# SPDX-License-Identifier: Apache-2.0
"""Decodes the token ids of captures to text, for the list of captures and its search."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dmi_connector.analysis.texts import Texts
from dmi_connector.captures.row_choice import PHASES
from dmi_connector.captures.token_fields import store_fields
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.view.running import RUNNING

_TOKENS = 2048
"""Maximum number of tokens, from the start of a capture, whose text is searched."""
_SHOWN = 96
"""Maximum number of characters of the prompt in the list, and of tokens that are decoded for them."""
_SECONDS = 0.4
"""Seconds after which a search reads no more texts. The next search reads the others."""
_AGAIN_S = 30.0
"""Seconds after which a store that could not be read is read again."""


class TextIndex:
    """Texts of finished stores, which are kept after the first read. texts_of: name of a model -> its `Texts`."""

    def __init__(self, texts_of: Callable[[str | None], Texts]) -> None:
        self._texts_of = texts_of
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[str, str, float]] = {}  # see `_read`

    def prompt(self, info: CaptureInfo) -> str:
        """The beginning of the captured part of the prompt, on one line.

        "" for a running request, without a tokenizer, and for a store that cannot be read. After an OSError the store
        is read again later.
        """
        return self._read(info)[0]

    def search(self, infos: Iterable[tuple[CaptureInfo, str]], words: list[str]) -> tuple[list[CaptureInfo], int]:
        """Find captures by words. Returns (matching captures, number of captures whose text must still be read).

        infos: (capture, its other searchable text in lower case). words: in lower case. A capture matches if each word
        occurs in its other text or in its decoded text. The next search reads texts that this search did not read.
        """
        until, found, left = time.monotonic() + _SECONDS, [], 0
        for info, known in infos:
            lacking = [word for word in words if word not in known]
            if lacking and not self._is_known(_key(info)) and time.monotonic() >= until:
                left += 1
                continue
            if not lacking or all(word in self._read(info)[1] for word in lacking):
                found.append(info)
        return found, left

    def _read(self, info: CaptureInfo) -> tuple[str, str, float]:
        """(beginning of the prompt for the list, text for searches, the `time.time` from which it is read again)."""
        if info.state == RUNNING:  # the array `token_ids` is written at the end
            return "", "", 0.0
        key = _key(info)
        if not self._is_known(key):
            try:
                read = *self._decode(info), math.inf
            except OSError:
                read = "", "", time.time() + _AGAIN_S
            with self._lock:
                self._known[key] = read
        return self._known[key]

    def _is_known(self, key: tuple[str, str]) -> bool:
        return key in self._known and time.time() < self._known[key][2]

    def _decode(self, info: CaptureInfo) -> tuple[str, str]:
        """(beginning of the prompt, text for searches). Raises OSError if the store cannot be read."""
        try:
            fields = store_fields(info.store, ["token_ids", "phase"], complete=True)
            ids = fields["token_ids"][:_TOKENS].tolist()
            # The store has fewer prompt tokens than `prompt_len` if the capture begins after position 0.
            of_prompt = int((fields["phase"] == PHASES["prompt"]).sum())
            texts = self._texts_of(info.model)
        except ValueError:
            return "", ""
        whole = texts.whole(ids)
        prompt = texts.whole(ids[:of_prompt][:_SHOWN])
        return " ".join((prompt or "").split())[:_SHOWN], (whole or "").lower()


def _key(info: CaptureInfo) -> tuple[str, str]:
    """(name or URL, start time) of a store. A new store may get the name of an old one, but not its start time."""
    return (info.store.name if isinstance(info.store, Path) else str(info.store)), info.started
