# SPDX-License-Identifier: Apache-2.0
"""Compares the largest attention weights of full rows and of restored rows, for `dmi fidelity`.

Restored rows were reduced, decoded, and mapped back into the space of the hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dmi_connector.captures.attention import heads_of, queries_and_keys, seen_by_attention, weights_of_head
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.store.format.remote_path import Given

LARGEST = 8
"""Number of attention weights compared per head and query."""
MEANINGS: Mapping[str, str] = {
    "attention": f"share of the {LARGEST} largest attention weights of a head and query that stay among the {LARGEST}"
    f" largest if the rows of this hook are restored ones; only queries that see more than {LARGEST} keys count",
}
"""{measure: its meaning}."""
_ROWS = 512
"""Maximum number of rows to compare, over all stores. For each head and reduction, queries are multiplied by keys."""


@dataclass(frozen=True)
class _Part:
    """The rows of one store that are compared.

    rows: number of rows, from the store's first row on. other: full rows [rows, width] of the other hook: of the keys
    if the restored rows are queries, otherwise of the queries.
    """

    capture: Capture
    rows: int
    other: np.ndarray


@dataclass(frozen=True)
class AttentionOverlap:
    """Compares the attention weights of one layer, computed from full rows and from restored rows.

    queries: True if the restored rows are queries, False if they are keys. found: cache of the results of `_largest`
    for full rows, {(index of the store, head): result}.
    """

    layer: int
    queries: bool
    parts: tuple[_Part, ...]
    found: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, stores: Sequence[Given], hook: str, layer: int | None) -> AttentionOverlap | None:
        """Read the other hook's rows, and return an overlap for `hook`.

        Returns None if the attention weights cannot be computed: if `hook` is neither the queries nor the keys of
        attention in the first store, or if a store lacks one of the two, has the other hook reduced, or has rows for
        which `captures.attention.attention` raises.
        """
        parts, left, queries = [], _ROWS, True
        for store in stores:
            with open_capture(store, 0) as capture:
                names = seen_by_attention(capture)
                if layer is None or hook not in names or not left:
                    break
                queries, rows = hook == names[0], min(left, int(capture.attrs["num_tokens"]))
                try:
                    q, k = queries_and_keys(capture, layer, range(rows), 0)
                except (KeyError, ValueError):
                    return None
                if capture.reduction(names[1] if queries else names[0]) is not None:
                    return None
                parts.append(_Part(capture, rows, k if queries else q))
                left -= rows
        return cls(layer, queries, tuple(parts)) if layer is not None and parts else None

    def measures(self, full: np.ndarray, restored: np.ndarray) -> dict[str, float]:
        """The measures of MEANINGS that can be computed.

        full, restored: [n, width], the concatenated rows of all stores.
        """
        kept = compared = at = 0
        for number, part in enumerate(self.parts):
            tokens = int(part.capture.attrs["num_tokens"])
            before, after = (rows[at : at + part.rows] for rows in (full, restored))
            for head in range(heads_of(part.capture)):
                if (number, head) not in self.found:
                    self.found[number, head] = self._largest(part, head, before)
                (one, seen), (other, _) = self.found[number, head], self._largest(part, head, after)
                same = (one[:, :, None] == other[:, None, :]).any(2)
                kept, compared = kept + int(same[seen].sum()), compared + int(seen.sum()) * LARGEST
            at += tokens
        return {"attention": kept / compared} if compared else {}

    def _largest(self, part: _Part, head: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indexes of the keys with the largest weights, int [queries, LARGEST]; whether a query sees more than LARGEST
        keys, bool [queries]).
        """
        queries, keys = (rows, part.other) if self.queries else (part.other, rows)
        weights = weights_of_head(part.capture, self.layer, head, queries, keys)
        if weights.shape[1] <= LARGEST:
            return np.zeros((len(weights), LARGEST), int), np.zeros(len(weights), bool)
        found = np.argpartition(-weights, LARGEST - 1, axis=1)[:, :LARGEST]
        return found, (weights > 0).sum(1) > LARGEST
