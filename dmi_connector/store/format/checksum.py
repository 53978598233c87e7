# SPDX-License-Identifier: Apache-2.0
"""Computes crc32c checksums: of data, of joined data from the checksums of its parts, and of files of a store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fastcrc
import numpy as np

_iscsi: Callable[[Any, int], int] = fastcrc.crc32.iscsi
"""crc32c, which fastcrc names after iSCSI."""
_POLYNOMIAL = 0x82F63B78
"""The polynomial of crc32c, with the highest power in bit 0."""
_ONE, _X8 = 0x80000000, 0x00800000
"""The polynomials 1 and x**8."""


def crc32c(data: bytes | np.ndarray, start: int = 0) -> int:
    """The crc32c of `data` (bytes or a contiguous uint8 array). start: crc32c of the preceding data.

    It releases the GIL for long data, so that threads that read chunks run in parallel.
    """
    return _iscsi(data, start)


def file_checksum(path: str, content: bytes | np.ndarray) -> int:
    """The checksum of a file of a store (docs/FORMAT.md, section 5). path: its path in the store.

    content: for a shard, the result of `shard_index.shard_content`; for the chunk of a 1-D array, its values; else the
    whole file. It is not always the whole file, because the crc32c of data that ends in its own crc32c depends only on
    the length.
    """
    return crc32c(content, crc32c(path.encode() + b"\0"))


def crc32c_join(first: int, second: int, nbytes: int) -> int:
    """The crc32c of two joined parts of data. first, second: crc32c of the parts. nbytes: length of the second part.

    Appending n bytes multiplies a crc by x**(8 n) modulo the polynomial (the rule of zlib's crc32_combine).
    """
    return _multiply(first, _power(nbytes)) ^ second


@functools.lru_cache(maxsize=256)
def crc32c_of_zeros(nbytes: int) -> int:
    """The crc32c of `nbytes` zero bytes."""
    return crc32c(bytes(nbytes))


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo _POLYNOMIAL. All have the highest power in bit 0."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)
def _power(nbytes: int) -> int:
    """The polynomial x**(8 * nbytes)."""
    result, power = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, power)
        power = _multiply(power, power)
        nbytes >>= 1
    return result
