# SPDX-License-Identifier: Apache-2.0
"""Scores that wait until a request needs them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector.engine.messages import ScoreRows, StepScores
from dmi_connector.engine.scheduler import late_scores
from dmi_connector.engine.scheduler.late_scores import LateScores, ScoredRows
from dmi_connector.engine.scheduler.request_scores import RequestScores
from dmi_connector.engine.transfer.scores import ScoreReader


def step(parts: list[tuple[int, int, int]], values: np.ndarray, ranks: int = 1) -> list[StepScores]:
    """The answers of the ranks; rank n has 1000 n more."""
    rows = [(capture, position) for capture, first, count in parts for position in range(first, first + count)]
    captures, positions = map(list, zip(*rows, strict=True))
    asked = ScoreRows(np.array(captures), np.array(positions), np.zeros(len(rows), np.int64))
    return [StepScores(rank, asked, values + np.float32(1000 * rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_request_gets_its_rows_in_the_order_of_steps(ranks: int) -> None:
    late, rng = LateScores(), np.random.default_rng(0)
    assert not len(late.of(1).positions), "before there is a step"
    want: dict[int, list[tuple[int, float]]] = {}
    for _ in range(20):
        parts, values = [], []
        for capture in rng.permutation(5)[: rng.integers(1, 6)].tolist():
            first, count = int(rng.integers(30)), int(rng.choice([1, 1, 1, 4]))
            parts.append((capture, first, count))
            for position in range(first, first + count):
                values.append(float(rng.integers(100)))
                want.setdefault(capture, []).append((position, values[-1]))
        late.add(step(parts, np.array(values, np.float32)[:, None], ranks))
    singly = {capture: late.of(capture) for capture in want}
    rows = late.take()
    together = {
        capture: ScoredRows(rows.captures[part], rows.positions[part], {n: v[part] for n, v in rows.values.items()})
        for capture, part in rows.by_capture()
    }
    assert together.keys() == want.keys() and late.added == 20
    for capture, mine in want.items():
        for found in (singly[capture], together[capture]):
            assert list(zip(found.positions.tolist(), found.values[0][:, 0].tolist(), strict=True)) == mine
            assert all((found.values[n] == found.values[0] + 1000 * n).all() for n in range(ranks))
    late.add(step([(7, 0, 1)], np.ones((1, 1), np.float32)))
    assert [capture for capture, _ in late.take().by_capture()] == [7], "rows that were taken are gone"


def test_steps_and_rows_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_scores, "_STEPS", 3)
    monkeypatch.setattr(late_scores, "_ROWS", 10)
    late = LateScores()
    for count in (1, 1, 1):
        assert not late.full
        late.add(step([(0, 0, count)], np.zeros((count, 1), np.float32)))
    assert late.full
    late.take()
    assert not late.full
    late.add(step([(0, 0, 10)], np.zeros((10, 1), np.float32)))
    assert late.full


def test_a_row_that_is_computed_again_replaces_the_one_before() -> None:
    scores = RequestScores(("risk",), first=2)
    scores.put("risk", np.array([2, 3, 4, 3, 4]), np.array([[1], [2], [3], [4], [5]], np.float32))
    assert scores.of("risk", 9)[:, 0].tolist() == [1, 4, 5]
    scores.put("risk", np.array([600]), np.array([[6]], np.float32))
    assert scores.stop == 601 and scores.of("risk", 9)[:3, 0].tolist() == [1, 4, 5]


@pytest.mark.parametrize(
    "offsets", [(16, 24), (16, 32), (32, 16), ()], ids=["side by side", "apart", "swapped", "none"]
)
def test_scores_are_read_where_they_lie_in_a_row(offsets: tuple[int, ...]) -> None:
    """Two values each. Latents of an autoencoder, which are no scores, may lie between them."""
    layout: Any = SimpleNamespace(scored=[SimpleNamespace(offset=at, stored=(2, 2)) for at in offsets])
    rows = torch.arange(5 * 12, dtype=torch.float32).reshape(5, 12)
    reader = ScoreReader(layout, 3, rows.view(torch.uint8))
    found = reader.read(ScoreRows(np.array([7, 8]), np.array([0, 4]), np.array([4, 1])))
    columns = [at // 4 + i for at in offsets for i in range(2)]
    assert found.rank == 3 and found.values.tolist() == [[float(12 * slot + c) for c in columns] for slot in (4, 1)]
