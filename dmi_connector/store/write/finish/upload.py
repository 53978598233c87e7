# SPDX-License-Identifier: Apache-2.0
"""Uploads a finished store to S3: checks every uploaded file, and uploads the root document last.

So a store in the bucket is complete if it has a root document. An interrupted upload continues with the missing files.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmi_connector.option_values import OptionError
from dmi_connector.store.format.object_store import RemoteError, bucket_store, requests_for
from dmi_connector.store.format.paths import leaves_store
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.format.schema import INDEX_FOLDER
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.remote_files import look
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.write.finish.commit import append_index, finish_line, now
from dmi_connector.store.write.finish.retention import remove_store
from dmi_connector.urls import parse_url

PART_BYTES, _MOST_PARTS = 8 << 20, 9000
"""Part size and maximum number of parts of a multipart upload. S3 allows 10,000 parts."""
_FILES_AT_ONCE, _PARTS_AT_ONCE = 8, 2
"""Concurrent uploads: files of a store, and parts of a file. Each of these parts is in memory."""
_WRITE_TEST = "dmi-run.jsonl"
"""Name of an empty object in the folder of indexes. A run writes it to check that it may write."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_BLOCK_BYTES = 1 << 20


class Differs(RemoteError):
    """An object in the bucket differs from the file that was sent."""


def part_bytes(size: int) -> int:
    """Part size for a file of `size` bytes: PART_BYTES, or more MiB if that gives too many parts."""
    return max(PART_BYTES, -(-size // _MOST_PARTS // _BLOCK_BYTES) * _BLOCK_BYTES)


def expected_etag(path: Path) -> str:
    """The ETag that S3 gives to a file that `upload_file` sends, without quotes.

    It is the MD5 of the file; for a file in parts, the MD5 of the MD5s of its parts, and their number. ETags are
    different in some other services, and with encryption by KMS keys or customer keys.
    """
    size, digests = path.stat().st_size, []
    part = part_bytes(size)
    with open(path, "rb") as file:
        for _ in range(max(1, -(-size // part))):
            digest, left = hashlib.md5(usedforsecurity=False), part
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
            digests.append(digest)
    if len(digests) == 1:
        return digests[0].hexdigest()
    return f"{hashlib.md5(b''.join(d.digest() for d in digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def upload_file(path: Path, to: RemotePath) -> None:
    """Upload one file, in parts if it is large, and check the uploaded object.

    If its ETag is not the expected one, the object is read back and compared. Raises RemoteError and OSError.
    """
    size = path.stat().st_size
    with requests_for(to) as obstore:
        result = obstore.put(
            bucket_store(to), to.key, path, chunk_size=part_bytes(size), max_concurrency=_PARTS_AT_ONCE
        )
    if (result["e_tag"] or "").strip('"') != expected_etag(path) and not _same(path, to):
        raise Differs(f"{to} differs from {path.name} after its upload")


def _same(path: Path, to: RemotePath) -> bool:
    """Read an object back. Returns whether it equals the file byte by byte."""
    with requests_for(to) as obstore, open(path, "rb") as file:
        for block in obstore.get(bucket_store(to), to.key).stream(_BLOCK_BYTES):
            if file.read(len(block)) != bytes(block):
                return False
        return not file.read(1)


def upload_store(store: Path, to: RemotePath, retry_seconds: float) -> dict[str, Any]:
    """Upload a finished store to `to`. Returns its root attributes.

    retry_seconds: how long failing requests are retried, with growing pauses. Permanent errors are not retried. Files
    that are already there are not sent again. Raises RemoteError, OSError and ValueError with the reason.
    """
    attrs = read_attrs(store)
    names = sorted(attrs["files"])
    outside = next((name for name in names if leaves_store(name)), None)
    if outside is not None:
        raise ValueError(f"{store} lists the file {outside!r}, which lies outside it")
    deadline = time.monotonic() + retry_seconds
    there = patiently(lambda: _there(to), deadline)

    def send(name: str) -> None:
        same_size = there.get(name) == (store / name).stat().st_size
        if not (same_size and patiently(lambda: _same_etag(store / name, to / name), deadline)):
            patiently(lambda: upload_file(store / name, to / name), deadline)

    for path in _fitted_files(store, attrs):  # first, because readers of the store need them
        beside = to.parent / path.parent.name / path.name
        patiently(lambda path=path, beside=beside: _send_once(path, beside), deadline)  # type: ignore[misc]
    with ThreadPoolExecutor(_FILES_AT_ONCE, "dmi-put") as pool:
        for _ in pool.map(send, names):  # the first error cancels files that were not begun
            pass
    patiently(lambda: upload_file(store / "zarr.json", to / "zarr.json"), deadline)
    return attrs


def _fitted_files(store: Path, attrs: dict[str, Any]) -> list[Path]:
    """The files next to a store that its rows need for decoding.

    Raises OSError and ValueError if one is missing or has other content.
    """
    reductions = [StoredReduction.of(hook, store) for hook in attrs["hooks"].values()]
    files = [file for one in reductions if one is not None and (file := one.file()) is not None]
    return [Path(path) for path in sorted({file.path for file in files})]


def _send_once(path: Path, to: RemotePath) -> None:
    """Upload a file whose name is its hash, unless it is already there."""
    try:
        there, _ = look(to)
    except FileNotFoundError:
        there = -1
    if there != path.stat().st_size:
        upload_file(path, to)


def check_upload(url: str) -> None:
    """List a prefix, and write an empty object below it. Raises OptionError if one of them is refused."""
    to = RemotePath(*parse_url("upload", url))
    try:
        with requests_for(to) as obstore:
            next(iter(obstore.list(bucket_store(to), f"{to.key}/" if to.key else None)), None)
            obstore.put(bucket_store(to), (to / INDEX_FOLDER / _WRITE_TEST).key, b"")
    except OSError as error:
        raise OptionError(f"--upload {url} cannot be written: {error}; correct that, or give another URL") from error


def _there(to: RemotePath) -> dict[str, int]:
    """Sizes of the files below `to` that an earlier upload has sent, by name."""
    prefix = f"{to.key}/"
    with requests_for(to) as obstore:
        pages = obstore.list(bucket_store(to), prefix)
        return {meta["path"][len(prefix) :]: meta["size"] for page in pages for meta in page}


def _same_etag(path: Path, to: RemotePath) -> bool:
    """Whether an object exists and has the ETag of the file."""
    try:
        with requests_for(to) as obstore:
            found = obstore.head(bucket_store(to), to.key)["e_tag"]
    except FileNotFoundError:  # it was removed after the listing
        return False
    return (found or "").strip('"') == expected_etag(path)


def patiently(work: Callable[[], Any], deadline: float) -> Any:
    """Call `work`, and retry it until `deadline` (time.monotonic()) while its error may be temporary."""
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return work()
        except RemoteError as error:
            if error.lasting or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@dataclass(frozen=True)
class UploadResult:
    """The result of an upload.

    reason: why it failed, None on success. kept: whether the local copy still exists. line: on success, the line for
    the index in the bucket.
    """

    store: Path
    url: str
    reason: str | None = None
    kept: bool = True
    line: dict[str, Any] | None = None


def finish_upload(store: Path, to: RemotePath, retry_seconds: float, remove_local: bool) -> UploadResult:
    """Upload a store, record the result in the index of its directory, and with `remove_local` remove the local copy.

    A local copy that a process reads stays. Raises OSError if the index cannot be written.
    """
    try:
        attrs = upload_store(store, to, retry_seconds)
    except (OSError, ValueError) as error:
        reason = f"{store.name} was removed before it was uploaded" if not store.exists() else str(error)
        note_failure(store, to, reason)
        return UploadResult(store, str(to), reason)
    line = {"event": "upload", "store": store.name, "upload": "done", "upload_reason": None, "url": str(to)}
    append_index(str(store.parent), {**line, "uploaded": now()})
    end = finish_line(store.name, attrs)
    # The line repeats the finish line: if that one was lost, it could not be restored without the local copy.
    kept = not remove_local or not remove_store(store, {**end, "event": "upload", "local": False})
    return UploadResult(store, str(to), None, kept, end)


def note_failure(store: Path, to: RemotePath, reason: str) -> None:
    """Record in the index that a store could not be uploaded. Raises OSError."""
    line = {"event": "upload", "store": store.name, "upload": "failed", "upload_reason": reason, "url": str(to)}
    append_index(str(store.parent), line)


def leave_upload(store: Path) -> None:
    """Record in the index that a store will not be uploaded. Raises OSError."""
    append_index(str(store.parent), {"event": "upload", "store": store.name, "upload": None, "url": None})


class RemoteIndexPart:
    """The index of the stores that one process uploads below a prefix: an object that is rewritten for new lines.

    name: a unique name. After _MOST_LINES lines, another object follows.
    """

    _MOST_LINES = 1000

    def __init__(self, prefix: RemotePath, name: str) -> None:
        self._prefix, self._name, self._number = prefix, name, 0
        self._lines: list[bytes] = []

    def add(self, line: dict[str, Any]) -> None:
        """Add the line of a store. The next `write` uploads it."""
        self._lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def write(self) -> None:
        """Upload the lines. Raises RemoteError; the next call then uploads them."""
        while True:
            to = self._prefix / INDEX_FOLDER / f"{self._name}-{self._number}.jsonl"
            with requests_for(to) as obstore:
                obstore.put(bucket_store(to), to.key, b"".join(self._lines[: self._MOST_LINES]))
            if len(self._lines) <= self._MOST_LINES:
                return
            self._lines, self._number = self._lines[self._MOST_LINES :], self._number + 1
