# SPDX-License-Identifier: Apache-2.0
"""Checks that rows belong to the request of their store, by the token id and position that each row carries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmi_connector.layout import HEADER_SENT_BYTES
from dmi_connector.store.format.completeness import Cause, Loss

_NEVER = 1 << 62
"""A position after every valid one."""


class RowCheck:
    """Checks the row headers of one capture.

    start: position of the first row.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._axes: list[tuple[int, np.ndarray]] = []  # (first row, positions on the axes of M-RoPE)
        self._chunks: list[tuple[int, np.ndarray]] = []  # (first row, token ids in the row headers)
        self._losses: list[Loss] = []

    def positions(self, headers: np.ndarray, first: int, count: int) -> np.ndarray:
        """Check the positions in the headers of rows [first, first + count).

        headers: uint8 [>= count * HEADER_SENT_BYTES]; bytes after these headers are ignored. Returns the token ids in
        the headers, int32 [count].
        """
        pairs = headers[: HEADER_SENT_BYTES * count].view("<i4").reshape(count, 2)
        ids = pairs[:, 0].copy()
        self._chunks.append((first, ids))
        begin = self._start + first
        if not np.array_equal(pairs[:, 1], np.arange(begin, begin + count, dtype=np.int32)):
            self._losses.append(self._wrong_positions(first, count))
        return ids

    def _wrong_positions(self, first: int, count: int) -> Loss:
        begin, rows = self._start + first, [[first, first + count]]
        return Loss.of(Cause.WRONG_POSITIONS, rows, first=begin, last=begin + count - 1)

    def borrowed(self, token_ids: np.ndarray) -> None:
        """Add rows [0, n) from another store, where they were checked. token_ids: int32 [n], of this request."""
        self._chunks.append((0, token_ids))

    def is_right(self, first: int) -> bool:
        """Whether the rows of the chunk that begins at `first` have the expected positions."""
        return all(first != start for start, _ in self.wrong_rows())

    def wrong_rows(self) -> list[list[int]]:
        """Ranges of rows [start, stop) with unexpected positions."""
        return [[start, stop] for loss in self._losses for start, stop in loss.rows]

    def axes(self, values: np.ndarray, first: int) -> None:
        """Record M-RoPE positions of rows starting at `first`, int [rows, axes].

        They are checked at the end, because a later turn of a session may add media.
        """
        self._axes.append((first, values.copy()))

    def _wrong_axes(self, media: Sequence[Sequence[int]]) -> list[Loss]:
        """Check the M-RoPE positions: a text token has the same position on all axes.

        Before the first image this is its index in the request. After the last image it differs from the index by a
        constant.
        """
        found, fixed = [], None  # the constant, from the first row after the media
        for first, values in self._axes:
            begin = self._start + first
            at = np.arange(begin, begin + len(values))
            text = np.ones(len(at), bool)
            for start, stop in media:
                text[max(0, start - begin) : max(0, stop - begin)] = False
            shift = values[:, 0] - at
            right = (values == values[:, :1]).all(axis=1)
            right &= (shift == 0) | (at >= (media[0][0] if media else _NEVER))
            behind = text & (at >= (media[-1][1] if media else 0))
            if behind.any():
                fixed = int(shift[behind][0]) if fixed is None else fixed
                right &= (shift == fixed) | ~behind
            if not right[text].all():
                found.append(self._wrong_positions(first, len(values)))
        return found

    def losses(self, token_ids: np.ndarray, media: Sequence[Sequence[int]] = ()) -> list[Loss]:
        """The losses of rows that failed the check.

        token_ids: token ids of the request, int [rows]. media: [start, stop) positions of images and other media,
        ascending.
        """
        losses = self._losses + self._wrong_axes(media)
        wrong: list[int] = []
        found = 0  # token id of the first wrong row
        for first, ids in self._chunks:
            expected = token_ids[first : first + len(ids)]
            rows = np.flatnonzero(ids[: len(expected)] != expected)
            if len(rows) and not wrong:
                found = int(ids[rows[0]])
            wrong += (first + rows).tolist()
        if not wrong:
            return losses
        facts = {"position": self._start + wrong[0], "found": found, "expected": int(token_ids[wrong[0]])}
        return [*losses, Loss.of(Cause.WRONG_TOKEN, [[row, row + 1] for row in wrong], **facts)]

    def absent(self, length: int, losses: Sequence[Loss]) -> list[list[int]]:
        """Ranges of rows [0, length) that have not arrived and are not listed in `losses`."""
        there = np.zeros(length, bool)
        for first, ids in self._chunks:
            there[first : first + len(ids)] = True
        for start, stop in (rows for loss in losses for rows in loss.rows):
            there[start:stop] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[True], there, [True]]).astype(np.int8)))
        return [[int(start), int(stop)] for start, stop in edges.reshape(-1, 2)]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(int32 token ids, bool whether the row has arrived), both [rows] up to the last row that has arrived."""
        length = max((first + len(ids) for first, ids in self._chunks), default=0)
        token_ids, came = np.zeros(length, np.int32), np.zeros(length, bool)
        for first, ids in self._chunks:
            token_ids[first : first + len(ids)] = ids
            came[first : first + len(ids)] = True
        return token_ids, came
