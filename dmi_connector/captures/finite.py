# SPDX-License-Identifier: Apache-2.0
"""Finds rows with a NaN or an infinity, and skips, keeps or refuses them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dmi_connector.store.format.remote_path import Place

POLICIES = ("skip", "keep", "fail")
"""Values of `finite` and `--finite`."""
WHAT = "values that are not finite"
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
"""{dtype: bits of the exponent}. All of them are set in a NaN and in an infinity."""
_NAMED = 5
"""Maximum number of stores that a warning names."""
_STEP_BYTES = 1 << 18
"""Number of bytes checked at a time, so that they and a copy fit into the CPU cache."""


class NotFinite(ValueError):
    """Raised for a NaN or an infinity under "fail", and under "skip" by code that cannot leave out single rows."""


def not_finite(values: np.ndarray, minus_infinity: bool = False) -> np.ndarray:
    """Indexes along the first axis of the rows with a NaN or an infinity, int64 [n]. Integer arrays have none.

    minus_infinity: accept minus infinity. A logit of minus infinity is a masked token.
    """
    mask = _EXPONENT.get(values.dtype.name)
    if mask is None or not values.size:
        return np.empty(0, np.int64)
    rows = values.reshape(len(values), -1)
    bits, exponent = rows.view(f"u{rows.dtype.itemsize}"), np.array(mask, f"u{rows.dtype.itemsize}")
    step = max(1, _STEP_BYTES // max(1, rows.shape[1] * rows.itemsize))
    found: list[int] = []
    for first in range(0, len(rows), step):
        exponents = bits[first : first + step] & exponent
        if exponents.max() == exponent:
            found += (first + np.flatnonzero((exponents == exponent).any(axis=1))).tolist()
    bad = np.array(found, np.int64)
    if minus_infinity and len(bad):
        wide = rows[bad].astype(np.float64)
        bad = bad[(np.isnan(wide) | (wide == np.inf)).any(axis=1)]
    return bad


class FiniteCheck:
    """Applies a policy to bad rows, which have a NaN or an infinity, and counts them.

    policy: "skip" leaves bad rows out, "keep" keeps them, "fail" raises NotFinite. option: name of the option in
    errors. rows: {store: number of bad rows}. first: {store: index of the first bad row}.

    Raises ValueError for another policy.
    """

    def __init__(self, policy: str = "skip", option: str = "finite") -> None:
        if policy not in POLICIES:
            raise ValueError(f"{option} {policy!r} is not valid; use skip, keep or fail")
        self.policy, self.option = policy, option
        self.rows: Counter[str] = Counter()
        self.first: dict[str, int] = {}
        self._warned = 0  # number of rows at the latest warning
        self._reported = 0  # number of rows at the latest `warn_all`

    @property
    def settings(self) -> dict[str, str]:
        """{"finite": "keep"} with the policy "keep", else {}. A continued export must have the same settings.

        "skip" and "fail" write the same files, so an export may change from one to the other.
        """
        return {"finite": self.policy} if self.policy == "keep" else {}

    def see(self, store: Place, rows: Sequence[int] | np.ndarray) -> None:
        """Count bad rows of a store. rows: their indexes in the store. Raises NotFinite if the policy is "fail"."""
        if len(rows):
            name = str(store.absolute())
            self.rows[name] += len(rows)
            self.first[name] = min(int(min(rows)), self.first.get(name, int(rows[0])))
            if self.policy == "fail":
                raise self.error(store, int(min(rows)))

    def see_all(self, stores: Sequence[Place], number: np.ndarray, rows: np.ndarray) -> None:
        """Count bad rows of several stores. number, rows: int64 [n], index in `stores`, and row in that store."""
        for one in np.unique(number).tolist():
            self.see(stores[one], rows[number == one])

    def check(self, store: Place, values: np.ndarray, first: int = 0) -> np.ndarray:
        """Check the rows `values` of a store, and return them. first: index in the store of the first of these rows.

        Raises NotFinite for a row with a NaN or an infinity, unless the policy is "keep".
        """
        bad = not_finite(values) + first
        self.see(store, bad)
        if len(bad) and self.policy == "skip":
            raise self.error(store, int(bad[0]))
        return values

    def error(self, store: Place, row: int) -> NotFinite:
        """The error that names a store and its first bad row."""
        return NotFinite(f"{store}: row {row} holds {WHAT}; leave the store out, or give {self.option} keep")

    def take(self) -> list[tuple[str, int, int]]:
        """Reset the counts. Returns [(store, number of rows, first row)], for `add` in another process."""
        taken = [(store, count, self.first[store]) for store, count in self.rows.items()]
        self.rows, self.first = Counter(), {}
        return taken

    def add(self, taken: Iterable[tuple[str, int, int]]) -> None:
        """Add the counts that `take` returned."""
        for store, count, row in taken:
            self.rows[store] += count
            self.first[store] = min(row, self.first.get(store, row))

    def warn(self) -> None:
        """Warn once, about the first store with bad rows."""
        if self.first and not self._warned and self.policy != "fail":
            store, row = next(iter(self.first.items()))
            self._warned = self.rows.total()
            warnings.warn(f"{store}: row {row} holds {WHAT}; such rows are {self._verb}", RuntimeWarning, stacklevel=3)

    def warn_all(self) -> None:
        """If bad rows were counted since the latest warning, warn with their number since the previous `warn_all`."""
        new = self.rows.total() - self._reported
        if self.rows.total() > self._warned and self.policy != "fail":
            self._warned = self._reported = self.rows.total()
            named = ", ".join(list(self.rows)[:_NAMED]) + (", and others" if len(self.rows) > _NAMED else "")
            warnings.warn(
                f"{new} rows of {len(self.rows)} stores hold {WHAT} and were {self._verb}: {named}",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def _verb(self) -> str:
        return "left out" if self.policy == "skip" else "kept"

    def recall(self, first: Mapping[str, Any]) -> None:
        """Add the first bad rows that an earlier run found. first: {store: row}."""
        self.first = {**first, **self.first}
