# SPDX-License-Identifier: Apache-2.0
"""Turns a partial directory into a store: writes token arrays and root document, renames it, adds it to the index."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.layout import ALL_TOKEN_ARRAYS
from dmi_connector.store.format import completeness, schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.completeness import Cause, Loss, losses_from_json
from dmi_connector.store.format.paths import no_follow
from dmi_connector.store.read.index import drafts_of
from dmi_connector.store.read.journal import holds_rows, is_journal
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.write.arrays.array_writer import FileList, plain_array
from dmi_connector.store.write.finish.scores import scores_of
from dmi_connector.store.write.messages import Message, unpack_array

Rebuild = Callable[[Message, set[str]], tuple[FileList, list[Loss], int]]
"""Function (commit message, hooks) -> (files written, losses, bytes of the rows); see `salvage.rebuild`."""


def now() -> str:
    """The time in UTC as ISO 8601 with microseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def append_index(directory: str, record: dict[str, Any]) -> None:
    """Append one line to the index of a store directory, in one write, so that lines of different writers never mix.

    If a full disk truncated the last line, a newline is written before the new one. Raises OSError, also if the index
    is a symbolic link.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    path = os.path.join(directory, schema.INDEX_NAME)
    fd = no_follow(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a file: remove it")
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            raise OSError(f"the line for {record.get('store')} was cut short in {schema.INDEX_NAME}")
    finally:
        os.close(fd)


_RANK_PREFIX = ".rank-"
"""Prefix of file names. Each rank above 0 writes its results to such a file, and rank 0 reads it."""
FOUND_BY = ("prompt_len", "model")
"""Attributes that the index repeats, so that readers filter by them without opening stores."""


def finish_line(name: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """The index line of a finished store, without `bytes_raw`. name: NAME.zarr."""
    state = "complete" if attrs["complete"] else "incomplete"
    line = {"event": "finish", "store": name, "state": state, "reason": attrs["reason"]}
    line |= {k: attrs.get(k) for k in ("key", "request_id", "created", "finished", "num_tokens", *FOUND_BY)}
    scores = {"scores": attrs["scores"]} if "scores" in attrs else {}
    return {**line, **drafts_of(attrs), **scores, "bytes": schema.listed_bytes(attrs)}


def append_finish(final: str, attrs: dict[str, Any], bytes_raw: int) -> None:
    """Append the line of a store that was just renamed to its final name. Raises OSError."""
    line = finish_line(os.path.basename(final), attrs)
    append_index(os.path.dirname(final), {**line, "bytes_raw": bytes_raw})


def append_failed(final: str, reason: str, request: Mapping[str, Any]) -> None:
    """Append the line of a capture that failed. Raises OSError.

    request: `key`, `request_id` and `created` of the request, as far as they are known.
    """
    line = {"event": "finish", "store": os.path.basename(final), "state": "failed", "reason": reason}
    line |= {name: request[name] for name in ("key", "request_id", "created") if name in request}
    append_index(os.path.dirname(final), {**line, "finished": now()})


def raw_bytes(store: str, attrs: dict[str, Any]) -> int:
    """Bytes of the rows of a store before compression. attrs: its root attributes. Raises OSError."""
    arrays = {hook["array"] for hook in attrs["hooks"].values()}
    documents = [json.loads(Path(store, name, "zarr.json").read_bytes()) for name in arrays]
    return sum(math.prod(d["shape"]) * ITEMSIZE[d["data_type"]] for d in documents)


def written_attrs(partial: str) -> dict[str, Any] | None:
    """The root attributes of a partial store; None if its root document is missing or incomplete."""
    try:
        attrs = read_attrs(partial)
    except ValueError:
        return None
    return attrs if attrs.get("checksum") == crc32c(schema.canonical(attrs)) else None


def finished_attrs(final: str, request_id: str | None, key: str | None) -> dict[str, Any] | None:
    """The root attributes of a request's store; None if it does not exist or belongs to another request."""
    try:
        attrs = read_attrs(final)
    except ValueError:
        return None
    return attrs if (attrs.get("request_id"), attrs.get("key")) == (request_id, key) else None


def publish(partial: str, final: str, attrs: dict[str, Any], fsync: bool = False) -> None:
    """Rename a partial directory to its final name. Raises OSError.

    attrs: the attributes in the root document, which is already written. fsync: flush all files and directories first.
    """
    expect_free(final)
    if fsync:
        paths = [os.path.join(partial, path) for path in ("zarr.json", *attrs["files"])]
        for path in paths + [folder for folder, *_ in os.walk(partial)]:
            fsync_path(path)
    remove_notes(partial)  # a store with a root document does not need them
    os.rename(partial, final)
    if fsync:
        fsync_path(os.path.dirname(final))


def record_end(final: str, attrs: dict[str, Any], bytes_raw: int, losses: Sequence[Loss]) -> Message:
    """Append the index line of a store that was just renamed to its final name. Returns fields for the writer's answer.

    attrs: its root attributes. If the line cannot be written, the store is still valid, and the field `index_error`
    says why.
    """
    label = None if attrs["complete"] or not losses else completeness.label(losses)
    answer = {"complete": attrs["complete"], "reason": attrs["reason"], "label": label}
    try:
        append_finish(final, attrs, bytes_raw)
    except OSError as error:
        answer["index_error"] = str(error)
    return answer


def expect_free(final: str) -> None:
    """Raise FileExistsError if the name of a store is already taken."""
    if os.path.lexists(final):
        raise FileExistsError(f"store {final} exists already: use another name")


def rank_file(partial: str, rank: int) -> str:
    """The file in which rank `rank` leaves its results for rank 0."""
    return os.path.join(partial, f"{_RANK_PREFIX}{rank}.json")


def is_note(name: str) -> bool:
    """Whether a file of a partial directory is a journal, or has the results of a rank."""
    return is_journal(name) or name.startswith(_RANK_PREFIX)


def remove_notes(partial: str) -> None:
    """Remove journals and results of ranks from a directory that is about to become a store. Raises OSError."""
    for name in filter(is_note, os.listdir(partial)):
        Path(partial, name).unlink(missing_ok=True)  # a late rank may rename its file meanwhile


def write_rank_done(message: Message) -> None:
    """Write the results of this rank for rank 0, atomically. Raises OSError."""
    path = rank_file(message["partial"], message["rank"])
    if os.path.islink(message["partial"]):
        raise OSError(f"{message['partial']} is a link: remove it")
    if not os.path.exists(message["partial"].removesuffix(schema.PARTIAL_SUFFIX)):  # else rank 0 has committed already
        os.makedirs(message["partial"], exist_ok=True)  # the process that makes it may have died
    with open(path + ".tmp", "w", opener=no_follow) as f:
        json.dump({k: message[k] for k in ("files", "losses", "bytes_raw")}, f)
    os.rename(path + ".tmp", path)


def give_up(message: Message, reason: str) -> None:
    """Record in the index that a capture failed. Its partial directory stays for a repair if it holds any rows.

    Raises OSError.
    """
    partial = Path(message["partial"])
    try:
        if partial.is_dir() and not holds_rows(partial):
            sweep(str(partial), {})
            remove_notes(str(partial))
            partial.rmdir()
    finally:
        append_failed(message["final"], reason, message["attrs"])


@dataclass
class Commit:
    """A pending commit. With several ranks it waits for the other ones.

    message: the commit message (capture_ends.py). deadline: time at which it stops waiting (time.monotonic()). losses:
    all known losses. written: the root attributes, if a process wrote the root document and died before it renamed the
    store; else None.
    """

    message: Message
    deadline: float
    losses: list[Loss]
    written: dict[str, Any] | None

    @classmethod
    def start(cls, message: Message) -> Commit:
        """Begin a commit. It waits `message["rank_timeout"]` seconds for the other ranks."""
        written = written_attrs(message["partial"]) if message.get("again") else None
        deadline = time.monotonic() + message["rank_timeout"]
        return cls(message, deadline, losses_from_json(message["losses"]), written)

    def ready(self) -> bool:
        """Whether every rank has finished, or the deadline has passed."""
        return self.written is not None or not self._waiting() or time.monotonic() >= self.deadline

    def _waiting(self) -> list[int]:
        partial, ranks = self.message["partial"], self.message["ranks"]
        return [rank for rank in range(1, ranks) if not os.path.exists(rank_file(partial, rank))]

    def run(self, rebuild: Rebuild | None = None) -> Message:
        """Write the remaining files and rename the store. Returns fields for the answer. Raises OSError.

        rebuild: rebuilds arrays from the journals of a writer that died.
        """
        m = self.message
        partial, final = m["partial"], m["final"]
        if self.written is not None:
            publish(partial, final, self.written, m["fsync"])
            return record_end(final, self.written, raw_bytes(final, self.written), self.losses)
        files: FileList = dict(m["files"])
        attrs: dict[str, Any] = dict(m["attrs"])
        late = self._waiting()
        bytes_raw = m["bytes_raw"] + self._merge_ranks(files, late)
        self._drop_vanished(files)
        if rebuild is not None and not late:  # a late rank may still write
            bytes_raw += self._rebuild(rebuild, files)
        os.makedirs(partial, exist_ok=True)
        for name, packed in m["arrays"].items():
            plain_array(partial, name, ALL_TOKEN_ARRAYS[name], unpack_array(packed), "token", files)
        self._drop_unreadable(attrs, files)
        complete = not self.losses
        if not complete:
            sweep(partial, files)
        attrs |= {"complete": complete, "reason": completeness.reason(self.losses)}
        attrs |= {"missing": completeness.missing(self.losses), "finished": now(), "files": files}
        if found := scores_of(partial, attrs):
            attrs["scores"] = found
        attrs["checksum"] = crc32c(schema.canonical(attrs))
        expect_free(final)
        with open(os.path.join(partial, "zarr.json"), "wb", opener=no_follow) as f:
            f.write(schema.dump(schema.root_document(attrs)))
        publish(partial, final, attrs, m["fsync"])
        return record_end(final, attrs, bytes_raw, self.losses)

    def _all_rows(self) -> list[list[int]]:
        return [[0, self.message["attrs"]["num_tokens"]]]

    def _merge_ranks(self, files: FileList, late: list[int]) -> int:
        """Add the results of the other ranks. Returns the bytes of their rows."""
        bytes_raw = 0
        if late:  # their columns would read as zeros
            seconds = self.message["rank_timeout"]
            self.losses.append(Loss.of(Cause.RANKS_LATE, self._all_rows(), ranks=late, seconds=seconds))
        for rank in set(range(1, self.message["ranks"])) - set(late):
            path = rank_file(self.message["partial"], rank)
            with open(path) as f:
                done = json.load(f)  # the file stays: another process may have to commit again
            files.update(done["files"])
            bytes_raw += done["bytes_raw"]
            self.losses += losses_from_json(done["losses"])
        return bytes_raw

    def _drop_vanished(self, files: FileList) -> None:
        """Leave out files that were removed while the store was written: their rows would read as zeros."""
        gone = [path for path, (size, _) in files.items() if not self._has(path, size)]
        if gone:
            self.losses.append(Loss.of(Cause.FILES_GONE, self._all_rows(), count=len(gone), first=gone[0]))
        for path in gone:
            del files[path]

    def _has(self, path: str, size: int) -> bool:
        try:
            return os.stat(os.path.join(self.message["partial"], path)).st_size == size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _rebuild(self, rebuild: Rebuild, files: FileList) -> int:
        """Rebuild, from journals, the arrays of a writer that died or failed. Returns the bytes of their rows.

        These arrays have no metadata yet.
        """
        hooks = self.message["attrs"].get("hooks", {})
        lacking = {name for name in hooks if f"{name}/zarr.json" not in files}
        if not lacking:
            return 0
        try:
            found, losses, bytes_raw = rebuild(self.message, lacking)
        except (OSError, ValueError) as error:
            self.losses.append(Loss.of(Cause.NOT_SALVAGED, hooks=", ".join(sorted(lacking)), error=str(error)))
            return 0
        files |= found
        self.losses += losses
        return bytes_raw

    def _drop_unreadable(self, attrs: dict[str, Any], files: FileList) -> None:
        """Leave out hooks whose array has no metadata: they cannot be opened."""
        hooks = dict(attrs.get("hooks", {}))
        gone = sorted(name for name, hook in hooks.items() if f"{hook['array']}/zarr.json" not in files)
        if gone:
            self.losses.append(Loss.of(Cause.HOOKS_WITHOUT_DATA, hooks=", ".join(gone)))
        for path in [path for path in files if path.split("/")[0] in {hooks[name]["array"] for name in gone}]:
            del files[path]
        attrs["hooks"] = {name: hook for name, hook in hooks.items() if name not in gone}


def fsync_path(path: str) -> None:
    """Flush a file or directory to its device. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(partial: str, files: FileList) -> None:
    """Remove files that an incomplete store does not list: shards without an index, arrays without metadata.

    Journals and results of ranks are kept: a second commit may need them.
    """
    for folder, names, leaves in os.walk(partial, topdown=False):
        for leaf in leaves:
            path = os.path.join(folder, leaf)
            if os.path.relpath(path, partial) not in files and not is_note(leaf):
                os.unlink(path)
        for name in names:
            path = os.path.join(folder, name)
            if not os.listdir(path):
                os.rmdir(path)


def remove_partial(partial: str) -> None:
    """Remove the partial store of an aborted capture. Raises OSError, but not if it does not exist."""
    if not partial.endswith(schema.PARTIAL_SUFFIX):
        raise ValueError(f"{partial} is not a partial store")
    with contextlib.suppress(FileNotFoundError):  # every rank removes it, and another may be faster
        shutil.rmtree(partial)
