# SPDX-License-Identifier: Apache-2.0
"""How copies off the GPU are cut, with a driver that only takes notes (what it does is measured on a GPU)."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmi_connector.engine import copies


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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []

    def function(name: str) -> Any:
        def call(*arguments: Any) -> None:
            made.append((name, *arguments))

        return call

    names = {"cuMemcpyDtoHAsync_v2": "copy", "cuStreamWaitEvent": "wait", "cuEventRecord": "record"}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    driver = SimpleNamespace(**{name: function(short) for name, short in names.items()})
    monkeypatch.setattr(copies.ctypes, "CDLL", lambda _: driver)
    return made


def test_pieces_cover_every_byte_once_on_two_streams_in_turn(calls: list[tuple[Any, ...]]) -> None:
    copier = copies.PieceCopier(100, torch.device("cuda"))
    streams, events = copier._streams, copier._events
    last = None
    for nbytes, target in ((250, 5000), (100, 9000), (1, 9500), (400, 10_000)):
        source, ready = torch.zeros(nbytes, dtype=torch.uint8), Event()
        calls.clear()
        copied = copier.copy(source, target, ready)
        pieces = [call[1:] for call in calls if call[0] == "copy"]
        at = 0
        for place, address, size, _ in pieces:
            assert (place, address) == (target + at, source.data_ptr() + at) and 0 < size <= 100
            at += size
        assert at == nbytes
        used = [stream for *_, stream in pieces]
        assert used[0] != last and all(a != b for a, b in itertools.pairwise(used)), "no stream twice in a row"
        last = used[-1]
        first = streams[0] if streams[0].cuda_stream == used[0] else streams[1]
        assert first.waited[-1] is ready
        for wait, copy, record in zip(calls[0::3], calls[1::3], calls[2::3], strict=True):
            assert (wait[0], copy[0], record[0]) == ("wait", "copy", "record")
            assert wait[1] == copy[4] == record[2], "all three on one stream"
            assert {wait[2], record[1]} == {event.cuda_event for event in events}, "it waits for the other's last piece"
        assert copied.blocking and copied.stream.cuda_stream == last


def test_an_error_of_the_driver_is_raised() -> None:
    function = copies._function(ctypes.CDLL(None), "abs", ctypes.c_int)
    assert function(0) == 0
    with pytest.raises(RuntimeError, match="abs failed: CUDA error 5"):
        function(-5)
