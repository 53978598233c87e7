# SPDX-License-Identifier: Apache-2.0
"""A writer process between messages: it maps the pages of the ring, and nothing waits for that."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest

from dmi_connector.store.write import writer as module
from dmi_connector.store.write.messages import pack
from dmi_connector.store.write.writer import RingPages, serve


class Notes:
    """A fake writer that records messages. pages: of the ring. stdin: closed when at most `last` bytes are left."""

    def __init__(self, pages: RingPages, stdin: int, last: int) -> None:
        self.commits: list[Any] = []
        self.handled: list[tuple[Any, int]] = []
        self._pages, self._stdin, self._last = pages, stdin, last

    def handle(self, message: Any) -> None:
        self.handled.append((message["number"], self._pages.left))

    def poll(self) -> None:
        if self._pages.left <= self._last and self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> mmap.mmap:
    monkeypatch.setattr(module, "_MAPPED_BYTES", mmap.PAGESIZE)
    return mmap.mmap(-1, 10 * mmap.PAGESIZE)


def test_messages_and_the_end_of_input_go_before_pages(ring: mmap.mmap) -> None:
    """Mapping all pages of a large ring may take a minute."""
    pages, (read, write) = RingPages(ring), os.pipe()
    os.write(write, pack({"number": 1}) + pack({"number": 2}))
    notes = Notes(pages, write, 6 * mmap.PAGESIZE)
    serve(notes, read, pages)  # type: ignore[arg-type]
    assert notes.handled == [(1, len(ring)), (2, len(ring))], "messages must be handled before the first page is mapped"
    assert pages.left == 6 * mmap.PAGESIZE
    os.close(read)


def test_all_pages_are_mapped_while_there_is_no_message(ring: mmap.mmap) -> None:
    pages, (read, write) = RingPages(ring), os.pipe()
    serve(Notes(pages, write, 0), read, pages)  # type: ignore[arg-type]
    assert pages.left == 0
    os.close(read)


def test_an_older_kernel_maps_pages_when_they_are_read(ring: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_READ", 9999)
    pages = RingPages(ring)
    pages.map_some()
    assert pages.left == 0
