# SPDX-License-Identifier: Apache-2.0
"""Allocates GPU memory in an engine that may sleep.

vLLM builds the model and its caches in memory pools of its own allocator, each with a tag. sleep() frees their memory.
Wake-up allocates the memory again at the same addresses, so CUDA graphs stay valid. vLLM restores the content of
weights only after sleep at level 1, and never restores the content of caches.

torch uses a memory pool only for allocations of the thread that entered the pool. So `kept_in_sleep` allocates in a new
thread, which is in none of vLLM's pools. `freed_in_sleep` lets the new thread enter a pool with the caches' tag.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from dmi_connector.engine import contract
from dmi_connector.engine.contract_names import NAMES

T = TypeVar("T")

CACHES = "kv_cache"
"""vLLM's tag of its caches."""


def kept_in_sleep(allocate: Callable[[], T], device: torch.device, may_sleep: bool) -> T:
    """Call `allocate`, and return its result. sleep() neither frees the memory of the result, nor loses its content.

    In an engine that may sleep, `allocate` runs in another thread. So `allocate` must name the device, because a
    default device holds for one thread only.
    """
    return _in_thread(allocate, device) if may_sleep else allocate()


def freed_in_sleep(allocate: Callable[[], T], device: torch.device, may_sleep: bool) -> T:
    """As `kept_in_sleep`, but sleep() frees the memory and loses its content. Wake-up allocates the memory again,
    together with the caches.

    vLLM 0.31 has only one memory pool per tag. With that version the memory stays on the GPU.
    """

    def among_caches() -> T:
        with _memory_of_caches():
            return allocate()

    several = device.type == "cuda" and _has_several_pools()
    return kept_in_sleep(among_caches if may_sleep and several else allocate, device, may_sleep)


def _has_several_pools() -> bool:
    """Whether vLLM's allocator may have several memory pools of one tag."""
    try:
        contract.find(NAMES["sleep"]["several_pools"])
    except AttributeError:
        return False
    return True


def _memory_of_caches() -> AbstractContextManager[None]:
    """A context in which this thread allocates memory with the tag of vLLM's caches."""
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance().use_memory_pool(tag=CACHES)


def _in_thread(allocate: Callable[[], T], device: torch.device) -> T:
    """Call `allocate` in another thread, on its default stream, and wait until the GPU has finished."""
    if device.type != "cuda":
        return _result(allocate)

    number = torch.cuda.current_device() if device.index is None else device.index

    def on_device() -> T:
        torch.cuda.set_device(number)
        made = allocate()
        torch.cuda.synchronize()
        return made

    return _result(on_device)


def _result(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1, thread_name_prefix="dmi-memory") as threads:
        return threads.submit(call).result()
