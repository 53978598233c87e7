# SPDX-License-Identifier: Apache-2.0
"""Finds the values of rows with the largest magnitudes, and their indexes, for probes of the form `top`.

The result for a row is 2 k float32 values: k indexes of neurons in the whole row, in descending order of magnitude,
then their values. Of equal magnitudes, the one with the lower index is first. NaN is above all numbers. float32
represents each index below 2^24 exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.reduce.errors import ReduceError

if TYPE_CHECKING:
    import torch

MOST = 16
"""Maximum number of values per row that a probe keeps. It is low, because responses have these values of each layer."""
_WIDEST = 1 << 24
_LOW = 0x7FFFFFFF


def check(text: str, k: int, width: int = MOST, shards: int = 1) -> None:
    """Check k. Raises ReduceError. text: text of the option. width: width of each of `shards` slices."""
    if not 1 <= k <= min(MOST, width):
        raise ReduceError(f"probes: {text} is not valid; it may keep 1 to {min(MOST, width)} values of a row")
    if width * shards > _WIDEST:
        raise ReduceError(f"probes: the rows of {text} have {width * shards} values; at most {_WIDEST} are supported")


def largest(rows: torch.Tensor, k: int, first: int = 0) -> torch.Tensor:
    """The largest values of float rows [tokens, width], float32 [tokens, 2 k].

    first: index of the first column in the whole row.
    """
    import torch

    values = rows.float()
    if k == 1:
        at = values.abs().argmax(1, keepdim=True)  # in torch: the first NaN, else the first of equal values
    else:  # as in topk.py: magnitude and index in one integer, so that all devices give the same order
        magnitude = values.abs().view(torch.int32).to(torch.int64)
        keys = (magnitude << 32) | (_LOW - torch.arange(values.shape[1], device=values.device))
        at = _LOW - (keys.topk(k, dim=1).values & _LOW)
    return torch.cat([(at + first).float(), values.gather(1, at)], 1)


def merge(parts: list[np.ndarray]) -> np.ndarray:
    """Merge the results of slices, in order, each [..., 2 k], to the results for whole rows."""
    k = parts[0].shape[-1] // 2
    ids, values = (np.concatenate([part[..., own] for part in parts], -1) for own in (slice(k), slice(k, None)))
    magnitude = np.abs(np.ascontiguousarray(values, np.float32)).view(np.int32)  # integers order NaN above all
    order = np.argsort(-magnitude, axis=-1, kind="stable")[..., :k]
    return np.concatenate([np.take_along_axis(found, order, -1) for found in (ids, values)], -1)


def over_rows(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The k different neurons with the largest magnitude in any row, in descending order of magnitude.

    Returns (neurons int64, values float32, first row with that value int64), each [layers, k]. A row with NaN for
    neurons is missing. If all rows are missing, the neurons are -1.

    rows: [n, layers * 2 k], layer after layer, with n >= 1. The k values of each row are enough: a neuron that is among
    the k largest over all rows is also among the k largest of the row with its largest value.
    """
    parts = rows.reshape(len(rows), -1, 2, k).transpose(1, 2, 0, 3).reshape(-1, 2, len(rows) * k)
    ids, values = parts[:, 0], parts[:, 1]
    magnitude = np.where(np.isnan(ids), -1, np.abs(values))  # missing rows are below all others
    found = []
    for left in reversed(range(k)):
        best = magnitude.argmax(1)[:, None]
        neuron, value = (np.take_along_axis(x, best, 1) for x in (ids, values))
        found.append((neuron, value, best // k))
        if left:
            magnitude[ids == neuron] = -1
    neurons, most, where = (np.concatenate(column, 1) for column in zip(*found, strict=True))
    return np.where(np.isfinite(neurons), neurons, -1).astype(np.int64), most, where
