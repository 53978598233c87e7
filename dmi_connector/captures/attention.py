# SPDX-License-Identifier: Apache-2.0
"""Computes attention weights from stored queries and keys. Fused attention kernels do not write the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dmi_connector.captures.own_values import check_own_values
from dmi_connector.option_values import whole_number
from dmi_connector.store.read.files.thread_pool import in_threads
from dmi_connector.store.read.reader import StoreReader


@dataclass(frozen=True)
class _How:
    """The attention parameters of one layer.

    window: maximum number of tokens that a query attends to, including its own; None for no limit. chunk: number of
    tokens of a chunk, if a query attends only to its own chunk; else None.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    chunk: int | None = None
    alibi_slopes: Sequence[float] | None = None

    @classmethod
    def of(cls, capture: StoreReader, layer: int) -> _How:
        """The parameters of a layer, from the attributes of a store."""
        facts = capture.attrs.get("attention", {})
        window, chunk = (facts[name][layer] if name in facts else None for name in ("windows", "chunks"))
        scale = facts.get("scale", float(capture.attrs["dims"]["head_dim"]) ** -0.5)
        return cls(scale, facts.get("soft_cap"), window, chunk, facts.get("alibi_slopes"))

    def first_key(self, query: int) -> int:
        """The row of the first key that a query attends to."""
        first = max(query - self.window + 1, 0) if self.window else 0
        return max(first, query // self.chunk * self.chunk) if self.chunk else first

    def finish(self, scores: np.ndarray, head: int, query: int, key: int) -> None:
        """Turn scaled products q k' [queries, keys] into softmax inputs, in place: soft cap, ALiBi, then the mask.

        query, key: rows of the first query and of the first key.
        """
        if self.soft_cap:
            scores /= np.float32(self.soft_cap)
            np.tanh(scores, out=scores)
            scores *= np.float32(self.soft_cap)
        queries, keys = np.arange(query, query + len(scores))[:, None], np.arange(key, key + scores.shape[1])[None]
        if self.alibi_slopes is not None:
            scores += np.float32(self.alibi_slopes[head]) * (keys - queries).astype(np.float32)
        first, last = self.first_key(query + len(scores) - 1), query + 1
        for part in (
            slice(0, max(first - key, 0)),
            slice(max(last - key, 0), None),
        ):  # every query attends to the keys in between
            own = keys[:, part]
            hidden = own > queries
            if self.window:
                hidden |= own <= queries - self.window
            if self.chunk:
                hidden |= own < queries // self.chunk * self.chunk
            scores[:, part][hidden] = -np.inf


def _check_model(capture: StoreReader) -> None:
    """Raise ValueError for a model whose attention weights cannot be computed from stored hooks."""
    facts = capture.attrs.get("attention", {})
    if facts.get("sinks"):
        raise ValueError(
            f"{capture.path}: attention cannot be computed: the model has attention sinks, which are not stored"
        )
    if facts.get("latent"):
        raise ValueError(
            f"{capture.path}: attention cannot be computed: the model has latent attention, whose keys are projected "
            "from kv_c by weights that are not stored"
        )


def seen_by_attention(capture: StoreReader) -> tuple[str, str]:
    """The hooks of queries and keys of attention: ("q_rot", "k_rot"), or ("q", "k") without rotary embedding.

    Older stores do not say whether the model has rotary embedding. For these, the stored hooks decide.
    """
    held = "q_rot" in capture or "k_rot" in capture or "q" not in capture
    return ("q_rot", "k_rot") if capture.attrs.get("rotary", held) else ("q", "k")


def query_rows(capture: StoreReader, queries: slice | None) -> range:
    """The rows of a store that `queries` selects: all for None, range(0) if there are none.

    Raises ValueError unless `queries` is a slice with step 1.
    """
    if queries is not None and not isinstance(queries, slice):
        raise ValueError(f"queries {queries!r} is not valid; give a slice with step 1, as in slice(3, 4)")
    rows = range(int(capture.attrs["num_tokens"]))[slice(None) if queries is None else queries]
    if rows.step != 1:
        raise ValueError(f"queries {queries} must be a slice with step 1")
    return rows or range(0)


def check_head(head: int | None, heads: int) -> None:
    """Raise ValueError for a head that does not exist. None stands for all heads."""
    number = whole_number(head)
    if head is not None and (number is None or not -heads <= number < heads):
        raise ValueError(f"head {head!r} does not exist: the model has heads 0 to {heads - 1}")


_QUERIES = 128
"""Number of queries computed at a time per head, so that scores take little memory compared with the result."""


def attention(capture: StoreReader, layer: int, head: int | None = None, queries: slice | None = None) -> np.ndarray:
    """Attention weights of one layer, float32 [heads, queries, keys], or [queries, keys] for one `head`.

    The weights are softmax(scale * q k') over the keys that each query attends to (Vaswani et al., 2017). q and k are
    `q_rot` and `k_rot`, or `q` and `k` for models without rotary embedding. In grouped-query attention, the heads of a
    group share their keys. The store has the parameters of each layer: scale, soft cap, sliding window, chunk of
    chunked attention, and ALiBi slopes. For older stores without these parameters, full attention with the scale
    1 / sqrt(head_dim) is assumed.

    queries: rows of the store, all by default. The keys are all rows up to the last query.

    Raises KeyError if queries or keys of the layer were not captured. Raises ValueError

    - for a head that does not exist;
    - if `queries` is not a slice with step 1;
    - if rows up to the last query are missing, or if a reduction did not keep the values of queries or keys;
    - for models with attention sinks or latent attention;
    - if `queries` contains image tokens of a model in which these attend to later tokens of their image.
    """
    rows = query_rows(capture, queries)
    q, k = queries_and_keys(capture, layer, rows, head)
    heads = heads_of(capture)
    if head is not None:
        return weights_of_head(capture, layer, range(heads)[head], q, k, rows.start)
    weights = np.zeros((heads, len(rows), rows.stop), np.float32)

    def fill(one: int) -> None:
        weights_of_head(capture, layer, one, q, k, rows.start, weights[one])

    in_threads(fill, range(heads))
    return weights


def queries_and_keys(
    capture: StoreReader, layer: int, rows: range, head: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of attention for the queries `rows`: float32 queries [rows, width] and keys [rows.stop, width].

    head: the head that will be computed; only its number is checked. Raises KeyError and ValueError like `attention`.
    """
    _check_model(capture)
    names = seen_by_attention(capture)
    if not all(name in capture for name in names):
        preset = " (preset attention)" if names[0] == "q_rot" else ""
        raise KeyError(f"{capture.path} lacks queries or keys of attention; capture {names[0]} and {names[1]}{preset}")
    for name in names:
        check_own_values(capture, name, layer)
    check_head(head, heads_of(capture))
    if image_blocks(capture) and (capture.media[rows.start : rows.stop] >= 0).any():
        raise ValueError(
            f"{capture.path}: attention of image tokens cannot be computed: in this model they see later tokens of "
            "their image; give queries without them"
        )
    lacking = [r for r in capture.missing if r[0] < rows.stop]
    if int(capture.attrs["start"]) or lacking:
        raise ValueError(f"{capture.path} lacks rows before the queries, and attention needs all of them as keys")
    q = capture.numpy(names[0], layer, slice(rows.start, rows.stop))
    return q, capture.numpy(names[1], layer, slice(0, rows.stop))


def image_blocks(capture: StoreReader) -> bool:
    """Whether tokens of an image attend to each other in this capture, as in Gemma 3 on a GPU."""
    return bool(capture.attrs.get("attention", {}).get("image_blocks"))


def heads_of(capture: StoreReader) -> int:
    """The number of heads of queries."""
    return int(capture.attrs["dims"]["heads"])


def weights_of_head(
    capture: StoreReader,
    layer: int,
    head: int,
    q: np.ndarray,
    k: np.ndarray,
    first: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Attention weights of one head, float32 [queries, keys].

    q, k: queries and keys, [rows, width of all heads]. k begins at row 0. first: row of the first query. capture: its
    attributes have the attention parameters of the layer. out: array of zeros for the result.
    """
    weights = np.zeros((len(q), len(k)), np.float32) if out is None else out
    for queries, keys, shares, sums in _softmax(capture, layer, head, q, k, first):
        np.divide(shares, sums, out=weights[queries, keys])
    return weights


def window_of_head(capture: StoreReader, layer: int, head: int, q: np.ndarray, k: np.ndarray, first: int) -> np.ndarray:
    """Attention weights of one head on the keys from row `first` on, float32 [queries, 1 + keys].

    The first column is the sum of the weights on earlier keys. The arguments are those of `weights_of_head`. The
    weights on all keys are in memory for at most _QUERIES queries at a time.
    """
    weights = np.zeros((len(q), 1 + len(k) - first), np.float32)
    for queries, keys, shares, sums in _softmax(capture, layer, head, q, k, first):
        before = max(first - keys.start, 0)
        weights[queries, 0] = shares[:, :before].sum(axis=1) / sums[:, 0]
        start = keys.start + before - first
        np.divide(shares[:, before:], sums, out=weights[queries, 1 + start : 1 + keys.stop - first])
    return weights


def _softmax(
    capture: StoreReader, layer: int, head: int, q: np.ndarray, k: np.ndarray, first: int
) -> Iterator[tuple[slice, slice, np.ndarray, np.ndarray]]:
    """Yield (queries, keys, shares [queries, keys], sums of shares [queries, 1]) for blocks of queries.

    shares: exp(score - maximum), the weights before normalisation. A weight is a share divided by the sum of the
    query's shares. Keys outside `keys` have weight 0.
    """
    how, dims = _How.of(capture, layer), capture.attrs["dims"]
    heads, kv_heads, size = (int(dims[name]) for name in ("heads", "kv_heads", "head_dim"))
    queries = q.reshape(len(q), heads, size)[:, head] * np.float32(how.scale)
    keys = k.reshape(len(k), kv_heads, size)[:, head // (heads // kv_heads)]
    for start in range(0, len(q), _QUERIES):
        block = slice(start, min(start + _QUERIES, len(q)))
        seen = slice(how.first_key(first + start), min(first + block.stop, len(k)))
        shares = queries[block] @ keys[seen].T
        how.finish(shares, head, first + start, seen.start)
        shares -= shares.max(axis=1, keepdims=True)
        np.exp(shares, out=shares)
        yield block, seen, shares, shares.sum(axis=1, keepdims=True)
