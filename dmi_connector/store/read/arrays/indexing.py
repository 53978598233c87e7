# SPDX-License-Identifier: Apache-2.0
"""Parses numpy indexes for arrays in files, to find the rows that an index needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Numbers = slice | np.ndarray
"""Indices along an axis: a slice with step 1, or int64 [n]."""
_ROWS = {"row": "token"}
"""{axis: name of its elements in messages about masks}."""


def row_numbers(wanted: slice | Sequence[int] | np.ndarray, length: int, whose: str, what: str = "row") -> Numbers:
    """Convert row numbers to a slice with step 1, or to int64 [n]. Negative numbers count from the end.

    wanted: a slice, integers, or a mask of `length` booleans. length: number of rows. whose: owner of the rows in error
    messages. what: name of a row in error messages.

    Raises IndexError for rows that do not exist, for a mask of another length, for values that are not integers, and
    for arrays that are not 1-D.
    """
    if isinstance(wanted, slice):
        spanned = range(length)[wanted]
        if spanned.step == 1 or not spanned:
            return slice(spanned.start, spanned.stop) if spanned else slice(0, 0)
        return np.arange(spanned.start, spanned.stop, spanned.step)
    return _listed(np.asarray(wanted), length, whose, what)


def _listed(numbers: np.ndarray, length: int, whose: str, what: str) -> np.ndarray:
    if numbers.dtype == bool:
        if numbers.shape != (length,):
            raise IndexError(
                f"{whose} has {length} {what}s, the mask of {_ROWS.get(what, what)}s has shape {numbers.shape}"
            )
        return np.flatnonzero(numbers)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise IndexError(f"{whose} has no {what} {numbers.flat[0]}; give integers, a slice or a mask")
    if numbers.ndim != 1:
        raise IndexError(
            f"{whose} takes a list of {what}s, not numbers of shape {numbers.shape}; for one {what}, give a list of "
            "length 1"
        )
    beyond = numbers[(numbers < -length) | (numbers >= length)]
    if len(beyond):
        raise IndexError(f"{whose} has {length} {what}s, {what} {beyond[0]} does not exist")
    numbers = numbers.astype(np.int64)
    return np.where(numbers < 0, numbers + length, numbers)


def each_of(numbers: Numbers) -> np.ndarray:
    """Convert row numbers to int64 [n]."""
    return np.arange(numbers.start, numbers.stop) if isinstance(numbers, slice) else numbers


def split_index(index: Any, axes: Mapping[str, int], whose: str) -> tuple[list[Numbers], tuple[Any, ...]]:
    """Split an index of an array [*axes, width] into the indices to read from the files, and an index into the result.

    axes: name and length of each axis except the last. Returns (indices to read along each of these axes, index to
    apply to the array that was read). The result is that of `index` on the whole array.

    Raises IndexError like `row_numbers`, and for None, for masks over several axes, for a single boolean, and for too
    many parts.
    """
    parts = [*index] if isinstance(index, tuple) else [index]
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1 or len(parts) - len(dots) > len(axes) + 1:
        given = "several ellipses; give one" if len(dots) > 1 else "more"
        raise IndexError(f"{whose} has {len(axes) + 1} dimensions, the index {index!r} has {given}")
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(axes) + 1 - len(parts) + len(dots))
    if parts[-1] is None or (np.ndim(parts[-1]) == 0 and np.asarray(parts[-1]).dtype == bool):  # adds a dimension
        raise IndexError(f"{whose} has no column {parts[-1]}; give integers, a slice or a mask")
    wanted: list[Numbers] = []
    rest: list[Any] = []
    for (name, length), part in zip(axes.items(), parts[:-1], strict=True):
        numbers, left = _along(part, length, whose, name)
        wanted.append(numbers)
        rest.append(left)
    rest.append(parts[-1])
    listed = [at for at, part in enumerate(rest) if not isinstance(part, slice)]
    if len(listed) == 1 and listed[0] < len(axes) and np.ndim(rest[listed[0]]) == 1:
        rest[listed[0]] = slice(None)  # a single list: its rows were read in its order, and a slice avoids a copy
    if dots:
        # Numpy moves the axes of lists to the front if an ellipsis is between them, even if it stands for no axis.
        rest.insert(at, Ellipsis)
    return wanted, tuple(rest)


def _along(part: Any, length: int, whose: str, what: str) -> tuple[Numbers, int | slice | np.ndarray]:
    """(indices to read along one axis, index to apply to the array that was read)."""
    if isinstance(part, slice):
        return row_numbers(part, length, whose, what), slice(None)
    given = np.asarray(part)
    if given.size and given.dtype.kind not in "iu":  # a mask, or a value that numpy refuses
        numbers = _listed(given, length, whose, what)
        return numbers, np.arange(len(numbers))
    numbers = _listed(given.reshape(-1), length, whose, what)
    return numbers, 0 if given.ndim == 0 else np.arange(given.size).reshape(given.shape)
