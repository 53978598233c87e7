# SPDX-License-Identifier: Apache-2.0
"""The largest values of rows with their indexes, for probes of the form `top`.

A row of it is 2 k values, float32: k indexes of neurons in the whole row, by falling magnitude, then the values of
these. Of equal magnitudes the lower index is first, and NaN is above all. float32 holds each index below 2^24 exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.reduce.errors import ReduceError

if TYPE_CHECKING:
    import torch

MOST = 16
"""Values of a row that a probe keeps, at most: responses have them of each layer."""
_WIDEST = 1 << 24
_LOW = 0x7FFFFFFF


def check(text: str, k: int, width: int = MOST, shards: int = 1) -> None:
    """Raise ReduceError where rows cannot be kept so. text: of the option. width: of each of `shards` slices."""
    if not 1 <= k <= min(MOST, width):
        raise ReduceError(f"probes: {text} is not valid; it may keep 1 to {min(MOST, width)} values of a row")
    if width * shards > _WIDEST:
        raise ReduceError(f"probes: {text} is of rows of {width * shards} values; {_WIDEST} is the most")


def largest(rows: torch.Tensor, k: int, first: int = 0) -> torch.Tensor:
    """Rows [tokens, width] of any float dtype -> float32 [tokens, 2 k]. first: index of their first value."""
    import torch

    values = rows.float()
    if k == 1:
        at = values.abs().argmax(1, keepdim=True)  # torch defines it: the first of equal ones, and of NaN
    else:  # as in topk.py: value and index in one integer, so that the order is total on every device
        magnitude = values.abs().view(torch.int32).to(torch.int64)
        keys = (magnitude << 32) | (_LOW - torch.arange(values.shape[1], device=values.device))
        at = _LOW - (keys.topk(k, dim=1).values & _LOW)
    return torch.cat([(at + first).float(), values.gather(1, at)], 1)


def merge(parts: list[np.ndarray]) -> np.ndarray:
    """The same of whole rows, from those of their slices in order, each [..., 2 k]."""
    k = parts[0].shape[-1] // 2
    ids, values = (np.concatenate([part[..., own] for part in parts], -1) for own in (slice(k), slice(k, None)))
    magnitude = np.abs(np.ascontiguousarray(values, np.float32)).view(np.int32)  # integers order NaN above all
    order = np.argsort(-magnitude, axis=-1, kind="stable")[..., :k]
    return np.concatenate([np.take_along_axis(found, order, -1) for found in (ids, values)], -1)


def over_rows(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(Neurons int64, values float32, rows int64), each [layers, k]: the k different neurons with the largest magnitude
    in any row, by falling magnitude, and the first row with it. Neuron -1 where no row has come.

    rows: [n, layers * 2 k], layer after layer, n from 1 on. The k of each row are enough: a neuron that is among the k
    largest of all rows is also among the k largest of the row with its largest value.
    """
    parts = rows.reshape(len(rows), -1, 2, k).transpose(1, 2, 0, 3).reshape(-1, 2, len(rows) * k)
    ids, values = parts[:, 0], parts[:, 1]
    magnitude = np.where(np.isnan(ids), -1, np.abs(values))  # a row that has not come hides no other
    found = []
    for left in reversed(range(k)):
        best = magnitude.argmax(1)[:, None]
        neuron, value = (np.take_along_axis(x, best, 1) for x in (ids, values))
        found.append((neuron, value, best // k))
        if left:
            magnitude[ids == neuron] = -1
    neurons, most, where = (np.concatenate(column, 1) for column in zip(*found, strict=True))
    return np.where(np.isfinite(neurons), neurons, -1).astype(np.int64), most, where
