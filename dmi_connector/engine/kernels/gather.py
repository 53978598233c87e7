# SPDX-License-Identifier: Apache-2.0
"""Gathers rows into payloads. A payload is the memory of one chunk before it is encoded."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""Number of 4-byte units that a program copies at a time."""
_TOKENS = 8
"""Number of rows that a program copies."""
_ALIGN = 16
"""Each payload begins at a multiple of this many bytes."""


def gather_index(payloads: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """The `index` of `gather_rows` for these payloads, int64 [rows, 4].

    payloads: for each payload, its byte offset (a multiple of 16) and the slots of its rows (int64 [rows]).
    """
    index = np.empty((sum(len(slots) for _, slots in payloads), 4), np.int64)
    at = 0
    for start, slots in payloads:
        assert start % _ALIGN == 0, start
        count = len(slots)
        mine = index[at : at + count]
        mine[:, 0], mine[:, 1], mine[:, 2], mine[:, 3] = slots, start, count, np.arange(count)
        at += count
    return index


def gather_rows(rows: torch.Tensor, index: torch.Tensor, table: torch.Tensor, payload: torch.Tensor) -> None:
    """Gather rows into payloads. A payload has one array [rows of the payload, bytes of the field] per field of
    `table`.

    rows: uint8 [slots, row bytes], contiguous. index: int64 [n, 4], for each row: its slot, byte offset of its payload
    (a multiple of 16), number of rows of this payload, index of the row in the payload. table: `ChunkLayout.table`,
    int64 [fields, 3]: byte offset in the row, bytes, and byte offset in a payload of one row, all multiples of 4.
    payload: uint8 [bytes], the memory of all payloads. All are on one device.
    """
    (gather_rows_triton if rows.is_cuda else gather_rows_torch)(rows, index, table, payload)


def gather_rows_torch(rows: torch.Tensor, index: torch.Tensor, table: torch.Tensor, payload: torch.Tensor) -> None:
    """The torch version of `gather_rows_triton`, for CPUs."""
    for start in index[:, 1].unique().tolist():
        mine = index[index[:, 1] == start]
        count = int(mine[0, 2])
        picked = rows[mine[:, 0]]
        for source, nbytes, base in table.tolist():
            begin = start + base * count
            block = payload[begin : begin + nbytes * count].view(count, nbytes)
            block.index_copy_(0, mine[:, 3], picked[:, source : source + nbytes])


def gather_rows_triton(rows: torch.Tensor, index: torch.Tensor, table: torch.Tensor, payload: torch.Tensor) -> None:
    """Launch the kernel."""
    assert rows.dtype == payload.dtype == torch.uint8 and rows.is_contiguous() and payload.is_contiguous()
    assert index.dtype == table.dtype == torch.int64 and index.is_contiguous() and table.is_contiguous()
    unit = torch.int32  # each field has a multiple of 4 bytes, and Triton vectorises copies of int32 to 16 bytes
    fields, count = table.shape[0], index.shape[0]
    grid = (fields * -(-count // _TOKENS),)  # one axis: CUDA allows at most 65,535 programs on the others
    gather_rows_kernel[grid](
        rows.view(unit), index, table, payload.view(unit), fields, count, rows.shape[1] // 4,
        TOKENS=_TOKENS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["fields", "count"])
def gather_rows_kernel(
    rows, index, table, payload, fields, count, row_units, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows / TOKENS x fields). A program copies one field of TOKENS rows, in units of 4 bytes.

    Adjacent programs copy the fields of the same rows.
    """
    line = table + tl.program_id(0) % fields * 3
    source = tl.load(line) // 4
    units = tl.load(line + 1) // 4
    base = tl.load(line + 2) // 4
    first = tl.program_id(0) // fields * TOKENS
    for row in range(first, min(first + TOKENS, count)):
        entry = index + row * 4
        data = rows + tl.load(entry) * row_units + source
        block = tl.load(entry + 1) // 4 + base * tl.load(entry + 2)
        out = payload + block + tl.load(entry + 3) * units
        for start in range(0, units, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < units
            tl.store(out + columns, tl.load(data + columns, mask=mask), mask=mask)
