# SPDX-License-Identifier: Apache-2.0
"""Captures that lend rows to others, and the truncation of a prefix hit to these rows."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.messages import Report
from dmi_connector.engine.owners import pool_borrowing
from dmi_connector.engine.owners.pool_borrowing import Borrowing
from dmi_connector.engine.owners.pool_holds import Holds
from dmi_connector.engine.owners.pool_limits import StepLimits
from dmi_connector.engine.owners.pool_pages import PoolSlots
from dmi_connector.engine.owners.pool_sources import RowSources, Source
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.hooks import Selection
from dmi_connector.store.format.completeness import Cause, Loss
from tests.trackerkit import FakeRequest, dropped, make_tracker

CHUNK, HASH = 32, 16
ALL = Selection({"q": (0, 1, 2), "resid_pre": (0, 1, 2)})


def request(prompt: int = 200, name: str = "r", first: int = 0) -> Any:
    tokens = list(range(first, first + prompt))
    found = FakeRequest(name, {}, tokens, prompt)
    found.block_hashes = [repr(tokens[:stop]).encode() for stop in range(HASH, prompt + 1, HASH)]
    found.skip_reading_prefix_cache = False  # type: ignore[attr-defined]
    found.resumable = False  # type: ignore[attr-defined]
    return found


def sources(alike: bool = False, enabled: bool = True, entries: int = 100) -> RowSources:
    return RowSources(CHUNK, HASH, alike, enabled, entries)


def source(known: RowSources, selection: Selection = ALL, start: int = 0, number: int = 1) -> Source:
    made = Source(number, f"/x/{number}.zarr", f"r{number}", None, known.kind(selection), start)
    known.add(made)
    return made


def filled(known: RowSources, selection: Selection = ALL, start: int = 0, stop: int = 128, number: int = 1) -> Source:
    """A source that has exported all chunks up to `stop`."""
    made = source(known, selection, start, number)
    for end in range(start + CHUNK, stop + 1, CHUNK):
        known.note(made, request(), end)
    return made


def test_the_longest_part_of_a_hit_in_whole_chunks_is_found() -> None:
    known = sources()
    has, wants = filled(known), source(known, number=2)
    for top, stop in {200: 128, 128: 128, 127: 96, 32: 32}.items():
        assert known.find(wants, request(), top) == (has, stop)
    assert known.find(wants, request(), 31) is None
    assert known.find(wants, request(first=1), 200) is None, "other tokens must not be found"
    assert known.find(wants, request(40), 200) == (has, 32), "the hit must end at the last hash"


def test_rows_begin_at_the_same_position_and_end_at_a_hash() -> None:
    known = sources()
    has = filled(known, start=16, stop=112)
    assert known.find(source(known, number=2), request(), 200) is None
    assert known.find(source(known, start=16, number=2), request(), 200) == (has, 112)
    filled(known, start=8, number=3)
    assert known.find(source(known, start=8, number=4), request(), 200) is None


def test_a_source_has_all_hooks_and_layers() -> None:
    known = sources()
    narrow, other = Selection({"q": (0, 2)}), Selection({"q": (0, 1, 2, 3)})
    wide, small = filled(known), filled(known, narrow, stop=64, number=2)
    assert known.find(source(known, narrow, number=3), request(), 200) == (wide, 128)
    wide.gone = True
    assert known.find(source(known, narrow, number=3), request(), 200) == (small, 64)
    assert known.find(source(known, number=3), request(), 200) is None
    assert known.find(source(known, other, number=3), request(), 200) is None
    with_logits = Selection({"q": (0, 2), "logits": (0,)})
    assert known.find(source(known, with_logits, number=3), request(), 200) == (small, 64), (
        "logits are not borrowed, so they must not matter"
    )


def test_ranks_borrow_from_the_same_selection_only() -> None:
    known = sources(alike=True)
    filled(known)
    assert known.find(source(known, Selection({"q": (0, 1, 2)}), number=2), request(), 200) is None
    assert known.find(source(known, number=2), request(), 200) is not None


def test_memory_is_bounded() -> None:
    known = sources(entries=3)
    filled(known, stop=128)
    assert len(known) == 3 and known.find(source(known, number=2), request(), 32) is None
    for layer in range(200):
        known.kind(Selection({"q": (layer,)}))
    assert len(known._kinds) == len(known._hooks) == 64
    assert known.find(source(known, number=2), request(), 200) is None, "its selection must be forgotten"
    off = sources(enabled=False)
    filled(off)
    assert len(off) == 0, "without stores, there is no source"


def test_rows_from_before_a_cache_reset_are_not_borrowed() -> None:
    known = sources()
    has = filled(known, stop=64)
    known.reset()
    assert known.find(source(known, number=2), request(), 200) is None
    known.note(has, request(), 96)
    assert len(known) == 0, "rows from before the reset must not be found"


def test_a_capture_that_lacks_rows_is_forgotten() -> None:
    known = sources()
    lost, failed, whole = (filled(known, Selection({"q": (n,)}), number=n) for n in (0, 1, 2))
    known.lost([0, 9])
    known.stored("/x/1.zarr", False)
    known.stored("/x/2.zarr", True)
    known.stored("/x/9.zarr", True)
    assert lost.gone and failed.gone and not whole.gone
    known.note(lost, request(), 160)
    assert len(known) == 12 and known.find(source(known, Selection({"q": (0,)}), number=3), request(), 200) is None
    assert len(known) == 8


def test_a_borrower_that_runs_takes_the_place_of_a_source_that_ended() -> None:
    known = sources()
    first, ended, gone, short, heir, longer = (source(known, number=n) for n in range(1, 7))
    other = source(known, Selection({"q": (0,)}), number=7)
    for end in range(CHUNK, 129, CHUNK):
        known.note(first, request(), end)
    for by, stop in ((ended, 128), (gone, 128), (short, 32), (longer, 96), (heir, 96), (other, 128)):
        known.borrowed(first, by, stop)
    ended.ended, gone.gone, first.ended = 1.0, True, 1.0
    known.ended(ended)
    known.ended(first)
    wants = source(known, number=8)
    assert known.find(wants, request(), 96) == (heir, 96), "the latest of those with the most rows must be found"
    assert known.find(wants, request(), 200) == (first, 128), "only the ended source has these rows"
    heir.ended = 1.0
    known.ended(heir)
    assert known.find(wants, request(), 96) == (longer, 96), "another borrower of the first one must be found"
    known.borrowed(first, wants, 128)
    assert known.find(source(known, number=9), request(), 200) == (wants, 128), (
        "the running borrower must be found, because its store needs no hold"
    )
    wants.age = longer.age = 0
    known.reset()
    for end in range(CHUNK, 129, CHUNK):
        known.note(late := source(known, number=10), request(), end)
    known.ended(wants)
    assert not len(known), "entries from before the reset must be removed"
    assert late.entries == []


# ---- hits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    """A tracker with a pool, and stores on a disk."""
    context = make_tracker(tmp_path, hooks="q,resid_pre,logits", chunk_tokens=CHUNK, segment_tokens=8 * CHUNK).context
    limits = StepLimits(SimpleNamespace(max_num_batched_tokens=512), 512, 8)
    slots = PoolSlots(context, 0, HASH, 1000, limits)
    slots.sized(1000)
    return Tracker(context, slots, 1 << 60)


def passes(tracker: Tracker, *asked: tuple[Any, int], began: set[str]) -> Any:
    """Simulate one pass of vLLM's scheduler. asked: (request, tokens of its prefix hit). Returns the message to the
    worker.

    Every request that may begin computes its prompt.
    """
    new, scheduled = [], {}
    for one, hit in asked:
        found = min(hit, len(one.block_hashes) * HASH)
        answer, _ = tracker.slots.matched(one, found)
        if answer is None and not one.skip_reading_prefix_cache:
            continue
        one.num_computed_tokens = 0 if one.skip_reading_prefix_cache else found
        blocks = list(range(100 * len(began), 100 * len(began) + 50))
        new.append(SimpleNamespace(req_id=one.request_id, block_ids=(blocks,), num_computed_tokens=found))
        scheduled[one.request_id] = one.num_tokens - one.num_computed_tokens
        began.add(one.request_id)
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    output: Any = SimpleNamespace(
        preempted_req_ids=None,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=new,
        scheduled_cached_reqs=nothing,
        scheduled_spec_decode_tokens={},
    )
    message = tracker.step(output)
    for one, _ in asked:
        if one.request_id in scheduled:
            one.num_computed_tokens += scheduled[one.request_id]
            one.tokens.append(7)
    return message


def test_children_that_begin_together_borrow_from_the_first(tracker: Tracker) -> None:
    children = [request(200, f"r{n}") for n in range(3)]
    for one in children:
        tracker.on_new_request(one)
    began: set[str] = set()
    # In its first pass, vLLM allocates blocks for the first request. The others then find these blocks.
    first = passes(tracker, (children[0], 0), (children[1], 192), (children[2], 192), began=began)
    assert began == {"r0"} and [rows.first for rows in first.chunks] == [0, 32, 64, 96, 128, 160]
    second = passes(tracker, (children[1], 192), (children[2], 192), began=began)
    assert began == {"r0", "r1", "r2"}
    for opened in second.opens:
        borrow = opened.borrow
        assert borrow is not None and borrow.request_id == "r0" and borrow.path == first.opens[0].path
        assert borrow.token_ids.dtype == np.int32 and borrow.token_ids.tolist() == list(range(192))
        assert opened.attrs["borrowed_tokens"] == 192
        assert opened.attrs["borrowed_from"] == {"store": Path(borrow.path).name, "key": None, "request_id": "r0"}
    assert second.chunks == []
    assert tracker.take_counts() == {"borrowed_tokens": 384}
    tracker.finish(children[1], list(range(50)))
    [close] = tracker.pending_closes
    assert close.length == 200 and [(rows.first, len(rows.slots)) for rows in close.rows] == [(192, 8)]
    assert not close.losses and close.token_ids == list(range(200)) and "recomputed_tokens" not in close.attrs


def test_nobody_waits_for_the_store_of_a_source_while_a_borrower_runs(tracker: Tracker) -> None:
    began: set[str] = set()
    children = [request(200, f"r{n}") for n in range(4)]
    opens = []
    for number, one in enumerate(children):
        tracker.on_new_request(one)
        opens += passes(tracker, (one, 192 if number else 0), began=began).opens
        if number > 0:
            tracker.finish(children[number - 1], [])
    assert began == {"r0", "r1", "r2", "r3"}, "children must begin before a store is finished"
    assert [opened.borrow and opened.borrow.request_id for opened in opens] == [None, "r0", "r1", "r2"]
    assert tracker.take_counts() == {"borrowed_tokens": 3 * 192}


def test_a_hit_is_cut_to_whole_chunks(tracker: Tracker) -> None:
    one, two = request(200, "r0"), request(150, "r1")
    began: set[str] = set()
    for each in (one, two):
        tracker.on_new_request(each)
    passes(tracker, (one, 0), began=began)
    hashes = list(two.block_hashes)
    passes(tracker, (two, 144), began=began)
    assert began == {"r0"} and two.block_hashes == hashes[:8] and not two.skip_reading_prefix_cache
    message = passes(tracker, (two, 144), began=began)
    [opened] = message.opens
    assert len(opened.borrow.token_ids) == 128 and two.block_hashes == hashes
    assert tracker.take_counts() == {"borrowed_tokens": 128, "recomputed_tokens": 16}
    tracker.finish(two, [])
    assert tracker.pending_closes[0].attrs["recomputed_tokens"] == 16


def test_a_hit_that_becomes_shorter_is_cut_again(tracker: Tracker) -> None:
    """Blocks were evicted meanwhile, so the rest of the hit is shorter than a chunk."""
    one, two = request(200, "r0"), request(150, "r1")
    began: set[str] = set()
    for each in (one, two):
        tracker.on_new_request(each)
    passes(tracker, (one, 0), began=began)
    for hit in (144, 48, 32):
        passes(tracker, (two, hit), began=began)
    assert began == {"r0", "r1"} and tracker.take_counts() == {"borrowed_tokens": 32, "recomputed_tokens": 112}
    three = request(150, "r2")
    tracker.on_new_request(three)
    for hit in (144, 16, 0):
        passes(tracker, (three, hit), began=began)
    assert "r2" in began and three.skip_reading_prefix_cache


def test_without_a_source_nothing_is_read(tracker: Tracker) -> None:
    one = request(200)
    tracker.on_new_request(one)
    began: set[str] = set()
    passes(tracker, (one, 192), began=began)
    assert not began and one.skip_reading_prefix_cache
    [opened] = passes(tracker, (one, 0), began=began).opens
    assert opened.borrow is None and tracker.take_counts() == {"recomputed_tokens": 192}


@pytest.mark.parametrize("span", [[0, 64], [0, 70], [48, 120]])
def test_rows_of_a_part_of_the_prompt_are_borrowed(tracker: Tracker, span: list[int]) -> None:
    """Either all captured rows are borrowed, or those in whole chunks."""
    one, two = request(200, "r0"), request(200, "r1")
    began: set[str] = set()
    one.kv_transfer_params = {"dmi": {"tokens": [span[0], None]}}
    two.kv_transfer_params = {"dmi": {"tokens": span}}
    for each in (one, two):
        tracker.on_new_request(each)
    passes(tracker, (one, 0), began=began)
    for _ in range(2):
        message = passes(tracker, (two, 192), began=began)
        if began == {"r0", "r1"}:
            break
    [opened] = message.opens
    rows = (span[1] - span[0]) // CHUNK * CHUNK
    assert opened.borrow.token_ids.tolist() == list(range(span[0], span[0] + rows))
    tracker.finish(two, list(range(100, 150)))
    [close] = tracker.pending_closes
    assert close.length == span[1] - span[0] and sum(len(part.slots) for part in close.rows) == close.length - rows
    cut = 0 if span == [0, 64] else 192 - span[0] - rows
    assert tracker.take_counts().get("recomputed_tokens", 0) == cut, (
        "a hit that covers all captured rows must not be cut"
    )


def ended_source(tracker: Tracker, began: set[str]) -> Path:
    """Run the request r0 of 200 tokens to its end. Returns the path of its store, which does not exist yet."""
    one = request(200, "r0")
    tracker.on_new_request(one)
    path = Path(passes(tracker, (one, 0), began=began).opens[0].path)
    tracker.finish(one, [])
    return path


def finish(path: Path, *files: str) -> None:
    """Write a finished store with these files."""
    for name in ("zarr.json", *files):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    (path / "zarr.json").write_text(json.dumps({"attributes": {"dmi": {"files": {key: [0, 0] for key in files}}}}))


def held_in(path: Path) -> list[str]:
    """Linked files of a store's holds, relative to the hold's directory."""
    return sorted("/".join(file.parts[-2:]) for file in path.parent.glob(".dmi-held-*/*/**/*") if file.is_file())


def test_a_finished_store_is_held_until_that_of_the_borrower_is_finished(tracker: Tracker) -> None:
    """A reader may remove the store as soon as it exists."""
    began: set[str] = set()
    path = ended_source(tracker, began)
    finish(path, "q/zarr.json")
    two, three = request(200, "r1"), request(200, "r2")
    for one in (two, three):
        tracker.on_new_request(one)
    opens = passes(tracker, (two, 192), (three, 192), began=began).opens
    shutil.rmtree(path)
    tracker.on_report(Report(0, stored={str(path): True}))
    for opened in opens:
        borrow = opened.borrow
        assert borrow is not None and (Path(borrow.path) / "zarr.json").exists()
        assert (Path(borrow.path) / "q" / "zarr.json").read_text() == "q/zarr.json"
        assert Path(borrow.path) != path and opened.attrs["borrowed_from"]["store"] == path.name
    assert len(held_in(path)) == 4
    tracker.on_report(Report(0, stored={opens[0].path: True}))
    assert len(held_in(path)) == 2
    tracker.on_report(Report(0, stored={opens[1].path: False}))
    assert not [*path.parent.glob(".dmi-held-*")], "the directory must be removed with its last link"
    for one in (two, three):
        tracker.finish(one, [])
    tracker.on_report(Report(0, lost={n: [dropped([0, 1])] for n in (2, 3)}))
    four = request(200, "r3")
    tracker.on_new_request(four)
    passes(tracker, (four, 192), began=began)
    assert four.skip_reading_prefix_cache, "the store is gone, so its tokens must be computed again"


def test_a_request_waits_for_the_store_of_one_that_ended(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    began: set[str] = set()
    path = ended_source(tracker, began)
    two, late = (request(200, name) for name in ("r1", "r2"))
    for one in (two, late):
        tracker.on_new_request(one)
    for _ in range(3):
        passes(tracker, (two, 192), began=began)
        assert began == {"r0"} and not two.skip_reading_prefix_cache
    finish(path)
    [opened] = passes(tracker, (two, 192), began=began).opens
    assert opened.borrow is not None and len(opened.borrow.token_ids) == 192
    tracker.finish(two, [])
    monkeypatch.setattr(pool_borrowing, "_WAIT_S", -1.0)
    passes(tracker, (late, 192), began=began)
    assert late.skip_reading_prefix_cache, "its writers took too long, so the tokens must be computed again"
    tracker.on_report(Report(0, stored={opened.path: True}))
    assert held_in(path) == []


def test_links_of_a_request_that_ends_before_it_begins_are_removed(tracker: Tracker) -> None:
    began: set[str] = set()
    path = ended_source(tracker, began)
    finish(path)
    two = request(200, "r1")
    tracker.on_new_request(two)
    assert tracker.slots.matched(two, 192) == (0, False) and len(held_in(path)) == 1
    tracker.finish(two, [])
    assert not [*path.parent.glob(".dmi-held-*")]


def test_nothing_is_borrowed_of_finished_stores_if_files_cannot_be_linked(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: set[str] = set()
    path = ended_source(tracker, began)
    finish(path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    two = request(200, "r1")
    tracker.on_new_request(two)
    passes(tracker, (two, 192), began=began)
    assert two.skip_reading_prefix_cache and not [*path.parent.glob(".dmi-held-*")]


def test_links_are_removed_when_the_engine_ends(tracker: Tracker) -> None:
    """Without further requests, the engine has no step in which it would learn that the store is finished."""
    began: set[str] = set()
    path = ended_source(tracker, began)
    finish(path)
    begun, waiting = request(200, "r1"), request(200, "r2")
    for one in (begun, waiting):
        tracker.on_new_request(one)
    tracker.slots.matched(waiting, 192)
    passes(tracker, (begun, 192), began=began)
    assert len(held_in(path)) == 2
    tracker.slots.close()
    assert not [*path.parent.glob(".dmi-held-*")] and path.exists()


@pytest.mark.parametrize("how", ["half removed", "no list", "not a list", "not JSON", "a number", "another directory"])
def test_nothing_is_borrowed_of_an_incomplete_store(tracker: Tracker, how: str) -> None:
    began: set[str] = set()
    path = ended_source(tracker, began)
    finish(path, "q/zarr.json", "k/zarr.json")
    if how == "half removed":
        (path / "k" / "zarr.json").unlink()
    else:
        files = {"not a list": None, "a number": [1], "another directory": ["../other"]}
        text = "{}" if how == "no list" else "root"
        if how in files:
            text = json.dumps({"attributes": {"dmi": {"files": files[how]}}})
        (path / "zarr.json").write_text(text)
    (path.parent / "other").write_text("of another store")
    tracker.on_report(Report(0, stored={str(path): True}))
    two = request(200, "r1")
    tracker.on_new_request(two)
    passes(tracker, (two, 192), began=began)
    assert two.skip_reading_prefix_cache and not [*path.parent.glob(".dmi-held-*")]


def test_links_of_an_engine_that_was_killed_are_removed(tmp_path: Path) -> None:
    store, old = tmp_path / "a.zarr", tmp_path / ".dmi-held-old" / "1" / "b.zarr"
    for path in (store, old):
        finish(path)
    running = Holds(str(tmp_path))
    assert not (tmp_path / ".dmi-held-old").exists()
    held = Path(running.hold(str(store)))
    Holds(str(tmp_path))
    assert held.name == "a.zarr" and (held / "zarr.json").exists(), "links of a running engine must stay"
    running.release(str(held))
    assert os.listdir(tmp_path) == ["a.zarr"]


def test_a_reset_of_the_prefix_cache_is_noticed(tmp_path: Path) -> None:
    context: Any = make_tracker(tmp_path, chunk_tokens=CHUNK, segment_tokens=CHUNK).context
    borrowing, calls = Borrowing(context, 64), []
    manager: Any = SimpleNamespace(
        reset_prefix_cache=lambda: calls.append(1) or True,
        block_pool=SimpleNamespace(hash_block_size=HASH),
        coordinator=SimpleNamespace(),
    )
    borrowing.bind(manager)
    assert borrowing.sources.hash_size == HASH
    filled(borrowing.sources)
    assert len(borrowing.sources) and manager.reset_prefix_cache() is True and calls == [1]
    assert len(borrowing.sources) == 0


def test_the_response_says_what_could_not_be_borrowed(tracker: Tracker) -> None:
    one, two = request(200, "r0"), request(200, "r1")
    for each in (one, two):
        tracker.on_new_request(each)
    began: set[str] = set()
    passes(tracker, (one, 0), (two, 192), began=began)
    [opened] = passes(tracker, (two, 192), began=began).opens
    loss = Loss.of(Cause.NOT_BORROWED, [[0, 192]], store="a.zarr", error="it is gone")
    report = Report(0, lost={opened.capture: [loss], 99: [loss]}, stored={tracker.tracked["r0"].path: False})
    tracker.on_report(report.aggregate(Report(5, lost={opened.capture: [loss]}, stored={"/x": True})))  # type: ignore[arg-type]
    assert all(rows.reads.source.gone for rows in tracker.slots._rows.values())  # type: ignore[attr-defined]
    _, response = tracker.finish(two, [])
    assert response is not None and response["dmi_missing"] == [[0, 192]] and response["dmi_reason"] == loss.words
    assert not tracker.lost
