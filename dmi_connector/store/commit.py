# SPDX-License-Identifier: Apache-2.0
"""Turning a partial directory into a store: small arrays, the root document, the rename, the index line."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmi_connector.store import schema
from dmi_connector.store.group import FileList, plain_array
from dmi_connector.store.journal import holds_rows, is_journal, remove_journals
from dmi_connector.store.paths import no_follow
from dmi_connector.store.shard import crc32c
from dmi_connector.store.wire import Message, unpack_array

Rebuild = Callable[[Message, set[str]], tuple[FileList, list[list[int]], list[str], int]]
"""(commit message, hooks) -> files made, ranges lost, notes, bytes of the rows; see `repair.rebuild`."""


def now() -> str:
    """The time in UTC as ISO 8601 with microseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def append_index(directory: str, record: dict[str, Any]) -> None:
    """Append one line to the index of a store directory, with one write, so that lines of several writers
    never mix.

    A line torn by a full disk is closed off first. Raises OSError, also where the index is a link or no file.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    path = os.path.join(directory, schema.INDEX_NAME)
    fd = no_follow(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no file: remove it")
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            raise OSError(f"the line for {record.get('store')} was cut short in {schema.INDEX_NAME}")
    finally:
        os.close(fd)


def append_finish(final: str, attrs: dict[str, Any], bytes_raw: int) -> None:
    """Append the line of a store that has just got its final name. Raises OSError."""
    state = "complete" if attrs["complete"] else "incomplete"
    line = {"event": "finish", "store": os.path.basename(final), "state": state, "reason": attrs["reason"]}
    line |= {k: attrs.get(k) for k in ("key", "request_id", "created", "finished", "num_tokens")}
    stored = sum(size for size, _ in attrs["files"].values())
    append_index(os.path.dirname(final), {**line, "bytes": stored, "bytes_raw": bytes_raw})


def rank_file(partial: str, rank: int) -> str:
    """Where rank `rank` leaves the list of its files for rank 0."""
    return os.path.join(partial, f".rank-{rank}.json")


def write_rank_done(message: Message) -> None:
    """Say, atomically, that this rank has finished its files. Raises OSError."""
    path = rank_file(message["partial"], message["rank"])
    if os.path.islink(message["partial"]):
        raise OSError(f"{message['partial']} is a link: remove it")
    if not os.path.exists(message["partial"].removesuffix(schema.PARTIAL_SUFFIX)):  # else rank 0 gave this rank up
        os.makedirs(message["partial"], exist_ok=True)  # whoever was to make it died
    with open(path + ".tmp", "w", opener=no_follow) as f:
        json.dump({k: message[k] for k in ("files", "errors", "failed", "bytes_raw")}, f)
    os.rename(path + ".tmp", path)


def give_up(message: Message, reason: str) -> None:
    """Say in the index that a capture failed. Its partial directory stays for a repair if it holds any rows.

    Raises OSError.
    """
    partial, final = Path(message["partial"]), message["final"]
    line = {"event": "finish", "store": os.path.basename(final), "state": "failed", "reason": reason}
    line |= {k: message["attrs"].get(k) for k in ("key", "request_id", "created")}
    try:
        if partial.is_dir() and not holds_rows(partial):
            sweep(str(partial), {})  # one descriptor at a time: there may be no more
            remove_journals(str(partial))
            partial.rmdir()
    finally:
        append_index(os.path.dirname(final), {**line, "finished": now()})


def merge_ranges(ranges: list[list[int]]) -> list[list[int]]:
    """Sorted, disjoint [start, stop) ranges covering the given ones."""
    merged: list[list[int]] = []
    for start, stop in sorted([int(a), int(b)] for a, b in ranges):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return merged


@dataclass
class Commit:
    """One commit message on its way, waiting for the other tensor-parallel ranks if there are any."""

    message: Message
    deadline: float
    errors: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, message: Message) -> Commit:
        """`message["rank_timeout"]` seconds from now the store is committed without the missing ranks."""
        return cls(message, time.monotonic() + message["rank_timeout"])

    def ready(self) -> bool:
        """Whether every rank is there, or has been waited for long enough."""
        waiting = [
            rank
            for rank in range(1, self.message["ranks"])
            if not os.path.exists(rank_file(self.message["partial"], rank))
        ]
        if waiting and time.monotonic() >= self.deadline:
            self.errors.append(f"tensor-parallel ranks {waiting} did not finish in {self.message['rank_timeout']} s")
            return True
        return not waiting

    def run(self, rebuild: Rebuild | None = None) -> Message:
        """Write what is left and give the store its final name. Returns facts for the reply. Raises OSError.

        rebuild: makes arrays of what a writer left that died.
        """
        m = self.message
        partial, final = m["partial"], m["final"]
        files: FileList = dict(m["files"])
        attrs: dict[str, Any] = dict(m["attrs"])
        missing = list(attrs.get("missing", []))
        all_there = not self.errors  # else a rank may still write
        bytes_raw = m["bytes_raw"] + self._merge_ranks(files, missing)
        self._drop_vanished(files, missing)
        if rebuild is not None and all_there:
            bytes_raw += self._rebuild(rebuild, files, missing)
        os.makedirs(partial, exist_ok=True)
        for name, dtype in schema.TOKEN_ARRAYS.items():
            plain_array(partial, name, dtype, unpack_array(m["arrays"][name]), "token", files)
        self._drop_unreadable(attrs, files)
        attrs["missing"] = merge_ranges(missing)
        reasons = [r for r in [attrs.get("reason"), *self.errors] if r]
        attrs["reason"] = "; ".join(reasons) or None
        attrs["complete"] = bool(attrs.get("complete", True)) and not self.errors and not attrs["missing"]
        if not attrs["complete"]:
            attrs["reason"] = attrs["reason"] or "rows are missing"
            sweep(partial, files)
        attrs["finished"] = now()
        attrs["files"] = files
        attrs["checksum"] = crc32c(schema.canonical(attrs))
        self._publish(schema.dump(schema.root_document(attrs)), files)
        stored = sum(size for size, _ in files.values())
        facts = {
            "complete": attrs["complete"],
            "reason": attrs["reason"],
            "bytes_raw": bytes_raw,
            "bytes": stored,
        }
        append_finish(final, attrs, bytes_raw)
        return facts

    def _merge_ranks(self, files: FileList, missing: list[list[int]]) -> int:
        bytes_raw = 0
        for rank in range(1, self.message["ranks"]):
            path = rank_file(self.message["partial"], rank)
            if not os.path.exists(path):  # timed out: its columns would read as zeros
                missing.append([0, self.message["attrs"]["num_tokens"]])
                continue
            with open(path) as f:
                done = json.load(f)
            os.unlink(path)
            files.update(done["files"])
            missing += done["failed"]
            bytes_raw += done["bytes_raw"]
            self.errors += [f"rank {rank}: {e}" for e in done["errors"]]
        return bytes_raw

    def _drop_vanished(self, files: FileList, missing: list[list[int]]) -> None:
        """Forget files that somebody removed while the store was written: their rows would read as zeros."""
        gone = [path for path, (size, _) in files.items() if not self._has(path, size)]
        if gone:
            self.errors.append(f"{len(gone)} files are gone from the partial store, the first: {gone[0]}")
            missing.append([0, self.message["attrs"]["num_tokens"]])
        for path in gone:
            del files[path]

    def _has(self, path: str, size: int) -> bool:
        try:
            return os.stat(os.path.join(self.message["partial"], path)).st_size == size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _rebuild(self, rebuild: Rebuild, files: FileList, missing: list[list[int]]) -> int:
        """Make arrays of what the journals know of hooks without metadata: their writer died, or failed."""
        attrs = self.message["attrs"]
        lacking = {name for name in attrs.get("hooks", {}) if f"{name}/zarr.json" not in files}
        if not lacking:
            return 0
        try:
            found, lost, notes, bytes_raw = rebuild(self.message, lacking)
        except (OSError, ValueError) as error:
            self.errors.append(f"what is left of {', '.join(sorted(lacking))} cannot be salvaged: {error}")
            return 0
        files |= found
        missing += lost
        self.errors += notes
        return bytes_raw

    def _drop_unreadable(self, attrs: dict[str, Any], files: FileList) -> None:
        """Forget hooks whose array never got its metadata: they cannot be opened."""
        hooks = dict(attrs.get("hooks", {}))
        gone = sorted(name for name, hook in hooks.items() if f"{hook['array']}/zarr.json" not in files)
        if gone:
            self.errors.append(f"hooks without data: {', '.join(gone)}")
        attrs["hooks"] = {name: hook for name, hook in hooks.items() if name not in gone}

    def _publish(self, root: bytes, files: FileList) -> None:
        partial, final = self.message["partial"], self.message["final"]
        if os.path.lexists(final):
            raise FileExistsError(f"store {final} exists already: use another name")
        with open(os.path.join(partial, "zarr.json"), "wb", opener=no_follow) as f:
            f.write(root)
        if self.message["fsync"]:
            paths = ["zarr.json", *files]
            folders = {os.path.dirname(os.path.join(partial, p)) for p in paths}
            for path in [os.path.join(partial, p) for p in paths] + sorted(folders):
                fsync_path(path)
        remove_journals(partial)  # only now: a store with its root document no longer needs them
        os.rename(partial, final)
        if self.message["fsync"]:
            fsync_path(os.path.dirname(final))


def fsync_path(path: str) -> None:
    """Flush a file or directory to its device. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(partial: str, files: FileList) -> None:
    """Remove what an incomplete store does not list: shards without an index, arrays without metadata. Not journals."""
    for folder, names, leaves in os.walk(partial, topdown=False):
        for leaf in leaves:
            path = os.path.join(folder, leaf)
            if os.path.relpath(path, partial) not in files and not is_journal(leaf):
                os.unlink(path)
        for name in names:
            path = os.path.join(folder, name)
            if not os.listdir(path):
                os.rmdir(path)


def remove_partial(partial: str) -> None:
    """Remove an aborted capture. Raises OSError when something else than absence is in the way."""
    if not partial.endswith(schema.PARTIAL_SUFFIX):
        raise ValueError(f"{partial} is not a partial store")
    with contextlib.suppress(FileNotFoundError):  # every rank removes it: another may be faster
        shutil.rmtree(partial)
