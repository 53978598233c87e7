# SPDX-License-Identifier: Apache-2.0
"""Uploads a finished store to S3: every file, compared with what lies there, and the root document last.

So a store is in the bucket if its root document is. An upload that was cut short goes on with the files that lack.
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
"""Bytes of a part of a multipart upload; S3 takes 10,000 parts."""
_FILES_AT_ONCE, _PARTS_AT_ONCE = 8, 2
"""Files of a store, and parts of each, that are under way at a time. Each part is in memory meanwhile."""
PROBE = "dmi-run.jsonl"
"""Name of the empty object in the folder of indexes by which a run looks whether it may write."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_BLOCK_BYTES = 1 << 20


class Differs(RemoteError):
    """What lies in the bucket is not what was sent."""


def part_bytes(size: int) -> int:
    """Bytes of a part of a file of `size` bytes: PART_BYTES, or more MiB where these would be too many parts."""
    return max(PART_BYTES, -(-size // _MOST_PARTS // _BLOCK_BYTES) * _BLOCK_BYTES)


def expected_etag(path: Path) -> str:
    """The ETag that S3 gives to a file that `upload_file` sends, without quotes.

    It is the MD5 of the file, or the MD5 of the MD5s of its parts and their number. With encryption by keys of KMS or
    of a customer, and in some other services, ETags are something else.
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
    """Put one file, in parts if it is large, and compare what lies there then.

    Its ETag shows that it is right. Where it shows nothing, the object is read back. Raises RemoteError, OSError.
    """
    size = path.stat().st_size
    with requests_for(to) as obstore:
        result = obstore.put(
            bucket_store(to), to.key, path, chunk_size=part_bytes(size), max_concurrency=_PARTS_AT_ONCE
        )
    if (result["e_tag"] or "").strip('"') != expected_etag(path) and not _same(path, to):
        raise Differs(f"{to} differs from {path.name} after its upload")


def _same(path: Path, to: RemotePath) -> bool:
    """Whether an object, read back, is a file byte by byte."""
    with requests_for(to) as obstore, open(path, "rb") as file:
        for block in obstore.get(bucket_store(to), to.key).stream(_BLOCK_BYTES):
            if file.read(len(block)) != bytes(block):
                return False
        return not file.read(1)


def upload_store(store: Path, to: RemotePath, retry_seconds: float) -> dict[str, Any]:
    """Upload a finished store to `to`. Returns its root attributes.

    retry_seconds: how long what fails is tried again, with pauses that grow; what would fail again ends at once. Files
    that lie there already are not sent again. Raises RemoteError, OSError and ValueError that say why.
    """
    attrs = read_attrs(store)
    names = sorted(attrs["files"])
    outside = next((name for name in names if leaves_store(name)), None)
    if outside is not None:
        raise ValueError(f"{store} lists the file {outside!r}, which lies outside it")
    deadline = time.monotonic() + retry_seconds
    there = patiently(lambda: _there(to), deadline)

    def send(name: str) -> None:
        if there.get(name) != (store / name).stat().st_size or not _same_etag(store / name, to / name):
            patiently(lambda: upload_file(store / name, to / name), deadline)

    for path in _fitted_files(store, attrs):  # its readers need them, so first
        beside = to.parent / path.parent.name / path.name
        patiently(lambda path=path, beside=beside: _send_once(path, beside), deadline)  # type: ignore[misc]
    with ThreadPoolExecutor(_FILES_AT_ONCE, "dmi-put") as pool:
        for _ in pool.map(send, names):  # the first error drops what has not begun
            pass
    patiently(lambda: upload_file(store / "zarr.json", to / "zarr.json"), deadline)
    return attrs


def _fitted_files(store: Path, attrs: dict[str, Any]) -> list[Path]:
    """The files beside a store that its rows cannot be decoded without. Raises OSError and ValueError for one that
    lacks or is another.
    """
    reductions = [StoredReduction.of(hook, store) for hook in attrs["hooks"].values()]
    files = [file for one in reductions if one is not None and (file := one.file()) is not None]
    return [Path(path) for path in sorted({file.path for file in files})]


def _send_once(path: Path, to: RemotePath) -> None:
    """Upload a file whose name is its hash, unless it is there."""
    try:
        there, _ = look(to)
    except FileNotFoundError:
        there = -1
    if there != path.stat().st_size:
        upload_file(path, to)


def check_upload(url: str) -> None:
    """List what is below a prefix, and write an empty object there. Raises OptionError where either is refused."""
    to = RemotePath(*parse_url("upload", url))
    try:
        with requests_for(to) as obstore:
            next(iter(obstore.list(bucket_store(to), f"{to.key}/" if to.key else None)), None)
            obstore.put(bucket_store(to), (to / INDEX_FOLDER / PROBE).key, b"")
    except OSError as error:
        raise OptionError(f"--upload {url} takes no stores: {error}; mend that, or give another URL") from error


def _there(to: RemotePath) -> dict[str, int]:
    """Sizes of what an earlier upload has left below `to`."""
    prefix = f"{to.key}/"
    with requests_for(to) as obstore:
        pages = obstore.list(bucket_store(to), prefix)
        return {meta["path"][len(prefix) :]: meta["size"] for page in pages for meta in page}


def _same_etag(path: Path, to: RemotePath) -> bool:
    with requests_for(to) as obstore:
        found = obstore.head(bucket_store(to), to.key)["e_tag"]
    return (found or "").strip('"') == expected_etag(path)


def patiently(work: Callable[[], Any], deadline: float) -> Any:
    """Do `work`, again and again until `deadline` (time.monotonic()) while it fails in a way that may pass."""
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
    """What became of an upload.

    reason: why it failed, None if it did not. kept: whether the local copy still exists. line: the line of the index in
    the bucket, without a failure.
    """

    store: Path
    url: str
    reason: str | None = None
    kept: bool = True
    line: dict[str, Any] | None = None


def finish_upload(store: Path, to: RemotePath, retry_seconds: float, remove_local: bool) -> UploadResult:
    """Upload a store, say in the directory's index what became of it, and remove the local copy if that is asked for.

    A copy that is read just then stays. Raises OSError where the index cannot be written.
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
    # With the local copy the last chance goes to tell its end, where that line was lost.
    kept = not remove_local or not remove_store(store, {**end, "event": "upload", "local": False})
    return UploadResult(store, str(to), None, kept, end)


def note_failure(store: Path, to: RemotePath, reason: str) -> None:
    """Say in the index that a store could not be uploaded. Raises OSError."""
    line = {"event": "upload", "store": store.name, "upload": "failed", "upload_reason": reason, "url": str(to)}
    append_index(str(store.parent), line)


def leave_upload(store: Path) -> None:
    """Say in the index that a store is not meant to be uploaded. Raises OSError."""
    append_index(str(store.parent), {"event": "upload", "store": store.name, "upload": None, "url": None})


class RemoteIndexPart:
    """The index of what one process uploads below a prefix: an object that is written anew with each line.

    name: unique. Another one follows after _MOST_LINES.
    """

    _MOST_LINES = 1000

    def __init__(self, prefix: RemotePath, name: str) -> None:
        self._prefix, self._name, self._number = prefix, name, 0
        self._lines: list[bytes] = []

    def add(self, line: dict[str, Any]) -> None:
        """Add the line of a store. The next `write` sends it."""
        self._lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def write(self) -> None:
        """Write the lines that are there. Raises RemoteError; the next call then writes them."""
        while True:
            to = self._prefix / INDEX_FOLDER / f"{self._name}-{self._number}.jsonl"
            with requests_for(to) as obstore:
                obstore.put(bucket_store(to), to.key, b"".join(self._lines[: self._MOST_LINES]))
            if len(self._lines) <= self._MOST_LINES:
                return
            self._lines, self._number = self._lines[self._MOST_LINES :], self._number + 1
