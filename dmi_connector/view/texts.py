# SPDX-License-Identifier: Apache-2.0
"""The text of tokens, where there is a tokenizer."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


class Texts:
    """The texts of single tokens. directory: of `tokenizer.json`; None: tokens have no text but their ids."""

    def __init__(self, directory: Path | None) -> None:
        self._core = None if directory is None else _load(directory)

    @classmethod
    def find(cls, chosen: Path | None, model: str | None) -> Texts:
        """With the tokenizer that was chosen, else that of the model directory that a store names, if it is there."""
        if chosen is None and model and importlib.util.find_spec("tokenizers") and (Path(model) / _FILE).is_file():
            chosen = Path(model)
        return cls(chosen)

    def of(self, ids: Iterable[int]) -> list[str] | None:
        """One text for each id, spaces included; None without a tokenizer.

        A token that is a part of a character has the replacement character.
        """
        if self._core is None:
            return None
        # Some decoders drop the space in front of the first token, so each is decoded behind another one.
        before, plain = self._anchor
        decoded = self._core.decode_batch([[*before, i] for i in ids], skip_special_tokens=False)
        return [text[len(plain) :] for text in decoded]

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ids of a text, and the text that they decode to."""
        assert self._core is not None
        ids = self._core.encode("a", add_special_tokens=False).ids[:1]
        return ids, self._core.decode(ids, skip_special_tokens=False)


@functools.lru_cache(maxsize=4)
def _load(directory: Path) -> Tokenizer:
    path = directory / _FILE
    if not path.is_file():
        raise ValueError(f"--tokenizer {directory} has no {_FILE}; give the directory of one, or leave it out")
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("view: tokenizers is not installed; install it, or leave --tokenizer out to see token ids")
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
