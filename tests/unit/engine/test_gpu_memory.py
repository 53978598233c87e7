# SPDX-License-Identifier: Apache-2.0
"""Where an engine that may sleep allocates memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import device_allocator

from dmi_connector.engine import gpu_memory
from dmi_connector.engine.gpu_memory import freed_in_sleep, kept_in_sleep

SEVERAL_POOLS = hasattr(device_allocator, "DEFERRABLE_TAGS")
"""Whether vLLM's allocator supports several memory pools per tag. In vLLM 0.31 it has one."""
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
HERE = threading.get_ident()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls in other threads, in order. vLLM's allocator and torch's GPU calls are replaced."""
    found: list[Any] = []

    def note(*what: Any) -> None:
        assert threading.get_ident() != HERE, what
        found.append(what)

    class Allocator:
        @contextmanager
        def use_memory_pool(self, tag: str) -> Iterator[None]:
            note("enter", tag)
            yield
            note("leave", tag)

    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", Allocator)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note("device", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: note("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return found


def allocate(events: list[Any]) -> int:
    events.append("allocate")
    return threading.get_ident()


@pytest.mark.parametrize("place", [kept_in_sleep, freed_in_sleep])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_an_engine_that_does_not_sleep_allocates_as_usual(events: list[Any], place: Any, device: torch.device) -> None:
    assert place(lambda: allocate(events), device, False) == HERE
    assert events == ["allocate"]


def test_memory_outside_of_vllms_pools_is_allocated_in_another_thread(events: list[Any]) -> None:
    """The thread selects the device, and synchronizes before others use the memory."""
    assert kept_in_sleep(lambda: allocate(events), GPU, True) != HERE
    assert events == [("device", 1), "allocate", ("synchronize",)]
    events.clear()
    kept_in_sleep(lambda: allocate(events), torch.device("cuda"), True)
    assert events[0] == ("device", 3), "the thread must use the caller's device"


@pytest.mark.skipif(not SEVERAL_POOLS, reason="vLLM 0.31 has one memory pool per tag")
def test_memory_that_sleep_frees_has_the_tag_of_the_caches(events: list[Any]) -> None:
    assert freed_in_sleep(lambda: allocate(events), GPU, True) != HERE
    tag = gpu_memory.CACHES
    assert tag in device_allocator.DEFERRABLE_TAGS, "the tag must be allocated together with the caches"
    assert events == [("device", 1), ("enter", tag), "allocate", ("leave", tag), ("synchronize",)]


def test_an_allocator_with_one_pool_per_tag_is_left_to_the_caches(
    events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.31 forgets the pool of this memory when it allocates the caches."""
    monkeypatch.delattr(device_allocator, "DEFERRABLE_TAGS", raising=SEVERAL_POOLS)
    freed_in_sleep(lambda: allocate(events), GPU, True)
    assert events == [("device", 1), "allocate", ("synchronize",)]


@pytest.mark.parametrize("place", [kept_in_sleep, freed_in_sleep])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_an_error_of_the_other_thread_is_raised(events: list[Any], place: Any, device: torch.device) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        place(fail, device, True)
