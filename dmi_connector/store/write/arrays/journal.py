# SPDX-License-Identifier: Apache-2.0
"""Writes journals, from which rows are recovered after a writer was killed (docs/FORMAT.md, section 10).

The index of a shard is in the writer's memory until the shard is full or the capture ends. So each writer also keeps a
journal of its arrays of a capture. It has one record per chunk whose bytes are in the shard files. The journal of one
writer begins with facts about the capture. store/read/journal.py reads journals.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.read.journal import (
    CHUNK,
    CHUNK_HEAD,
    CLOSE,
    FRAME,
    HEADER,
    JOURNAL_PREFIX,
    ROWS,
    ROWS_HEAD,
)
from dmi_connector.store.write.arrays.shard_writer import FileCache

logger = logging.getLogger(__name__)


class Journal:
    """Writes the journal of those arrays of a capture that one writer has.

    about: facts about the capture, None if another journal has them. With `about` the file is created at once, else
    with the first record. suffix: suffix of the file name, for writers that write some segments of arrays.

    No method raises. If a record cannot be written, a warning is logged once, and the next record overwrites it. The
    chunk of that record cannot be recovered if the writer is killed.
    """

    def __init__(
        self,
        root: str,
        arrays: Sequence[ArraySpec],
        layout: PayloadLayout,
        files: FileCache,
        about: dict[str, Any] | None,
        suffix: str = "",
    ) -> None:
        name = f"{arrays[0].rank}-{arrays[0].name}" if arrays else f"rank{about['rank'] if about else ''}"
        self.path = os.path.join(root, JOURNAL_PREFIX + name + suffix)
        self._numbers = {spec.name: i for i, spec in enumerate(arrays)}
        header: dict[str, Any] = {"arrays": [spec.to_json() for spec in arrays], "codec": layout.codec}
        header |= {"chunk_tokens": layout.chunk_tokens, "segment_tokens": layout.segment_tokens, "about": about}
        self._header = _frame(HEADER + json.dumps(header).encode())
        self._files, self._end, self._failed = files, 0, False
        if about is not None:
            self._write(self._header)

    def chunk(self, first: int, count: int, places: Sequence[bytes], token_ids: bytes) -> None:
        """Add a record for a chunk of token rows.

        places: packed places of the chunk in the shard of each token array, in the order of the arrays. token_ids:
        int32, or empty.
        """
        self._append(b"".join((CHUNK_HEAD.pack(CHUNK, first, count), *places, token_ids)))

    def rows(self, name: str, first: int, positions: Sequence[int], places: Sequence[bytes]) -> None:
        """Add a record for rows of a per-sample array, with one place and one position per row."""
        head = ROWS_HEAD.pack(ROWS, self._numbers[name], first, len(positions))
        self._append(b"".join((head, np.array(positions, "<i4").tobytes(), *places)))

    def close(self, length: int, samples: dict[str, int]) -> None:
        """Add the final length of the capture, and close the file."""
        if self._end:
            self._append(CLOSE + json.dumps({"length": length, "samples": samples}).encode())
        self.release()

    def release(self) -> None:
        """Close the file."""
        try:
            self._files.close(self.path)
        except OSError as error:
            self._warn(error)

    def _append(self, record: bytes) -> None:
        self._write(_frame(record) if self._end else self._header + _frame(record))

    def _write(self, data: bytes) -> None:
        try:
            fd = self._files.get(self.path)
            # Truncate only if needed: ext4 flushes a truncated file when it is closed.
            if not self._end and os.fstat(fd).st_size:
                os.ftruncate(fd, 0)
            wrote = os.pwrite(fd, data, self._end)
            if wrote < len(data):
                raise OSError(f"only {wrote} of {len(data)} bytes were written")
            self._end += wrote
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            logger.warning("dmi: %s: some chunks cannot be salvaged if the writer is killed: %s", self.path, error)
        self._failed = True


def _frame(record: bytes) -> bytes:
    return FRAME.pack(len(record), crc32c(record)) + record
