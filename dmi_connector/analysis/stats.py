# SPDX-License-Identifier: Apache-2.0
"""Statistics of rows: one number for each layer and token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dmi_connector.analysis.training.rows import present_rows
from dmi_connector.analysis.unembedding import entropy_of, log_softmax
from dmi_connector.captures.capture import Capture
from dmi_connector.dtypes import FLOATS
from dmi_connector.option_values import whole_number
from dmi_connector.reduce.statistic import Statistic

_VALUE = Statistic("value", lambda rows, index: rows[:, index], "neuron", signed=True)
_NUMBERS = (
    Statistic("norm", lambda rows, _: np.linalg.norm(rows, axis=-1)),
    Statistic("mean", lambda rows, _: rows.mean(axis=-1), signed=True),
    Statistic("largest magnitude", lambda rows, _: np.abs(rows).max(axis=-1)),
    Statistic("largest value", lambda rows, _: rows.max(axis=-1), signed=True),
    _VALUE,
)


def statistics(capture: Capture, hook: str) -> tuple[Statistic, ...]:
    """The statistics of a hook, the default first. Raises KeyError for an unknown hook."""
    reduction = capture.reduction(hook)
    own = None if reduction is None else reduction.statistics()
    if own is not None:
        return own
    if hook == "logits":
        return (
            Statistic("entropy", lambda rows, _: entropy_of(log_softmax(rows)), unit="nats"),
            Statistic("largest probability", lambda rows, _: np.exp(log_softmax(rows).max(axis=-1))),
            Statistic("log-probability of", _of_token, "token id", unit="nats"),
        )
    if reduction is None and capture.attrs["hooks"][capture.sources(hook)[0].array]["dtype"] not in FLOATS:
        return (_VALUE,)  # expert ids, for which a norm has no meaning
    return _NUMBERS


def find_statistic(capture: Capture, hook: str, name: str) -> Statistic:
    """A statistic of a hook by its name. Raises KeyError for an unknown hook, ValueError for an unknown name."""
    found = {known.name: known for known in statistics(capture, hook)}.get(name)
    if found is None:
        raise ValueError(f"statistic {name!r} does not exist for {hook!r}")
    return found


def _of_token(rows: np.ndarray, token: int) -> np.ndarray:
    return np.asarray(log_softmax(rows)[:, token])


def of_layer(
    capture: Capture, hook: str, layer: int | None, statistic: Statistic, index: int, window: slice
) -> np.ndarray:
    """A statistic of the rows `window` in one layer of a hook, float32 [tokens].

    Missing rows and tokens without logits are NaN. layer: None for a hook that exists once. statistic: one of
    `statistics`. index: the neuron, head or token id, for statistics that take one. window: any slice of the store's
    rows.

    Raises KeyError for a hook or layer that was not captured, and ValueError for an index outside its range.
    """
    _check_index(capture, hook, statistic, index)
    there = present_rows(capture)[window]
    out = np.full(len(there), np.nan, np.float32)
    for places, values in _values(capture, hook, layer, window):
        out[places] = statistic.of(values, index)
    out[~there] = np.nan
    return out


_SAMPLES = 16
"""Number of rows of logits read at a time. It is small, because a row is as wide as the vocabulary."""


def _values(
    capture: Capture, hook: str, layer: int | None, window: slice
) -> Iterator[tuple[slice | np.ndarray, np.ndarray]]:
    """Yield (indexes in the window, the rows [n, width] at these indexes)."""
    if hook != "logits":
        yield slice(None), capture.numpy(hook, layer, window)
        return
    rows = capture.logits_positions - int(capture.attrs["start"])
    chosen = np.arange(len(capture.token_ids))[window]
    places = np.full(len(capture.token_ids), -1)  # -1: outside the window
    places[chosen] = np.arange(len(chosen))
    samples = np.flatnonzero((rows >= 0) & (rows < len(places)))
    samples = samples[places[rows[samples]] >= 0]
    for first in range(0, len(samples), _SAMPLES):
        some = samples[first : first + _SAMPLES]
        yield places[rows[some]], capture.numpy(hook, tokens=some)


def _check_index(capture: Capture, hook: str, statistic: Statistic, index: int) -> None:
    count = capture.shape(hook)[-1] // statistic.values_each
    number = whole_number(index)
    if statistic.index_name and (number is None or not 0 <= number < count):
        raise ValueError(f"{statistic.index_name} {index!r} does not exist: {hook!r} has 0 to {count - 1}")
