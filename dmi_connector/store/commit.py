# SPDX-License-Identifier: Apache-2.0
"""Turning a partial directory into a store: small arrays, the root document, the rename, the index line."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

from dmi_connector.store import schema
from dmi_connector.store.group import FileList, plain_array
from dmi_connector.store.shard import crc32c
from dmi_connector.store.wire import Message, unpack_array


def now() -> str:
    """The time in UTC as ISO 8601 with microseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def append_index(directory: str, record: dict[str, Any]) -> None:
    """Append one line to the index of a store directory, with one write, so that lines of several writers
    never mix.

    A line torn by a full disk is closed off first. Raises OSError.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    fd = os.open(os.path.join(directory, schema.INDEX_NAME), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            raise OSError(f"the line for {record.get('store')} was cut short in {schema.INDEX_NAME}")
    finally:
        os.close(fd)


def rank_file(partial: str, rank: int) -> str:
    """Where rank `rank` leaves the list of its files for rank 0."""
    return os.path.join(partial, f".rank-{rank}.json")


def write_rank_done(message: Message) -> None:
    """Say, atomically, that this rank has finished its files. Raises OSError."""
    path = rank_file(message["partial"], message["rank"])
    with open(path + ".tmp", "w") as f:
        json.dump({k: message[k] for k in ("files", "errors", "failed", "bytes_raw")}, f)
    os.rename(path + ".tmp", path)


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

    def run(self) -> Message:
        """Write what is left and give the store its final name. Returns facts for the reply. Raises
        OSError.
        """
        m = self.message
        partial, final = m["partial"], m["final"]
        files: FileList = dict(m["files"])
        attrs: dict[str, Any] = dict(m["attrs"])
        missing = list(attrs.get("missing", []))
        bytes_raw = m["bytes_raw"] + self._merge_ranks(files, missing)
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
        state = "complete" if attrs["complete"] else "incomplete"
        line = {
            "event": "finish",
            "store": os.path.basename(final),
            "state": state,
            "reason": attrs["reason"],
        }
        line |= {k: attrs.get(k) for k in ("key", "request_id", "created", "finished", "num_tokens")}
        append_index(os.path.dirname(final), {**line, "bytes": stored, "bytes_raw": bytes_raw})
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
        with open(os.path.join(partial, "zarr.json"), "wb") as f:
            f.write(root)
        if self.message["fsync"]:
            paths = ["zarr.json", *files]
            folders = {os.path.dirname(os.path.join(partial, p)) for p in paths}
            for path in [os.path.join(partial, p) for p in paths] + sorted(folders):
                fsync_path(path)
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
    """Remove what an incomplete store does not list: shards without an index, arrays without metadata."""
    for folder, names, leaves in os.walk(partial, topdown=False):
        for leaf in leaves:
            path = os.path.join(folder, leaf)
            if os.path.relpath(path, partial) not in files:
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
