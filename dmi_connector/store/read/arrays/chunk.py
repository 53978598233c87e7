# SPDX-License-Identifier: Apache-2.0
"""Reads one inner chunk: checks its crc32c, decodes it, and copies the wanted rows. Every reader uses this module."""

from __future__ import annotations

import numpy as np

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.shard_index import EMPTY
from dmi_connector.store.read.arrays.hook_array import HookArray, Piece
from dmi_connector.store.read.files.store_files import StoredFile
from dmi_connector.store.read.files.thread_pool import Scratch

ABSENT = int(EMPTY)
"""Offset, in a shard index, of a chunk that was not captured."""
_BFLOAT16 = numpy_dtype("bfloat16")
_scratch = Scratch()


def most_stored(array: HookArray) -> int:
    """Maximum bytes of a stored chunk. A larger size in an index is an error, and no memory is allocated for it."""
    return 2 * array.chunk_bytes + 1024


def outside(offset: int, size: int) -> ValueError:
    """The error for a chunk of `size` bytes at `offset` that is not within its file."""
    return ValueError(f"the chunk at byte {offset} with {size} bytes lies outside the file")


def read_piece(array: HookArray, file: StoredFile, offset: int, size: int, piece: Piece) -> None:
    """Read `piece` from the chunk of `size` bytes at `offset` of a shard file.

    A chunk that an incomplete store lacks reads as zeros. Raises ValueError for a damaged chunk, and for a chunk that a
    complete store lacks.
    """
    if offset == ABSENT:
        if array.complete:
            raise ValueError(f"chunk {piece.slot} is missing")
        piece.out[piece.places] = 0
        return
    if size < 4:
        raise outside(offset, size)
    target = _target(array, piece)
    if array.codec.compresses:
        _decompress(array, file, offset, size, piece, target)
    elif size != array.chunk_bytes + 4:
        raise ValueError(f"the chunk has {size - 4} bytes, not {array.chunk_rows} x {array.columns} values")
    elif target is not None:
        rest = _scratch.take("rest", size - len(target))
        file.read_into(offset, [target.data, rest.data])
        crc = crc32c(target)
        _check(crc32c(rest[:-4], crc) if len(rest) > 4 else crc, rest)
    else:
        raw = _scratch.take("raw", size)
        file.read_into(offset, [raw.data])
        body = raw[:-4]
        _check(crc32c(body), raw)
        _put(array, body, piece)


def _target(array: HookArray, piece: Piece) -> np.ndarray | None:
    """The part of the result, uint8 [n], that equals the first n bytes of the decoded chunk; None if there is none."""
    if type(piece.places) is not slice or type(piece.rows) is not slice or piece.rows.start:
        return None
    rows = piece.out[piece.places]
    if rows.dtype != array.bits or not rows.flags.c_contiguous:
        return None
    return rows.reshape(-1).view(np.uint8)


def _check(found: int, end: np.ndarray) -> None:
    if found != int.from_bytes(end[-4:], "little"):
        raise ValueError("the chunk does not match its crc32c")


def _decompress(
    array: HookArray, file: StoredFile, offset: int, size: int, piece: Piece, target: np.ndarray | None
) -> None:
    if size > most_stored(array):
        raise outside(offset, size)
    packed = _scratch.take("packed", size)
    file.read_into(offset, [packed.data])
    body = packed[:-4]
    _check(crc32c(body), packed)
    whole = target is not None and len(target) == array.chunk_bytes
    raw = target if target is not None and whole else _scratch.take("raw", array.chunk_bytes)
    try:
        array.codec.decode(body, raw)
    except ValueError as error:
        raise ValueError(f"the chunk cannot be decompressed ({error})") from error
    if not whole:
        _put(array, raw, piece)


def _put(array: HookArray, raw: np.ndarray, piece: Piece) -> None:
    """Copy the wanted rows of a decoded chunk (uint8) to `out`, and convert them if `out` has a wider dtype."""
    values = raw.view(array.bits).reshape(array.chunk_rows, array.columns)[piece.rows]
    out = piece.out
    if out.dtype == array.bits:
        # Each row is one numpy element, which numpy copies in one piece.
        out.view(array.row)[:, 0][piece.places] = values.view(array.row)[:, 0]
    elif array.dtype != _BFLOAT16:
        out[piece.places] = values.view(array.dtype)
    elif isinstance(piece.places, slice):
        # The upper half of a float32 is a bfloat16. ml_dtypes' conversion does not release the GIL.
        np.left_shift(values, 16, out=out.view("<u4")[piece.places], dtype="<u4", casting="unsafe")
    else:
        out.view("<u4")[piece.places] = np.left_shift(values, 16, dtype="<u4", casting="unsafe")
