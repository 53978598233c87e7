# SPDX-License-Identifier: Apache-2.0
"""The order of the input rows, and the rows that a process captures. A row's position is its index in this order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dmi_connector.bulk.sources import RandomAccess, Source

_ROUNDS = 6
_MASK = (1 << 64) - 1
_SAMPLE = 100
"""Minimum number of rows from which the total is estimated."""


class Placed(NamedTuple):
    """A row of the input. position: index in the order of the run. number: index in the input. raw: the undecoded row,
    for `Rows.load`.
    """

    position: int
    number: int
    raw: Any


@dataclass(frozen=True)
class Order:
    """The order of the rows of a run, and the share of one process (`--shard`).

    shuffle: seed of a permutation of all rows, None for the order of the input. limit: number of positions to capture
    in all shares, None for all positions. share, shares: the share has the positions p with p % shares == share.
    """

    shuffle: int | None = None
    limit: int | None = None
    share: int = 0
    shares: int = 1

    @property
    def suffix(self) -> str:
        """Suffix of the names of this share's files, before the extension. "" if there is one share."""
        return f"-{self.share}-of-{self.shares}" if self.shares > 1 else ""

    def holds(self, position: int) -> bool:
        """Whether a position belongs to the share."""
        return position % self.shares == self.share

    def rows(self, source: Source, scratch: Path) -> Rows:
        """The rows of the share, by position. scratch: see `Source.random_access`."""
        return Rows(self, source, None if self.shuffle is None else source.random_access(scratch))


class Rows:
    """Iterates over the rows of a share. limit: see `Order`."""

    def __init__(self, order: Order, source: Source, shuffled: RandomAccess | None) -> None:
        self._order, self._source, self._shuffled = order, source, shuffled
        self._load = source.load if shuffled is None else shuffled.load
        self.limit = order.limit
        self._passed, self._ended, self._blank = 0, False, 0

    def load(self, raw: Any) -> object:
        """Decode a raw row, see `Source.load`."""
        row = self._load(raw)
        self._blank += row is None
        return row

    def __iter__(self) -> Iterator[Placed]:
        order = self._order
        if self._shuffled is None:
            for number, raw in self._source:
                if order.limit is not None and number >= order.limit:
                    break
                if order.holds(number):
                    self._passed += 1
                    yield Placed(number, number, raw)
            self._ended = True
            return
        assert order.shuffle is not None
        total = len(self._shuffled)
        end = total if order.limit is None else min(total, order.limit)
        for position in range(order.share, end, order.shares):
            number = permuted(position, total, order.shuffle)
            yield Placed(position, number, self._shuffled[number])

    def estimates(self) -> bool:
        """Whether `total` is an estimate."""
        return self._shuffled is None and self._source.count() is None and not self._ended

    def total(self) -> int | None:
        """Number of rows of the share, without the blank rows that `load` found.

        The number is exact if the source knows its length or was read to the end, else an estimate. None if fewer than
        _SAMPLE rows were read for the estimate.
        """
        total = self._with_blank()
        return None if total is None else total - self._blank

    def _with_blank(self) -> int | None:
        known = len(self._shuffled) if self._shuffled is not None else self._source.count()
        order = self._order
        if known is not None:
            end = known if order.limit is None else min(known, order.limit)
            return len(range(order.share, end, order.shares))
        fraction = self._source.fraction()
        if self._ended:
            return self._passed
        if not fraction or self._passed < _SAMPLE:
            return None
        estimate = round(self._passed / fraction)
        return estimate if order.limit is None else min(estimate, len(range(order.share, order.limit, order.shares)))


def parse_share(text: str) -> tuple[int, int]:
    """Parse the value of --shard, such as "3/8", as (share, shares). Shares count from 0. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(f"--shard {text!r} is not valid; write I/N with I from 0 to N - 1, as in 0/8")
    return int(match[1]), int(match[2])


def permuted(position: int, total: int, seed: int) -> int:
    """The element at a position of a pseudo-random permutation of range(total). `seed` selects the permutation.

    A Feistel network permutes the numbers below a power of 4. A result of `total` or more is permuted again until it is
    smaller (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). No table is stored.
    """
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    number = position
    while True:
        left, right = number >> half, number & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(seed * _ROUNDS + turn, right) & mask)
        number = left << half | right
        if number < total:
            return number


def _mix(key: int, value: int) -> int:
    """A hash of two numbers: splitmix64's finaliser."""
    z = (value * 0xD1342543DE82EF95 + key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
