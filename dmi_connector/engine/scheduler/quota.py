# SPDX-License-Identifier: Apache-2.0
"""Enforces limits on the bytes that requests may write.

The tracker checks these limits when a request arrives. A check makes at most one statvfs. At most once per second, a
check also reads a small file in which the coordinator records the bytes of all stores
(store/write/finish/retention.py).
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from dataclasses import dataclass

from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.engine.context import CaptureContext
from dmi_connector.hooks import Selection, hook_dtype
from dmi_connector.layout import ALL_TOKEN_ARRAYS, TOKEN_ARRAYS
from dmi_connector.option_values import OptionError
from dmi_connector.ranks import shard_of
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.paths import make_directory
from dmi_connector.store.write.finish.retention import RECENT_S, Usage, measure, read_usage, usage_stamp

UNLIMITED = 1 << 60
"""Means no limit: larger than any number of positions or bytes."""
REFRESH_S = 1.0
"""Minimum seconds between two reads of the coordinator's record."""
FORGET_S = RECENT_S
"""Seconds after which reservations of ended requests are forgotten.

The coordinator's record lists stores that were finished in the last FORGET_S seconds. The bytes of older stores count,
so their reservations must not count too. If writers have not begun a store after this time, its rows are still in the
host buffer, whose size limits the error.
"""


def row_bytes(context: CaptureContext, selection: Selection) -> tuple[int, int]:
    """(bytes of a token's row, bytes of a row of logits) of `selection`, summed over all ranks, after reduction."""
    arrays = TOKEN_ARRAYS if context.drafting is None else ALL_TOKEN_ARRAYS
    row, sample = sum(ITEMSIZE[dtype] for dtype in arrays.values()), 0
    for name, layers in selection.hooks.items():
        hook = context.dims.hooks[name]
        if hook.scope == "sampled":
            sample += context.dims.width(hook) * ITEMSIZE[hook_dtype(hook, context.dtype)]
            continue
        shards = shard_of(hook, context.dims, context.tp, 0).shards
        fields = [context.field(name, layer) for layer in layers]
        row += shards * sum(f.nbytes for f in fields if f is not None)
    return row, sample


@dataclass(frozen=True)
class RequestBytes:
    """Bytes of the rows of one request before compression, summed over all ranks.

    start: position of its first row. first_sample: position of its first row of logits, at least `start`. row, sample:
    bytes of a token's row and of a row of logits.
    """

    start: int
    first_sample: int
    row: int
    sample: int

    @classmethod
    def of(cls, bytes_of_rows: tuple[int, int], start: int, prompt_len: int) -> RequestBytes:
        """For rows from position `start` on. bytes_of_rows: see `row_bytes`."""
        return cls(start, max(prompt_len - 1, start), *bytes_of_rows)

    def until(self, end: int) -> int:
        """Bytes of the rows of all positions below `end`."""
        return max(0, end - self.start) * self.row + max(0, end - self.first_sample) * self.sample

    def end_within(self, limit: int) -> int:
        """The largest `end` with `until(end) <= limit`."""
        before = (self.first_sample - self.start) * self.row
        if limit <= before:
            return self.start + limit // self.row
        return self.first_sample + (limit - before) // (self.row + self.sample)


@dataclass
class _Reservation:
    """An admitted capture. nbytes: raw bytes of its prompt's rows. device: number of its file system, or 0. ended: when
    its request ended, in seconds since the epoch; None before.
    """

    nbytes: int
    device: int
    ended: float | None = None


class Quota:
    """Admits new captures of one scheduler. The constructor measures the existing stores.

    The coordinator measures stores from time to time. For a capture that was unfinished at the last measurement, or was
    admitted later, the bytes of its prompt that were not written yet count as used (`max_total_bytes`) and not as free
    (`min_free_bytes`).
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._usage: Usage | None = None
        self._seen = usage_stamp(options.store_dir)  # an existing record is older than the measurement below
        if options.max_total_bytes:
            self._usage = measure(options.store_dir, options.save_path_roots)
        elif options.min_free_bytes:
            self._usage = Usage(0, {}, [], time.time())
        self._read_at = 0.0
        self._reserved: dict[str, _Reservation] = {}  # by path of the store
        self._realpath = functools.lru_cache(256)(os.path.realpath)  # makes a system call per part of a path
        self._lacking: Counter[int] = Counter()  # reserved bytes that were not written when measured, by device

    def admit(self, path: str, nbytes: int) -> None:
        """Admit the capture with the store at `path`. nbytes: raw bytes of its prompt's rows.

        Raises OptionError if the capture would exceed a limit.
        """
        options, directory = self.options, os.path.dirname(path)
        if options.max_request_bytes and nbytes > options.max_request_bytes:
            raise OptionError(
                f"max_request_bytes: the prompt's rows take {nbytes} bytes, this server allows "
                f"{options.max_request_bytes}; ask for fewer hooks, layers or tokens"
            )
        if self._usage is None:
            return
        self._refresh()
        device = 0
        if options.min_free_bytes:
            free, device = self._free(directory)
            lacking = self._lacking[device]
            if free - lacking - nbytes < options.min_free_bytes:
                raise OptionError(
                    f"min_free_bytes: {free} bytes are free in {directory}; running captures reserve {lacking}, this "
                    f"capture needs {nbytes}, and {options.min_free_bytes} must stay free; remove stores (dmi prune)"
                )
        if options.max_total_bytes:
            used = self._usage.nbytes + self._lacking.total()
            if used + nbytes > options.max_total_bytes:
                raise OptionError(
                    f"max_total_bytes: stores take {used} bytes, {nbytes} more are needed, this server allows "
                    f"{options.max_total_bytes}; remove stores (dmi prune)"
                )
        self._reserved[self._real(path)] = _Reservation(nbytes, device)
        self._lacking[device] += nbytes

    def ended(self, path: str, nothing: bool) -> None:
        """The request of an admitted capture has ended. nothing: whether nothing was captured."""
        if self._usage is None or (reservation := self._reserved.get(self._real(path))) is None:
            return
        if nothing:
            del self._reserved[self._real(path)]
            self._lacking[reservation.device] -= reservation.nbytes
        else:
            reservation.ended = time.time()

    def _real(self, path: str) -> str:
        directory, name = os.path.split(path)
        return os.path.join(self._realpath(directory), name)

    def _free(self, directory: str) -> tuple[int, int]:
        """(free bytes on the file system of a directory, number of the file system). Raises OptionError."""
        try:
            make_directory(directory, self.options.file_mode)
            stat = os.statvfs(directory)
        except OSError as error:
            raise OptionError(f"min_free_bytes: the free space of {directory} cannot be read: {error}") from error
        return stat.f_bavail * stat.f_frsize, stat.f_fsid

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < REFRESH_S:
            return
        self._read_at = time.monotonic()
        stamp, moment = usage_stamp(self.options.store_dir), time.time()
        if stamp in (None, self._seen):
            return
        self._seen, usage = stamp, read_usage(self.options.store_dir)
        if usage is not None:
            self._usage, over, there = usage, set(usage.over), usage.unfinished
            old = usage.began - FORGET_S
            for capture in self._reserved.values():  # the clock may have been set back since it ended
                capture.ended = None if capture.ended is None else min(capture.ended, moment)
            self._reserved = {
                path: capture
                for path, capture in self._reserved.items()
                if path not in over and (path in there or capture.ended is None or capture.ended > old)
            }
            self._lacking = Counter()
            for path, capture in self._reserved.items():
                self._lacking[capture.device] += max(0, capture.nbytes - there.get(path, 0))
