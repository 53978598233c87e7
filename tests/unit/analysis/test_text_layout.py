# SPDX-License-Identifier: Apache-2.0
"""The layout of tokens: line breaks, and the columns of each token."""

from __future__ import annotations

import itertools
import textwrap

import numpy as np

from dmi_connector.analysis.pictures.text_layout import Piece, lay_out, lay_out_ids


def lines(pieces: list[Piece]) -> list[str]:
    """The text of each line, each word at its column."""
    found = [[" "] * 80 for _ in range(pieces[-1].line + 1)]
    for piece in pieces:
        for column, word in piece.words:
            found[piece.line][int(column) : int(column) + len(word)] = word
    return ["".join(line).rstrip() for line in found]


def spans(pieces: list[Piece]) -> list[tuple[int, int, float, float]]:
    return [(piece.token, piece.line, piece.start, piece.stop) for piece in pieces]


def test_words_wrap_as_in_textwrap_however_they_are_cut_into_tokens() -> None:
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), random.integers(1, 12))) for _ in range(300)]
    text = " ".join(words)
    cuts = [0, *sorted(random.choice(np.arange(1, len(text)), 400, replace=False).tolist()), len(text)]
    tokens = [text[a:b] for a, b in itertools.pairwise(cuts)]
    pieces = lay_out(tokens, 40)
    assert lines(pieces) == textwrap.wrap(text, 40)
    assert sorted({piece.token for piece in pieces}) == list(range(len(tokens)))
    for piece in pieces:
        assert 0 <= piece.start < piece.stop <= 41, "a space may exceed the last column"
    covered = sum(piece.stop - piece.start for piece in pieces)
    assert covered == len(text), "each character must have the colour of one token"


def test_a_line_feed_is_shown_and_ends_the_line() -> None:
    pieces = lay_out(["one\n", "\n\n", "  two"], 40)
    assert lines(pieces) == ["one↵", "↵", "↵", "  two"]
    assert spans(pieces) == [(0, 0, 0, 4), (1, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 5)]


def test_a_line_feed_after_a_full_line_stays_on_that_line() -> None:
    assert spans(lay_out(["abcd", "\n", "ef"], 4)) == [(0, 0, 0, 4), (1, 0, 4, 5), (2, 1, 0, 2)]


def test_a_tab_leads_to_the_next_eighth_column() -> None:
    pieces = lay_out(["ab", "\t", "c\td"], 40)
    assert spans(pieces) == [(0, 0, 0, 2), (1, 0, 2, 8), (2, 0, 8, 17)]
    assert pieces[2].words == ((8, "c"), (16, "d"))


def test_a_word_longer_than_a_line_is_broken() -> None:
    assert lines(lay_out(["ab", " ", "cdefghijk", "l mn"], 5)) == ["ab", "cdefg", "hijkl", "mn"]


def test_wide_characters_take_two_columns_and_may_begin_a_line() -> None:
    pieces = lay_out(["a中", "文字"], 6)
    assert spans(pieces) == [(0, 0, 0, 3), (1, 0, 3, 5), (1, 1, 0, 2)]
    assert [piece.words for piece in pieces] == [((0, "a"), (1, "中")), ((3, "文"),), ((0, "字"),)]


def test_combining_marks_take_no_column() -> None:
    pieces = lay_out(["e\u0301x", "y\u200d", "\u0301"], 6)
    assert spans(pieces) == [(0, 0, 0, 2), (1, 0, 2, 3)]
    assert pieces[0].words == ((0, "e\u0301x"),)


def test_an_id_is_never_broken() -> None:
    pieces = lay_out_ids(["12", "345", "6", "12345678"], 8)
    assert spans(pieces) == [(0, 0, 0, 3), (1, 0, 3.5, 7.5), (2, 1, 0, 2), (3, 2, 0, 9)]
    assert [piece.words for piece in pieces] == [((0.5, "12"),), ((4.0, "345"),), ((0.5, "6"),), ((0.5, "12345678"),)]
