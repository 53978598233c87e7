# SPDX-License-Identifier: Apache-2.0
"""Breaks tokens into lines of a fixed width, as a browser does. The unit is a column, which is as wide as a letter."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_TAB = 8
"""Columns of a tab stop."""
_ID_PAD, _ID_GAP = 0.5, 0.5
"""Padding on each side of an id, and gap between two ids, in columns."""


@dataclass(frozen=True)
class Piece:
    """A part of one token on one line.

    token: index of the token. start, stop: columns that it covers. words: (first column, text) without spaces.
    """

    token: int
    line: int
    start: float
    stop: float
    words: tuple[tuple[float, str], ...]


class _Sign(NamedTuple):
    """One printed character, with the marks above and below it. width: 1 or 2 columns."""

    text: str
    token: int
    width: int


class _Placed(NamedTuple):
    sign: _Sign
    line: int
    start: int
    stop: int


def lay_out(texts: Sequence[str], columns: int) -> list[Piece]:
    """The pieces of tokens, in order. Every token with a printed character has one or more.

    Lines break between words if possible, and at each line feed, which is shown as "↵". A space or a "↵" after a full
    line is placed after it, in column `columns`.
    """
    pieces = []
    placed = _place(texts, columns)
    for (token, line), group in itertools.groupby(placed, key=lambda one: (one.sign.token, one.line)):
        signs = list(group)
        pieces.append(Piece(token, line, signs[0].start, signs[-1].stop, tuple(_words(signs))))
    return pieces


def lay_out_ids(ids: Sequence[str], columns: int) -> list[Piece]:
    """The pieces of token ids, one per id. An id is never broken."""
    pieces: list[Piece] = []
    line, at = 0, 0.0
    for token, text in enumerate(ids):
        width = len(text) + 2 * _ID_PAD
        if at > 0 and at + width > columns:
            line, at = line + 1, 0.0
        pieces.append(Piece(token, line, at, at + width, ((at + _ID_PAD, text),)))
        at += width + _ID_GAP
    return pieces


def _place(texts: Sequence[str], columns: int) -> Iterator[_Placed]:
    line = at = 0
    for word in _together(_signs(texts)):
        width = sum(sign.width for sign in word)
        if len(word) > 1 and at > 0 and at + width > columns:
            line, at = line + 1, 0
        for sign in word:
            wide = _TAB - at % _TAB if sign.text == "\t" else sign.width
            hangs = sign.text in (" ", "\n") and at == columns
            if at > 0 and at + wide > columns and not hangs:
                line, at = line + 1, 0
            yield _Placed(sign, line, at, at + wide)
            line, at = (line + 1, 0) if sign.text == "\n" else (line, at + wide)


def _together(signs: Iterable[_Sign]) -> Iterator[list[_Sign]]:
    """Group signs into words. Spaces, line feeds and wide characters stay single, since lines may break there."""
    for alone, group in itertools.groupby(signs, key=lambda sign: sign.width > 1 or sign.text in " \t\n"):
        if alone:
            yield from ([sign] for sign in group)
        else:
            yield list(group)


def _signs(texts: Sequence[str]) -> Iterator[_Sign]:
    held: _Sign | None = None
    for token, text in enumerate(texts):
        for character in text:
            width = _width(character)
            if width == 0 and held is not None and held.text not in " \t\n":
                held = held._replace(text=held.text + character)
                continue
            if held is not None:
                yield held
            held = _Sign(character, token, max(width, 1))
    if held is not None:
        yield held


def _width(character: str) -> int:
    """Columns of a character: 0 for combining marks, 2 for wide East Asian characters."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _words(signs: Iterable[_Placed]) -> Iterator[tuple[float, str]]:
    """Runs of letters of one token on one line. Wide characters are single, because their advance differs between
    fonts.
    """
    run, start = "", 0
    for sign, _, at, _ in signs:
        letter = sign.width == 1 and sign.text not in " \t"
        if run and not letter:
            yield start, run
            run = ""
        if letter:
            start = start if run else at
            run += sign.text.replace("\n", "↵")
        elif sign.width > 1:
            yield at, sign.text
    if run:
        yield start, run
