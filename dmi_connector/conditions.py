# SPDX-License-Identifier: Apache-2.0
"""Conditions on a probe's scores: the request options `keep_if` and `stop_if` (docs/PROBES.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.option_values import refuse

AGGREGATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "mean": lambda rows: rows.mean(0, dtype=np.float64),
    "last": lambda rows: rows[-1],
}
"""Name -> function that reduces scores [rows, ...] over the rows."""
_LONGEST = 200
"""Maximum characters of a condition."""
_NAME = r"(?P<probe>[A-Za-z0-9][A-Za-z0-9_-]*)"
_SIGN, _NUMBER = r"(?P<{}>[<>])", r"(?P<{}>[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
_OF_ROW = rf"{_NAME}\s*{_SIGN.format('row_sign')}\s*{_NUMBER.format('row_value')}"
_OF_ALL = rf"\s*{_SIGN.format('sign')}\s*{_NUMBER.format('value')}"
_AGGREGATE = re.compile(rf"(?P<what>{'|'.join(AGGREGATES)})\s*\(\s*{_NAME}\s*\)" + _OF_ALL)
_COUNT = re.compile(rf"(?P<what>count)\s*\(\s*{_OF_ROW}\s*\)" + _OF_ALL)
_ROW = re.compile(_OF_ROW)


@dataclass(frozen=True)
class Condition:
    """A comparison of the scores of one probe with a number.

    text: the condition as the client wrote it.

    For `keep_if`, the scores of all rows give one number. what: the function that gives this number, a name in
    AGGREGATES or "count". sign, value: the operator, ">" or "<", and the right side of the comparison. "count" is the
    number of rows whose score is above (`row_sign` ">") or below ("<") `row_value`.

    For `stop_if`, the score of each row is compared with `row_value`, by the operator `row_sign`. what: "".
    """

    text: str
    probe: str
    what: str = ""
    sign: str = ">"
    value: float = 0.0
    row_sign: str = ">"
    row_value: float = 0.0

    def measure(self, rows: np.ndarray) -> float:
        """The left side of a `keep_if`; NaN if a score that it depends on is NaN. rows: scores, float32 [rows >= 1]."""
        if self.what != "count":
            return float(AGGREGATES[self.what](rows))
        return float("nan") if np.isnan(rows).any() else int(self.of_rows(rows).sum())

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Compare each score with `row_value`: bool [rows], False for NaN. rows: scores, float32 [rows]."""
        return np.asarray(rows > self.row_value if self.row_sign == ">" else rows < self.row_value)

    def refutes(self, measure: float) -> bool:
        """Whether a `keep_if` is false for this result of `measure`. NaN does not refute a condition."""
        return measure <= self.value if self.sign == ">" else measure >= self.value


def keep_if(value: object) -> Condition | None:
    """Parse the request option `dmi.keep_if`. None if `value` is None. Raises OptionError."""
    return _parse("dmi.keep_if", value, "max(NAME) > 0.8 (or min, mean, last; > or <), or count(NAME > 0.5) > 3")


def stop_if(value: object) -> Condition | None:
    """Parse the request option `dmi.stop_if`. None if `value` is None. Raises OptionError."""
    return _parse("dmi.stop_if", value, "NAME > 0.95, or NAME < 0.05")


def _parse(option: str, value: object, forms: str) -> Condition | None:
    if value is None:
        return None
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST else ""
    patterns = (_ROW,) if option == "dmi.stop_if" else (_AGGREGATE, _COUNT)
    found = next(filter(None, (pattern.fullmatch(text) for pattern in patterns)), None)
    parts = found.groupdict() if found else {}
    given: dict[str, Any] = {name: float(part) if name.endswith("value") else part for name, part in parts.items()}
    finite = all(math.isfinite(part) for part in given.values() if isinstance(part, float))
    if found is None or not finite:
        raise refuse(option, value, f"is not valid; give {forms}, with the name of a probe")
    return Condition(text, **given)
