# SPDX-License-Identifier: Apache-2.0
"""Decodes tokens to text, if there is a tokenizer."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dmi_connector.store.format.remote_path import local_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PathLike = str | os.PathLike[str]
_FILE = "tokenizer.json"
_CONTROL = re.compile(r"[\u0000-\u0008\u000b-\u001f\u007f]")
"""All ASCII control characters except tab and line feed."""


class Texts:
    """Decodes tokens with the tokenizer that `find_tokenizer` returns. Without one, methods return None."""

    def __init__(self, chosen: PathLike | None, model: PathLike | None = None) -> None:
        self._core = find_tokenizer(chosen, model)

    def of(self, ids: Iterable[int]) -> list[str] | None:
        """The text of each token id, with its spaces; None if there is no tokenizer.

        A token that holds only some bytes of a character decodes to U+FFFD, the replacement character. A negative id,
        which no tokenizer has, decodes to "".
        """
        if self._core is None:
            return None
        # Some decoders drop the space before the first token, so each token is decoded after another one.
        before, plain = self._anchor
        one_each = [[*before, i] if i >= 0 else before for i in ids]
        decoded = self._core.decode_batch(one_each, skip_special_tokens=False)
        return [text[len(plain) :] for text in decoded]

    def whole(self, ids: Sequence[int]) -> str | None:
        """The text of all of these tokens together, without negative ids; None if there is no tokenizer."""
        known = [i for i in ids if i >= 0]
        return None if self._core is None else str(self._core.decode(known, skip_special_tokens=False))

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Token ids to put before each token, and the text that they decode to."""
        assert self._core is not None
        ids = self._core.encode("a", add_special_tokens=False).ids[:1]
        return ids, self._core.decode(ids, skip_special_tokens=False)


def find_tokenizer(chosen: PathLike | None, model: PathLike | None = None) -> Tokenizer | None:
    """Load the tokenizer from the directory `chosen`, or if that is None from `model`.

    Returns None if `model` has no tokenizer, or if the package tokenizers is missing.

    Raises ValueError if `chosen` has no `tokenizer.json`, or is given without the package tokenizers, and for a file
    that cannot be read.
    """
    installed = importlib.util.find_spec("tokenizers") is not None
    if chosen is None:
        if not model or not installed or not (local_path(model) / _FILE).is_file():
            return None
        return _load(local_path(model))
    if not (local_path(chosen) / _FILE).is_file():
        raise ValueError(
            f"tokenizer: {os.fspath(chosen)} has no {_FILE}; give a directory that has one, or leave the option out"
        )
    if not installed:
        raise ValueError(
            "tokenizer: the package tokenizers is not installed; install it, or leave the option out to see token ids"
        )
    return _load(local_path(chosen))


@functools.lru_cache(maxsize=4)
def _load(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = directory / _FILE
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no narrower type
        raise ValueError(f"tokenizer: {file} cannot be read ({error}); give the directory of another one") from error


def shown(text: str | None, token: int) -> tuple[str, bool]:
    """(how to display a token, whether it is displayed as an id in brackets). `dmi view` has the same rule.

    text: text of the token; None without a tokenizer. Text is displayed as it is. A token whose text cannot be printed
    is displayed as its id in brackets, and a token without text as its id.
    """
    if text is None:
        return str(token), False
    if not text or "\N{REPLACEMENT CHARACTER}" in text or _CONTROL.search(text):
        return f"⟨{token}⟩", True
    return text, False
