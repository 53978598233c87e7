# SPDX-License-Identifier: Apache-2.0
"""What becomes of the backlog when the uploader process dies, without a process and without S3."""

from __future__ import annotations

from collections import Counter

import pytest

from dmi_connector.store.write import uploads as uploads_module
from dmi_connector.store.write.settings import UploadSettings
from dmi_connector.store.write.uploads import Uploads


class Told:
    """What an `Uploads` says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()

    def count(self, increase: dict[str, int]) -> None:
        self.counts.update(increase)


class Dying:
    """Stands for the uploader process: notes what it is given."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.posted = name, list[str]()

    def post(self, message: dict[str, str]) -> None:
        self.posted.append(message["store"])


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> tuple[Uploads, Told]:
    """Uploads whose process dies when a test says so, with three stores that wait."""
    monkeypatch.setattr(uploads_module, "Child", Dying)
    told = Told()
    uploads = Uploads(UploadSettings("s3://bucket/x"), "private", told.notes.append, told.count)
    for number in range(3):
        uploads.add(f"s/{number}.zarr", 100)
    return uploads, told


def die(uploads: Uploads) -> Dying:
    """The process dies. Returns the next one."""
    uploads._on_death(uploads._child, "signal 9")  # type: ignore[arg-type]
    return uploads._child  # type: ignore[return-value]


def test_an_upload_between_deaths_of_the_process_keeps_the_backlog(dying: tuple[Uploads, Told]) -> None:
    """Only deaths without an upload between them give it up, also after one that gave up."""
    uploads, told = dying
    for number in range(4):
        die(uploads)
        assert die(uploads).posted == ["s/0.zarr", "s/1.zarr", "s/2.zarr"], f"after {2 * number + 2} deaths"
        uploads._on_message(uploads._child, {"uploaded": "s/earlier.zarr", "bytes": 5})  # type: ignore[arg-type]
    assert uploads.backlog == 300 and told.counts == {"bytes_queued": 300}, (
        "one that did not wait is no upload of these"
    )
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


def test_a_death_of_an_earlier_process_is_none_of_the_new_one(dying: tuple[Uploads, Told]) -> None:
    uploads, told = dying
    first = uploads._child
    second = die(uploads)
    uploads._on_death(first, "signal 9")  # type: ignore[arg-type]
    assert uploads._child is second and len(told.notes) == 1
