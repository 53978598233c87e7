# SPDX-License-Identifier: Apache-2.0
"""Copies from the GPU in slices, with a fake driver that records calls. Their speed is measured on a GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmi_connector.engine.transfer import gpu_copies as copies


class Stream:
    numbers = itertools.count(100)

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream, self.waited = next(Stream.numbers), []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Event:
    numbers = itertools.count(200)

    def __init__(self, blocking: bool = False) -> None:
        self.cuda_event, self.blocking, self.stream = next(Event.numbers), blocking, None

    def record(self, stream: Stream) -> None:
        self.stream = stream


NAMES = {"cuMemcpyDtoHAsync_v2": "copy", "cuStreamWaitEvent": "wait", "cuEventRecord": "record"}
failing: dict[str, int] = {}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    made: list[tuple[Any, ...]] = []
    functions = []

    def function(name: str, kinds: tuple[Any, ...]) -> Any:
        def call(*arguments: int) -> int:
            made.append((name, *arguments))
            return failing.get(name, 0)

        functions.append(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call))
        return functions[-1]

    failing.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    driver = SimpleNamespace(**{name: function(NAMES[name], kinds) for name, kinds in copies._DRIVER.items()})
    monkeypatch.setattr(copies.ctypes, "PyDLL", lambda _: driver)
    yield made


def test_slices_cover_every_byte_once_on_two_streams_in_turn(calls: list[tuple[Any, ...]]) -> None:
    base = 4000
    copier = copies.SliceCopier(100, torch.device("cuda"), base)
    copier.start()
    streams, events = copier._streams, copier._events
    last = None
    for nbytes, target in ((250, 5000), (100, 9000), (1, 9500), (400, 10_000), (250, 7030), (20, 7030), (90, 7030)):
        source, ready = torch.zeros(nbytes, dtype=torch.uint8), Event()
        calls.clear()
        copied = copier.copy(source, target, ready)
        slices = [call[1:] for call in calls if call[0] == "copy"]
        at = 0
        for place, address, size, _ in slices:
            assert (place, address) == (target + at, source.data_ptr() + at) and 0 < size <= 100
            assert (place - base) // 100 == (place - base + size - 1) // 100, "a slice must not cross a multiple of 100"
            at += size
        assert at == nbytes
        used = [stream for *_, stream in slices]
        assert used[0] != last and all(a != b for a, b in itertools.pairwise(used)), (
            "slices must alternate between streams"
        )
        last = used[-1]
        first = streams[0] if streams[0].cuda_stream == used[0] else streams[1]
        assert first.waited[-1] is ready
        for wait, copy, record in zip(calls[0::3], calls[1::3], calls[2::3], strict=True):
            assert (wait[0], copy[0], record[0]) == ("wait", "copy", "record")
            assert wait[1] == copy[4] == record[2], "wait, copy and record must use the same stream"
            assert {wait[2], record[1]} == {event.cuda_event for event in events}, (
                "a copy must wait for the last slice of the other stream"
            )
        assert copied.blocking and copied.stream.cuda_stream == last


@pytest.mark.parametrize("name", NAMES.values())
def test_an_error_of_the_driver_is_raised(calls: list[tuple[Any, ...]], name: str) -> None:
    """No slice is issued after the error."""
    copier = copies.SliceCopier(100, torch.device("cuda"))
    copier.start()
    failing[name] = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        copier.copy(torch.zeros(250, dtype=torch.uint8), 5000, Event())
    assert [call[0] for call in calls][-1] == name and len(calls) <= 3
