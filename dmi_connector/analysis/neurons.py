# SPDX-License-Identifier: Apache-2.0
"""The tokens that activate one neuron most, over many captures."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dmi_connector.analysis.training.rows import BLOCK, check_one_layer, hook_rows, present_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import of_one_model
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.option_values import whole_number
from dmi_connector.store.format.remote_path import Place


@dataclass(frozen=True)
class Activation:
    """One token, and the value of a neuron in the row of that token.

    store: path of the store. row: row of the store. token_id: id of the token. context: ids of the token and of the
    tokens around it. before: index of the token in `context`. values: values of the neuron for the tokens of `context`,
    NaN for missing rows.
    """

    value: float
    store: Place
    row: int
    token_id: int
    context: tuple[int, ...]
    before: int
    values: tuple[float, ...]


def top_tokens(
    captures: Capture | Iterable[Capture],
    hook: str,
    neuron: int,
    layer: int | None = None,
    count: int = 20,
    context: int = 8,
    lowest: bool = False,
) -> list[Activation]:
    """The rows of `captures` where value `neuron` of a hook is largest, the largest first.

    layer: required if several layers were captured. count: number of rows to return. context: number of tokens on each
    side. lowest: return the smallest values instead, the smallest first. Missing rows are left out. Equal values keep
    the order of the captures. Each store is read once, in blocks.

    Raises KeyError for a hook or layer that was not captured. Raises ValueError for a neuron that does not exist, for
    captures of several models, for logits and projections, for several layers without `layer`, for a count below 1, and
    for a context below 0.
    """
    for name, given, least in (("count", count, 1), ("context", context, 0)):
        if (number := whole_number(given)) is None or number < least:
            raise ValueError(f"{name} {given!r} is not valid; use {least} or more")
    sign, best = (-1.0 if lowest else 1.0), list[tuple[float, int, Activation]]()
    seen = 0
    for capture in of_one_model(captures):
        check_neuron(capture, hook, neuron, layer)
        ids = capture.token_ids
        for rows in capture.runs(BLOCK):
            values = hook_rows(capture, hook, layer, rows)[:, neuron]
            keys = np.nan_to_num(sign * values.astype(np.float64), nan=-np.inf)
            for at in np.argsort(-keys, kind="stable")[:count]:
                if len(best) == count and keys[at] <= best[0][0]:
                    break
                row = rows.start + int(at)
                first = max(0, row - context)
                around = tuple(ids[first : row + context + 1].tolist())
                found = Activation(float(values[at]), capture.path, row, int(ids[row]), around, row - first, ())
                push = heapq.heappush if len(best) < count else heapq.heappushpop
                push(best, (float(keys[at]), -seen - int(at), found))
            seen += rows.stop - rows.start
        # Values of the context are read only for rows that are still among the best. The list stays a heap, because its
        # order depends only on the first two elements of each entry.
        best = [
            (key, at, found if found.values else _with_values(capture, found, hook, neuron, layer))
            for key, at, found in best
        ]
    return [found for _, _, found in sorted(best, key=lambda one: one[:2], reverse=True)]


def _with_values(capture: Capture, found: Activation, hook: str, neuron: int, layer: int | None) -> Activation:
    first = found.row - found.before
    rows = slice(first, first + len(found.context))
    values = np.where(present_rows(capture)[rows], hook_rows(capture, hook, layer, rows)[:, neuron], np.nan)
    return replace(found, values=tuple(values.tolist()))


def check_neuron(capture: Capture, hook: str, neuron: int, layer: int | None) -> None:
    """Raise the errors of `top_tokens` for a hook, a layer or a neuron."""
    check_one_layer(capture, hook, layer)
    reduction = capture.reduction(hook, layer)
    if reduction is None or not reduction.computes:
        check_own_values(capture, hook, layer)
    width = capture.shape(hook)[-1]
    number = whole_number(neuron)
    if number is None or not 0 <= number < width:
        raise ValueError(f"neuron {neuron!r} does not exist: {hook!r} has 0 to {width - 1}")
