# SPDX-License-Identifier: Apache-2.0
"""Every row of every chunk is compared with the request: its token id, its position, and whether it arrived."""

from __future__ import annotations

import numpy as np
import pytest

from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.write.arrays.row_check import RowCheck

IDS = np.arange(300, dtype="<i4") % 97
START = 50


def headers(first: int, count: int, ids: np.ndarray = IDS, start: int = START) -> np.ndarray:
    """Headers of rows [first, first + count), followed by some other bytes."""
    rows = np.arange(first, first + count)
    pairs = np.stack([ids[rows], rows + start], axis=1).astype("<i4")
    return np.concatenate([pairs.view("u1").ravel(), np.full(5, 255, "u1")])


def check(*chunks: tuple[int, int], ids: np.ndarray = IDS) -> RowCheck:
    """A check that has seen these chunks: (first row, number of rows)."""
    found = RowCheck(START)
    for first, count in chunks:
        np.testing.assert_array_equal(found.positions(headers(first, count, ids), first, count), ids[first:][:count])
    return found


ALL = ((0, 128), (128, 128), (256, 44))


def test_rows_of_the_request_are_not_a_loss() -> None:
    assert check(*ALL).losses(IDS) == []
    assert check(*reversed(ALL)).losses(IDS) == []


@pytest.mark.parametrize("row", [0, 1, 127, 128, 200, 255, 256, 298, 299])
def test_a_wrong_token_id_is_found_in_any_chunk(row: int) -> None:
    ids = IDS.copy()
    ids[row] = 1000
    expected = {"position": START + row, "found": 1000, "expected": int(IDS[row])}
    for chunks in (ALL, tuple(reversed(ALL))):
        assert check(*chunks, ids=ids).losses(IDS) == [Loss.of(Cause.WRONG_TOKEN, [[row, row + 1]], **expected)]


def test_the_first_of_several_wrong_token_ids_is_named() -> None:
    ids = IDS.copy()
    ids[[140, 150, 270]] = 1000
    [loss] = check(*ALL, ids=ids).losses(IDS)
    assert loss.facts["position"] == START + 140 and loss.rows == ((140, 141), (150, 151), (270, 271))


def test_rows_after_the_end_are_not_compared() -> None:
    """The engine may compute one row more than the request has tokens."""
    ids = IDS.copy()
    ids[250:] = 1000
    assert check(*ALL, ids=ids).losses(IDS[:250]) == []
    assert [loss.cause for loss in check(*ALL, ids=ids).losses(IDS[:251])] == [Cause.WRONG_TOKEN]


@pytest.mark.parametrize("row", [0, 127, 128, 299])
def test_a_wrong_position_is_found_in_any_chunk(row: int) -> None:
    found = RowCheck(START)
    for first, count in ALL:
        data = headers(first, count)
        if first <= row < first + count:
            data[8 * (row - first) + 4] ^= 1
        found.positions(data, first, count)
    first, count = next((a, n) for a, n in ALL if a <= row < a + n)
    span = {"first": START + first, "last": START + first + count - 1}
    assert found.losses(IDS) == [Loss.of(Cause.WRONG_POSITIONS, [[first, first + count]], **span)]


def test_a_wrong_position_and_a_wrong_token_id_are_both_named() -> None:
    found, ids = RowCheck(START), IDS.copy()
    ids[130] = 1000
    found.positions(headers(0, 128, start=START + 1), 0, 128)
    found.positions(headers(128, 128, ids), 128, 128)
    assert [loss.cause for loss in found.losses(IDS)] == [Cause.WRONG_POSITIONS, Cause.WRONG_TOKEN]


def test_the_ids_of_a_chunk_are_kept_when_its_memory_is_used_again() -> None:
    found, data = RowCheck(START), headers(0, 128)
    found.positions(data, 0, 128)
    data[:] = 255
    assert found.losses(IDS) == []


@pytest.mark.parametrize(
    ("came", "lost", "absent"),
    [
        (ALL, [], []),
        (ALL[:2], [], [[256, 300]]),
        (ALL[1:], [], [[0, 128]]),
        ((ALL[1],), [], [[0, 128], [256, 300]]),
        ((), [], [[0, 300]]),
        ((ALL[1],), [[0, 128]], [[256, 300]]),
        ((ALL[1],), [[0, 100], [270, 300]], [[100, 128], [256, 270]]),
        ((ALL[1],), [[0, 999]], []),
    ],
)
def test_rows_that_neither_came_nor_are_lost_are_absent(
    came: tuple[tuple[int, int], ...], lost: list[list[int]], absent: list[list[int]]
) -> None:
    losses = [Loss.of(Cause.FELL_BEHIND, [rows]) for rows in lost]
    assert check(*came).absent(300, losses) == absent
    assert check(*came).absent(0, losses) == []


def test_the_rows_that_came_are_known_with_their_token_ids() -> None:
    ids, came = check((128, 128), (256, 44)).rows()
    assert ids.tolist() == [0] * 128 + IDS[128:].tolist() and came.tolist() == [False] * 128 + [True] * 172
    ids, came = RowCheck(START).rows()
    assert len(ids) == len(came) == 0
