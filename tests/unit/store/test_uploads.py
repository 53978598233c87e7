# SPDX-License-Identifier: Apache-2.0
"""The backlog of uploads when the uploader process dies, with a fake process and without S3."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.store.format.object_store import _words
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.write.finish import upload as upload_module
from dmi_connector.store.write.finish import uploads as uploads_module
from dmi_connector.store.write.finish.uploader import Uploader
from dmi_connector.store.write.finish.uploads import Uploads
from dmi_connector.store.write.messages import Decoder
from dmi_connector.store.write.settings import UploadSettings


class Told:
    """Records the notes and counts of an `Uploads`."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()

    def count(self, increase: dict[str, int]) -> None:
        self.counts.update(increase)


class Dying:
    """A fake uploader process that records messages."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.posted, self.skipped = name, list[str](), list[str]()

    def post(self, message: dict[str, str]) -> None:
        self.posted.append(message["store"])
        self.skipped += [message["store"]] if message["type"] == "skip" else []

    def finish(self) -> None:
        """Does nothing."""

    def join(self, timeout: float) -> None:
        """Does nothing."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> tuple[Uploads, Told]:
    """Uploads with three waiting stores. The test kills the uploader process with `die`."""
    monkeypatch.setattr(uploads_module, "Child", Dying)
    told = Told()
    uploads = Uploads(UploadSettings("s3://bucket/x"), "private", told.notes.append, told.count)
    for number in range(3):
        uploads.add(f"s/{number}.zarr", 100)
    return uploads, told


def die(uploads: Uploads) -> Dying:
    """Kill the uploader process. Returns the process that replaces it."""
    uploads._on_death(uploads._child, "signal 9")  # type: ignore[arg-type]
    return uploads._child  # type: ignore[return-value]


def test_an_upload_between_deaths_of_the_process_keeps_the_backlog(dying: tuple[Uploads, Told]) -> None:
    """Waiting stores fail only after several deaths without an upload in between. This holds again after such a
    failure.
    """
    uploads, told = dying
    for number in range(4):
        die(uploads)
        assert die(uploads).posted == ["s/0.zarr", "s/1.zarr", "s/2.zarr"], f"after {2 * number + 2} deaths"
        uploads._on_message(uploads._child, {"uploaded": "s/earlier.zarr", "bytes": 5})  # type: ignore[arg-type]
    assert uploads.backlog == 300 and told.counts == {"bytes_queued": 300}, "an upload of another store must not count"
    uploads._on_message(uploads._child, {"uploaded": "s/1.zarr", "bytes": 60})  # type: ignore[arg-type]
    assert told.counts == {"bytes_queued": 300, "uploaded": 1, "bytes_uploaded": 60} and uploads.backlog == 200
    for _ in range(3):
        assert "upload_failed" not in told.counts
        die(uploads)
    assert told.counts["upload_failed"] == 2 and uploads.backlog == 0 and uploads._child is None
    uploads.add("s/later.zarr", 7)
    for _ in range(2):
        assert die(uploads).posted == ["s/later.zarr"] and uploads.backlog == 7
    assert die(uploads) is None and told.counts["upload_failed"] == 3


def test_a_late_report_of_an_earlier_death_does_not_affect_the_new_process(dying: tuple[Uploads, Told]) -> None:
    uploads, told = dying
    first = uploads._child
    second = die(uploads)
    uploads._on_death(first, "signal 9")  # type: ignore[arg-type]
    assert uploads._child is second and len(told.notes) == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Uploads, Told]]:
    """small(drop): uploads with a backlog of at most 100 bytes."""
    monkeypatch.setattr(uploads_module, "Child", Dying)

    def make(drop: bool) -> tuple[Uploads, Told]:
        told, settings = Told(), UploadSettings("s3://bucket/x", backlog_bytes=100, drop=drop)
        return Uploads(settings, "private", told.notes.append, told.count), told

    return make


def test_under_policy_drop_the_backlog_may_be_as_large_as_its_limit(
    small: Callable[[bool], tuple[Uploads, Told]],
) -> None:
    uploads, told = small(True)
    uploads.add("s/large.zarr", 101)  # a single store of any size may wait
    uploads.add("s/late.zarr", 1)
    uploads._on_message(uploads._child, {"uploaded": "s/large.zarr", "bytes": 101})  # type: ignore[arg-type]
    for name, nbytes in (("a", 60), ("b", 40), ("c", 1)):
        uploads.add(f"s/{name}.zarr", nbytes)
    assert uploads.backlog == 100 and told.counts["bytes_queued"] == 201 and told.counts["upload_failed"] == 2
    assert uploads._child is not None and uploads._child.skipped == ["s/late.zarr", "s/c.zarr"]  # type: ignore[attr-defined]


def test_under_policy_block_the_engine_waits_only_while_more_than_the_limit_waits(
    small: Callable[[bool], tuple[Uploads, Told]],
) -> None:
    uploads, _ = small(False)
    uploads.add("s/a.zarr", 100)
    uploads.wait_for_room(lambda: pytest.fail("waited for room that is there"))
    uploads.add("s/b.zarr", 1)
    asked = iter([True, False])
    uploads.wait_for_room(lambda: next(asked))
    assert next(asked, None) is None, "the call must wait while the backlog is full"


def test_a_failed_store_is_removed_from_the_backlog_and_counted_once(
    small: Callable[[bool], tuple[Uploads, Told]],
) -> None:
    uploads, told = small(False)
    uploads.add("s/a.zarr", 70)
    for _ in range(2):
        uploads._on_message(uploads._child, {"failed": "s/a.zarr", "reason": "denied"})  # type: ignore[arg-type]
    assert uploads.backlog == 0 and told.counts["upload_failed"] == 1
    assert told.notes == ["s/a.zarr is not uploaded, its local copy stays: denied"]


@pytest.mark.parametrize("left", [0, 2])
def test_a_shutdown_reports_the_stores_that_are_left_and_does_not_wait(
    small: Callable[[bool], tuple[Uploads, Told]], left: int
) -> None:
    uploads, told = small(False)
    for number in range(left):
        uploads.add(f"s/{number}.zarr", 70)
    assert uploads.shutdown(0.0) == (not left)
    assert told.notes == ([f"{left} stores are not uploaded yet: dmi repair finishes that"] if left else [])
    uploads.wait_for_room(lambda: pytest.fail("waited for room while it ends"))
    uploads._on_death(uploads._child, "signal 15")  # type: ignore[arg-type]
    assert len(told.notes) == bool(left), "the requested end of a process must not count as a fault"


@pytest.mark.parametrize("remove", [False, True])
def test_the_uploader_is_given_the_settings(remove: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    class Noting(Dying):
        def __init__(self, name: str, *rest: object) -> None:
            super().__init__(name)
            given.append(rest[1])  # type: ignore[arg-type]

    monkeypatch.setattr(uploads_module, "Child", Noting)
    settings = UploadSettings("s3://bucket/x", retry_seconds=77, remove_local=remove)
    Uploads(settings, "private", print, print).add("s/0.zarr", 1)
    options = ["--url", "s3://bucket/x", "--retry-seconds", "77", "--file-mode", "private"]
    assert given == [options + ["--remove-local"] * remove]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("the server said 503 Service Unavailable: <Code>SlowDown</Code>", "status 503, SlowDown"),
        ("403 Forbidden", "status 403"),
        ("a body with <Code>NoSuchBucket</Code>", "NoSuchBucket"),
        ("error: Connection refused, retry_timeout: 3", "connection refused"),
        ("retry_timeout: 3", "OSError"),
        ("an operation timed out", "timed out"),
    ],
)
def test_an_error_of_the_object_store_is_shortened(error: str, words: str) -> None:
    assert _words(OSError(error)) == words


def test_a_removed_directory_does_not_end_the_uploader(tmp_path: Path) -> None:
    """A client removed the directory of its stores. The same process also uploads stores of other directories."""
    answers, end = os.pipe()
    uploader = Uploader(RemotePath("bucket", "x"), 0, False, end)
    for kind in ("upload", "skip"):
        uploader.handle({"type": kind, "store": str(tmp_path / "gone/a.zarr"), "reason": ""})
    uploader.finish()
    told = list(Decoder().feed(os.read(answers, 1 << 16)))
    assert [m["failed"] for m in told if "failed" in m] == [str(tmp_path / "gone/a.zarr")]
    assert len([m for m in told if "note" in m]) == 4, "two notes must name the directory, and one each store"
    os.close(answers)
    os.close(end)


@pytest.mark.parametrize(("remove", "removed", "kept"), [(False, True, True), (True, True, False), (True, False, True)])
def test_a_local_copy_is_kept_unless_it_was_removed_as_requested(
    remove: bool, removed: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []

    def remove_store(_store: Path, line: dict[str, Any]) -> bool:
        lines.append(line)
        return removed

    monkeypatch.setattr(upload_module, "upload_store", lambda *_: {"complete": True})
    monkeypatch.setattr(upload_module, "finish_line", lambda name, _attrs: {"store": name, "event": "finish"})
    monkeypatch.setattr(upload_module, "append_index", lambda *_: None)
    monkeypatch.setattr(upload_module, "remove_store", remove_store)
    to: Any = "s3://bucket/x/a.zarr"
    end = {"store": "a.zarr", "event": "finish"}
    found = upload_module.finish_upload(tmp_path / "a.zarr", to, 1.0, remove)
    assert found == upload_module.UploadResult(tmp_path / "a.zarr", to, None, kept, end)
    assert lines == [{**end, "event": "upload", "local": False}] * remove
