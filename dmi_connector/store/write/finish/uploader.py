# SPDX-License-Identifier: Apache-2.0
"""The uploader process: `python -m dmi_connector.store.write.finish.uploader ...`, started by the coordinator.

It reads messages on standard input and answers on standard output (see messages.py). At the end of input it finishes
all uploads. It holds a shared lock on each directory whose stores it uploads until it exits, and one on each store that
is not uploaded yet, so that a repair does not upload the store too.

messages    upload, skip (record in the index that a store is not uploaded)
answers     ready, uploaded (store, bytes), failed (store, reason), note
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dmi_connector.store.format.locks import hold_life_lock, hold_upload, share
from dmi_connector.store.format.paths import UMASKS
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.write.child_process import allow_open_files
from dmi_connector.store.write.finish.upload import RemoteIndexPart, finish_upload, note_failure
from dmi_connector.store.write.messages import READ_BYTES, Decoder, Message, pack, write_all
from dmi_connector.urls import parse_url

STORES_AT_ONCE = 2
_NICE = 10
_INDEX_EVERY_S = 1.0
"""Minimum interval between two writes of the index in the bucket."""


class Uploader:
    """Uploads the stores named in messages, STORES_AT_ONCE at a time."""

    def __init__(self, prefix: RemotePath, retry_seconds: float, remove_local: bool, answers: int) -> None:
        self._prefix, self._retry_s, self._remove = prefix, retry_seconds, remove_local
        self._answers = answers
        self._locks: dict[Path, int | None] = {}
        self._lock = threading.Lock()  # of the answers
        self._index_lock = threading.Lock()  # another one, so that no answer waits for a server
        self._part, self._told = RemoteIndexPart(prefix, uuid.uuid4().hex[:12]), 0.0
        self._dirty, self._noted = False, ""
        self._pool = ThreadPoolExecutor(STORES_AT_ONCE, "dmi-upload")

    def handle(self, message: Message) -> None:
        """Act on one message."""
        store = Path(message["store"])
        if store.parent not in self._locks:
            self._share(store.parent)
        if message["type"] == "upload":
            self._pool.submit(self._upload, store, self._hold(store))
        else:
            self._pool.submit(self._skip, store, message["reason"])

    def idle(self) -> None:
        """Write the lines that the index in the bucket still lacks."""
        with self._index_lock:
            self._write_index()

    def finish(self) -> None:
        """Wait for the uploads to end, and write the index in the bucket."""
        self._pool.shutdown()
        self.idle()

    def reply(self, message: Message) -> None:
        """Send an answer. It is dropped if the coordinator is gone."""
        try:
            write_all(self._answers, pack(message))
        except BrokenPipeError:
            return

    def _share(self, directory: Path) -> None:
        try:
            self._locks[directory] = share(directory)
        except OSError as error:  # it was removed, with its stores: their uploads say so
            self._answer({"note": f"{directory}: {error}"})

    def _hold(self, store: Path) -> int | None:
        try:
            return hold_upload(store)
        except OSError as error:  # a repair may then upload it too, which only costs time
            self._answer({"note": f"{store}: {error}"})
            return None

    def _upload(self, store: Path, held: int | None) -> None:
        try:
            self._try(store)
        finally:
            if held is not None:
                os.close(held)

    def _try(self, store: Path) -> None:
        try:
            result = finish_upload(store, self._prefix / store.name, self._retry_s, self._remove)
        except BaseException as error:  # also panics of obstore: the engine must learn that this store is not uploaded
            self._answer({"failed": str(store), "reason": f"{type(error).__name__}: {error}"})
            return
        if result.line is None:
            self._answer({"failed": str(store), "reason": result.reason})
            return
        self._answer({"uploaded": str(store), "bytes": result.line["bytes"]})
        with self._index_lock:
            self._part.add(result.line)
            self._dirty = True
            if time.monotonic() - self._told > _INDEX_EVERY_S:
                self._write_index()

    def _skip(self, store: Path, reason: str) -> None:
        try:
            note_failure(store, self._prefix / store.name, reason)
        except OSError as error:
            self._answer({"note": f"{store}: {error}"})

    def _answer(self, message: Message) -> None:
        with self._lock:
            self.reply(message)

    def _write_index(self) -> None:
        if not self._dirty:
            return
        try:
            self._part.write()
            self._dirty, self._noted = False, ""
        except OSError as error:  # without the index, readers find stores by opening each once
            if str(error) != self._noted:
                self._answer({"note": f"the index of the uploads: {error}"})
            self._noted = str(error)
        self._told = time.monotonic()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="dmi-uploader", description="Started by the coordinator.")
    parser.add_argument("--url", required=True, help="s3://bucket/prefix")
    parser.add_argument("--retry-seconds", type=float, required=True, help="seconds to retry a failed upload")
    parser.add_argument("--remove-local", action="store_true", help="remove local stores after their upload")
    parser.add_argument("--file-mode", choices=tuple(UMASKS), required=True, help="permissions of the index")
    args = parser.parse_args(argv)
    os.nice(_NICE)
    allow_open_files()  # each waiting store has an open, locked file
    os.umask(UMASKS[args.file_mode])
    hold_life_lock()  # it may outlive a killed coordinator, and it removes local copies
    with open("/proc/self/comm", "w") as comm:
        comm.write("dmi-uploader")
    answers = os.dup(1)
    os.dup2(2, 1)  # other output goes to standard error
    uploader = Uploader(RemotePath(*parse_url("upload", args.url)), args.retry_seconds, args.remove_local, answers)
    uploader.reply({"ready": os.getpid()})
    decoder = Decoder()
    while True:
        if not select.select([0], [], [], _INDEX_EVERY_S)[0]:
            uploader.idle()
            continue
        data = os.read(0, READ_BYTES)
        if not data:
            break
        for message in decoder.feed(data):
            uploader.handle(message)
    uploader.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
