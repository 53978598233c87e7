# SPDX-License-Identifier: Apache-2.0
"""Overlap of the largest attention weights of full and of restored rows, for `dmi fidelity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dmi_connector.captures.attention import attention, heads_of, seen_by_attention, weights_of_head
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.store.format.remote_path import Given

LARGEST = 8
"""Number of weights per query to compare, as in attn(8)."""
MEANINGS: Mapping[str, str] = {
    "attention": f"share of the {LARGEST} largest attention weights of each head and query that are among the {LARGEST}"
    " largest if these rows alone are restored ones; of queries that see more keys",
}
_ROWS = 512
"""Maximum number of rows to compare, over all stores. The cost is one product with all rows of the other hook per head
and reduction.
"""


@dataclass(frozen=True)
class _Part:
    """One store.

    rows: number of rows to compare, from the first on. other: full rows of the other hook, [rows, width].
    """

    capture: Capture
    rows: int
    other: np.ndarray


@dataclass(frozen=True)
class AttentionOverlap:
    """Compares the attention of one layer with full and with restored rows.

    queries: whether the restored rows are queries, otherwise keys. found: cache of `_largest` for the full rows, by
    (index of the store, head).
    """

    layer: int
    queries: bool
    parts: tuple[_Part, ...]
    found: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, stores: Sequence[Given], hook: str, layer: int | None) -> AttentionOverlap | None:
        """An overlap for `hook`, or None if it cannot be computed.

        That is the case if the hook is neither the queries nor the keys of attention, if a store lacks either, or if
        stores do not describe the attention of the model.
        """
        parts, left, queries = [], _ROWS, True
        for store in stores:
            with open_capture(store, 0) as capture:
                names = seen_by_attention(capture)
                if layer is None or hook not in names or not left:
                    break
                queries, rows = hook == names[0], min(left, int(capture.attrs["num_tokens"]))
                other = names[1] if queries else names[0]
                try:
                    attention(capture, layer, 0, slice(0, 1))  # raises if it cannot be computed
                except (KeyError, ValueError):
                    return None
                if other not in capture or capture.reduction(other) is not None:
                    return None
                parts.append(_Part(capture, rows, capture.numpy(other, layer, slice(0, rows))))
                left -= rows
        return cls(layer, queries, tuple(parts)) if layer is not None and parts else None

    def measures(self, full: np.ndarray, restored: np.ndarray) -> dict[str, float]:
        """The measures of MEANINGS that apply. full, restored: [n, width], the concatenated rows of all stores."""
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
        """(keys with the largest weights, int [queries, LARGEST]; whether a query sees more than LARGEST keys, bool
        [queries]).
        """
        queries, keys = (rows, part.other) if self.queries else (part.other, rows)
        weights = weights_of_head(part.capture, self.layer, head, queries, keys)
        if weights.shape[1] <= LARGEST:
            return np.zeros((len(weights), LARGEST), int), np.zeros(len(weights), bool)
        found = np.argpartition(-weights, LARGEST - 1, axis=1)[:, :LARGEST]
        return found, (weights > 0).sum(1) > LARGEST
