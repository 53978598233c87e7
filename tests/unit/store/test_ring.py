# SPDX-License-Identifier: Apache-2.0
"""The ring never allocates a byte twice, and always drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmi_connector.store.write.ring import ALIGN, Extent, Ring
from tests.storekit import PATIENCE

PAGES = 16


@pytest.fixture(scope="module")
def shared() -> Iterator[Ring]:
    ring = Ring(PAGES * ALIGN)
    yield ring
    ring.close()


@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(0, PAGES),
    steps=st.lists(st.tuples(st.sampled_from(["take", "release", "grow"]), st.integers(0, PAGES * ALIGN)), max_size=60),
)
def test_extents_never_overlap_and_the_ring_drains_in_any_order(
    shared: Ring, first: int, steps: list[tuple[str, int]]
) -> None:
    """More of the ring may become usable at any time."""
    ring = shared
    ring.allow(first * ALIGN)
    held: list[Extent] = []
    for step, number in steps:
        if step == "grow":
            ring.allow(max(ring.usable, number // ALIGN * ALIGN))
        elif step == "take" or not held:
            extent = ring.alloc(number, timeout=0)
            if extent is None:
                assert held or number > ring.usable - ALIGN, "an empty ring refused an extent that fits"
                continue
            assert extent.offset % ALIGN == 0 and extent.offset + number <= ring.usable
            for other in held:
                apart = extent.offset + number <= other.offset or other.offset + other.nbytes <= extent.offset
                assert apart or 0 in (number, other.nbytes)
            held.append(extent)
        else:
            ring.release(held.pop(number % len(held)))
        assert sum(e.nbytes for e in held) <= ring.used <= ring.usable
        if held:
            with pytest.raises(ValueError, match="in use"):
                ring.allow(ring.usable - 1)
    for extent in held:
        ring.release(extent)
    assert ring.used == 0
    ring.allow(ring.nbytes)
    whole = ring.alloc(ring.nbytes, timeout=0)
    assert whole is not None and ring.view(whole).nbytes == ring.nbytes
    ring.release(whole)


def test_alloc_waits_for_space_until_its_timeout(shared: Ring) -> None:
    first = shared.alloc(shared.nbytes)
    assert first is not None
    start = time.monotonic()
    assert shared.alloc(1, timeout=0.05) is None and time.monotonic() - start >= 0.05
    timer = threading.Timer(0.1, shared.release, [first])
    timer.start()
    second = shared.alloc(100)
    assert second is not None and time.monotonic() - start >= 0.1
    shared.release(second)
    timer.join()


def test_a_held_extent_is_freed_by_its_last_release_and_misuse_is_refused(shared: Ring) -> None:
    extent = shared.alloc(10)
    assert extent is not None
    shared.add_users(extent, 2)
    for _ in range(3):
        assert shared.used == ALIGN
        shared.release(extent)
    assert shared.used == 0
    with pytest.raises(ValueError, match="released already"):
        shared.release(extent)
    with pytest.raises(ValueError, match="released already"):
        shared.add_users(extent)
    with pytest.raises(ValueError, match="do not fit in the 65536 bytes of the ring"):
        shared.alloc(shared.nbytes + 1)
    with pytest.raises(ValueError, match="too small"):
        Ring(100)


def _waits_for(ring: Ring, nbytes: int) -> Future[Extent | None]:
    """The result of an `alloc` without a timeout in another thread."""
    found: Future[Extent | None] = Future()

    def wait() -> None:
        try:
            found.set_result(ring.alloc(nbytes))
        except ValueError as error:
            found.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return found


def test_a_closed_ring_gives_nothing_out_to_those_who_wait_and_later() -> None:
    ring = Ring(PAGES * ALIGN)
    first, rest = ring.alloc(ALIGN), ring.alloc((PAGES - 1) * ALIGN)
    assert first is not None and rest is not None
    waiting = _waits_for(ring, ALIGN * 2)
    ring.close()
    assert waiting.result(PATIENCE) is None
    assert ring.used == 0
    ring.release(first)
    assert _waits_for(ring, 1).result(PATIENCE) is None, (
        "a closed ring must allocate nothing, even if it has free space"
    )


def test_more_bytes_than_a_smaller_ring_will_ever_have_are_refused() -> None:
    ring = Ring(PAGES * ALIGN)
    ring.allow(ALIGN)
    waiting = _waits_for(ring, 2 * ALIGN)
    ring.allow(ALIGN, final=True)
    with pytest.raises(ValueError, match=f"{2 * ALIGN} bytes do not fit in the {ALIGN} bytes of the ring: raise"):
        waiting.result(PATIENCE)
    assert ring.alloc(ALIGN) is not None
    ring.close()
