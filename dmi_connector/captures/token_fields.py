# SPDX-License-Identifier: Apache-2.0
"""Reads fields of the token of each row: id, position and phase, and the store and key of the request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.arrays.shard_reader import decode_plain
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.files.store_files import StoreFiles
from dmi_connector.store.read.metadata import attrs_of

DTYPES: dict[str, str] = {
    "token_ids": "int32",
    "next_token_ids": "int32",
    "positions": "int32",
    "phase": "uint8",
    "store": "int64",
    "row": "int64",
    "key": "object",
}
"""{field: dtype of its values}.

token_ids: id of the token. next_token_ids: id of the next token, -1 if the store does not have it. positions: position
in the request. phase: 0 for prompt tokens, 1 for all later ones. store: index of the store. row: row in the store; for
logits, the sample. key: key of the request, or None.
"""
IN_STORE = ("token_ids", "next_token_ids", "positions", "phase")
"""Fields that are read from a store. The others are known without reading the store."""


def plain_array(store: Place, files: StoreFiles, name: str, dtype: str) -> np.ndarray:
    """A 1-D array of a store. Raises ValueError, with the name of the array, if it is damaged."""
    try:
        return decode_plain(files, name, dtype)
    except ValueError as error:
        raise ValueError(f"{store}/{name}: {error}") from error


def store_fields(store: Place, names: Collection[str], complete: bool, sampled: bool = False) -> dict[str, np.ndarray]:
    """Some fields of `IN_STORE`, for each row of a store.

    sampled: give the fields for each row of its logits. If the token of a sample has no row, its ids are -1, its phase
    is 1, and its position is that of the sample. The position of a missing sample is -1.

    complete: whether the store has all rows. Raises ValueError for damaged arrays.
    """
    files = files_of(store)
    read = {"token_ids" if name == "next_token_ids" else name for name in names}
    found = {name: plain_array(store, files, name, DTYPES[name]) for name in read}
    if "next_token_ids" in names:
        ids = found["token_ids"]
        known = np.ones(len(ids), bool) if complete else known_ids(attrs_of(files), ids)
        found["next_token_ids"] = np.append(np.where(known, ids, -1)[1:], -1).astype(np.int32)[: len(ids)]
    if sampled:
        at = plain_array(store, files, "logits_positions", "int32")
        positions = plain_array(store, files, "positions", "int32")
        rows = at - (positions[0] if len(positions) else 0)
        there = (at >= 0) & (rows >= 0) & (rows < len(positions))
        # A sampled token without a row comes after the last row, so it was generated.
        absent: dict[str, int | np.ndarray] = {"phase": 1, "positions": at}
        found = {
            name: _taken(values, rows, there, absent.get(name, -1)) for name, values in found.items() if name in names
        }
    return {name: found[name] for name in names}


def _taken(values: np.ndarray, rows: np.ndarray, there: np.ndarray, absent: int | np.ndarray) -> np.ndarray:
    """`values[rows]`, with `absent` for rows that do not exist. there: whether each row exists."""
    out = np.empty(len(rows), values.dtype)
    out[:] = absent
    out[there] = values[rows[there]]
    return out


def known_ids(attrs: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    """Whether each token id is known, bool [tokens]. A salvaged store may have 0 instead of lost ids.

    attrs: the root attribute of the store. ids: all of its `token_ids`.
    """
    if Cause.TOKEN_IDS_UNKNOWN.value[1] not in (attrs["reason"] or ""):
        return np.ones(len(ids), bool)
    return np.asarray((ids != 0) | rows_present(attrs))


def rows_present(attrs: Mapping[str, Any]) -> np.ndarray:
    """Whether each row of a store is present, bool [tokens]. attrs: its root attribute."""
    there = np.ones(int(attrs["num_tokens"]), bool)
    for start, stop in attrs["missing"]:
        there[start:stop] = False
    return there
