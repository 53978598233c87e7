# SPDX-License-Identifier: Apache-2.0
"""Parts of messages: shown values, suggestions for misspelt names, shortened lines, sizes, and the terminal's width."""

from __future__ import annotations

import difflib
import os
import reprlib
import shutil
from collections.abc import Iterable
from typing import TextIO

_repr = reprlib.Repr()  # it formats a huge value only up to these limits
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 20
_repr.maxstring = _repr.maxlong = _repr.maxother = 200
_LONGEST = 500
"""Maximum characters of a shown value."""


def show(value: object) -> str:
    """`repr(value)`, cut to _LONGEST characters, because clients can send values of any size."""
    try:
        text = _repr.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def suggest(word: str, known: Iterable[str]) -> str:
    """`": did you mean 'x'?"` with the name in `known` that is most like `word`; "" if none is like it.

    For a hook with its layer, such as q@3, this is the hook.
    """
    names, alone = list(known), word.partition("@")[0]
    near = [alone] if alone in names else difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else ""


def cut(text: str, most: int = 40) -> str:
    """A text as one line of at most `most` characters, for a column of a table."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def format_bytes(count: int | None) -> str:
    """`count` in B, kB, MB, GB or TB (powers of 1000), or "-"."""
    if count is None:
        return "-"
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def terminal_columns(file: TextIO) -> int:
    """Characters per line of the terminal behind a file. Without a terminal: as `shutil.get_terminal_size`."""
    try:
        columns = os.get_terminal_size(file.fileno()).columns
    except OSError:  # no terminal
        columns = 0
    return columns or shutil.get_terminal_size().columns
