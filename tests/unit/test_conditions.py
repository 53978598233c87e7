# SPDX-License-Identifier: Apache-2.0
"""Conditions on scores: what they read, and when they are known to be false."""

from __future__ import annotations

import numpy as np
import pytest

from dmi_connector.conditions import Condition, keep_if, stop_if

ROWS = np.array([0.5, -1.0, 2.0, 0.25], np.float32)


@pytest.mark.parametrize(
    ("text", "measure", "refuted"),
    [
        ("max(risk) > 1.5", 2.0, False),
        ("max( risk )>2", 2.0, True),
        ("min(risk) < -0.5", -1.0, False),
        ("mean(risk) > .5", 0.4375, True),
        ("last(risk) < 1e-1", 0.25, True),
        ("count(risk > 0.25) > 1", 2, False),
        ("count(risk < 0.25) < 1", 1, True),
        ("  count(risk>+0.25)>2 ", 2, True),
    ],
)
def test_a_condition_compares_scores(text: str, measure: float, refuted: bool) -> None:
    condition = keep_if(text)
    assert condition is not None and condition.probe == "risk"
    assert condition.measure(ROWS) == measure and condition.refutes(measure) == refuted


@pytest.mark.parametrize("text", ["max(risk) > 5", "min(risk) < -5", "mean(risk) > 5", "count(risk > 1) > 5"])
def test_conditions_on_nan_scores_are_unknown(text: str) -> None:
    condition = keep_if(text)
    assert condition is not None and condition.refutes(condition.measure(ROWS))
    assert not condition.refutes(condition.measure(np.append(ROWS, np.float32("nan"))))


def test_a_condition_on_rows_names_those_for_which_it_holds() -> None:
    above, below = stop_if("a-b_1 > 0.3"), stop_if("a-b_1 < 0.3")
    assert isinstance(above, Condition) and isinstance(below, Condition) and above.probe == "a-b_1"
    rows = np.append(ROWS, np.float32("nan"))
    assert above.of_rows(rows).tolist() == [True, False, True, False, False]
    assert below.of_rows(rows).tolist() == [False, True, False, True, False]
    assert keep_if(None) is None is stop_if(None)
