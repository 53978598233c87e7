# SPDX-License-Identifier: Apache-2.0
"""Breaks the text of tokens into lines, as a browser does. Widths are in columns: one letter is one column wide."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_TAB = 8
"""Number of columns between two tab stops."""
_ID_PAD, _ID_GAP = 0.5, 0.5
"""Padding on each side of an id, and gap between two ids, in columns."""


@dataclass(frozen=True)
class Piece:
    """A part of one token on one line.

    token: index of the token. line: number of the line, counted from 0. start, stop: the columns [start, stop) of the
    part. words: (first column, text) of each run of characters without a space.
    """

    token: int
    line: int
    start: float
    stop: float
    words: tuple[tuple[float, str], ...]


class _Sign(NamedTuple):
    """One character with its combining marks. token: index of the token. width: 1 or 2 columns."""

    text: str
    token: int
    width: int


class _Placed(NamedTuple):
    """A character and its place: line, and columns [start, stop)."""

    sign: _Sign
    line: int
    start: int
    stop: int


def lay_out(texts: Sequence[str], columns: int) -> list[Piece]:
    """Lay out the texts of tokens. Returns their pieces in order. A token in which no character begins has no piece.

    Lines have `columns` columns. They break between words if possible, and after each line feed, which is shown as "↵".
    A space or a "↵" after a full line stays on that line, in column `columns`.
    """
    pieces = []
    placed = _place(texts, columns)
    for (token, line), group in itertools.groupby(placed, key=lambda one: (one.sign.token, one.line)):
        signs = list(group)
        pieces.append(Piece(token, line, signs[0].start, signs[-1].stop, tuple(_words(signs))))
    return pieces


def lay_out_ids(ids: Sequence[str], columns: int) -> list[Piece]:
    """Lay out token ids. Returns one piece per id: lines break only between ids."""
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
    """Yield each character with its place."""
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
    """Group characters into words. White space and wide characters stay single, since lines may break there."""
    for alone, group in itertools.groupby(signs, key=lambda sign: sign.width > 1 or sign.text in " \t\n"):
        if alone:
            yield from ([sign] for sign in group)
        else:
            yield list(group)


def _signs(texts: Sequence[str]) -> Iterator[_Sign]:
    """Yield the characters of texts. A combining mark is joined to the character before it."""
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
    """Yield (first column, text) of the runs of letters of one token on one line.

    A wide character is a run of its own, because the width of wide characters differs between fonts.
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
