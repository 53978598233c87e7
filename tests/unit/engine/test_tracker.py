# SPDX-License-Identifier: Apache-2.0
"""A tracker that looks for chunks every few steps reports the same rows as one that looks in every step."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmi_connector.engine.messages import STEPS_TOGETHER, Report, Rows, StepMetadata
from dmi_connector.engine.scheduler.tracker import Tracker
from tests.trackerkit import FakeRequest, ask, make_tracker

BLOCK = 16


@dataclass
class World:
    """A simulated scheduler. It checks each row in the tracker's messages against the blocks of the request in that
    step.

    each_step: whether the tracker looks for chunks in every step. as_new: resumed requests are passed like new ones.
    told: for each capture, the positions of rows and of samples in the messages, in order.
    """

    tracker: Tracker
    each_step: bool = False
    as_new: bool = False
    running: dict[str, FakeRequest] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    preempted: dict[str, FakeRequest] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    told: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    given: int = 0  # number of blocks, which are never reused

    def add(self, prompt: int, start: int, stop: int | None = None, output: bool = True) -> None:
        name = f"r{len(self.told)}"
        request = ask({"include_output_tokens": output, "dmi": {"tokens": [start, stop]}}, prompt, name)
        self.tracker.on_new_request(request)  # type: ignore[arg-type]
        self.told[name], self.starts[name] = ([], []), start
        self.running[name] = request
        self.new.append(name)

    def step(self, amounts: list[int], preempt: int, resume: int, cached: int) -> StepMetadata:
        """Run one step.

        amounts: tokens of each running request; 0: not scheduled. preempt, resume: index of a request; -1: none.
        cached: tokens of the resumed request that are in the prefix cache.
        """
        gone = sorted(self.running)[preempt : preempt + 1] if preempt >= 0 and not self.new else []
        left = {name: self.blocks.pop(name, []) for name in gone}
        for name in gone:
            self.preempted[name] = self.running.pop(name)
            self.preempted[name].num_computed_tokens = 0
        back = [n for n in sorted(self.preempted) if n not in gone][resume : resume + 1] if resume >= 0 else []
        for name in back:
            request = self.running[name] = self.preempted.pop(name)
            request.num_computed_tokens = min(cached, request.num_tokens - 1) // BLOCK * BLOCK
        names, scheduled, begun = sorted(self.running), {}, list(self.new)
        for i, name in enumerate(names):
            request = self.running[name]
            amount = max(1, amounts[i % len(amounts)]) if name in begun or name in back else amounts[i % len(amounts)]
            if amount:
                scheduled[name] = min(amount, request.num_tokens - request.num_computed_tokens)
        new_reqs, cached_ids, new_blocks, computed = [], [], [], []
        for name, amount in scheduled.items():
            request, mine = self.running[name], self.blocks.setdefault(name, [])
            need = -(-(request.num_computed_tokens + amount) // BLOCK)
            fresh = [self.given + 3 * i for i in range(1, need - len(mine) + 1)]
            self.given += 3 * len(fresh)
            mine += fresh
            if name in begun or (self.as_new and name in back):
                about = {"req_id": name, "block_ids": (fresh,), "num_computed_tokens": request.num_computed_tokens}
                new_reqs.append(SimpleNamespace(**about))
            else:
                cached_ids.append(name)
                new_blocks.append((fresh,) if fresh else None)
                computed.append(request.num_computed_tokens)
        resumed = set() if self.as_new else set(back)
        of_running = SimpleNamespace(
            req_ids=cached_ids, new_block_ids=new_blocks, resumed_req_ids=resumed, num_computed_tokens=computed
        )
        output: Any = SimpleNamespace(
            preempted_req_ids=set(gone) or None,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=of_running,
        )
        if self.each_step:
            self.tracker.keep_rows = -1
        metadata = self.tracker.step(output)
        self.new = []
        for name, amount in scheduled.items():
            request = self.running[name]
            request.num_computed_tokens += amount
        for rows in metadata.chunks:
            self._check(self._named(rows.capture), rows)
        for rows in metadata.leaving:
            assert self._named(rows.capture) in gone
            self._check(self._named(rows.capture), rows, left)
        for sample in metadata.samples:
            name = self._named(sample.capture)
            if name in scheduled:
                at = sample.position
                assert sample.slot == self.blocks[name][at // BLOCK] * BLOCK + at % BLOCK
                self.told[name][1].append(sample.position)
        for name in scheduled:
            request = self.running[name]
            if request.num_computed_tokens == request.num_tokens:
                request.tokens.append(7)
        assert metadata.idle == (not scheduled) and len(metadata.preempted) <= len(gone)
        return metadata

    def _named(self, capture: int) -> str:
        return next(name for name, tracked in self.tracker.tracked.items() if tracked.capture == capture)

    def _check(self, name: str, rows: Rows, blocks: dict[str, list[int]] | None = None) -> None:
        """Check that rows follow earlier ones, are computed, and are in the current blocks of the request."""
        first = self.starts[name] + rows.first
        positions = range(first, first + len(rows.slots))
        mine = (blocks or self.blocks)[name]
        assert rows.slots.tolist() == [mine[at // BLOCK] * BLOCK + at % BLOCK for at in positions]
        self.told[name][0].extend(positions)

    def finish(self, which: int) -> None:
        for name in sorted(self.running)[which : which + 1]:
            request = self.running.pop(name)
            start = self.starts[name]
            if name in self.new:
                self.new.remove(name)
            mine = self.blocks.setdefault(name, [])
            closes = len(self.tracker.pending_closes)
            _, response = self.tracker.finish(request, mine)  # type: ignore[arg-type]
            assert response is not None
            for close in self.tracker.pending_closes[closes:]:
                for rows in close.rows:
                    self._check(name, rows)
                assert close.length == len(self.told[name][0])
                assert self.told[name][0] == list(range(start, start + close.length))


STEP = st.tuples(
    st.just("step"),
    st.lists(st.sampled_from([0, 1, 1, 1, 1, 5, 40]), min_size=1, max_size=4),
    st.sampled_from([-1, -1, -1, 0, 1]),
    st.sampled_from([-1, 0, 1]),
    st.integers(0, 90),
)
ADD = st.tuples(
    st.just("add"),
    st.integers(1, 70),
    st.sampled_from([0, 0, 5, 33]),
    st.sampled_from([None, None, 40, 64]),
    st.booleans(),
)
DECODE = st.tuples(st.just("step"), st.just([1]), st.just(-1), st.just(0), st.integers(0, 90))
FINISH = st.tuples(st.just("finish"), st.integers(0, 2))
EVENTS = st.lists(st.one_of(ADD, STEP, DECODE, DECODE, DECODE, DECODE, DECODE, FINISH), min_size=40, max_size=120)


@pytest.mark.parametrize("hooks", ["resid_pre,mlp_out", "resid_pre,logits"])
@given(events=EVENTS, as_new=st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_row_is_sent_once_from_its_own_slot(hooks: str, events: list[tuple[Any, ...]], as_new: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        worlds = [World(make_tracker(directory, hooks), each_step, as_new) for each_step in (False, True)]
        for name, *arguments in [("add", 40, 0), *events, *[("finish", 0)] * len(events)]:
            for world in worlds:
                getattr(world, name)(*arguments)
        assert worlds[0].told == worlds[1].told


def test_chunks_of_several_steps_are_sent_together(tmp_path: object) -> None:
    """Each request completes a chunk of 16 rows in 16 steps."""
    world = World(make_tracker(tmp_path, "resid_pre"))
    for _ in range(5):
        world.add(16, 0)
    told = [len(world.step([16], -1, -1, 0).chunks)]
    told += [len(world.step([1], -1, -1, 0).chunks) for _ in range(2 * STEPS_TOGETHER - 1)]
    each = [0] * (STEPS_TOGETHER - 1)
    assert told == [*each, 5, *each, 5]


@pytest.mark.parametrize("prompts", [False, True])
def test_rows_of_sixteen_steps_leave_together(tmp_path: object, prompts: bool) -> None:
    """The count starts at the step of the first of these rows. Ranks report when rows leave."""
    world = World(make_tracker(tmp_path, "resid_pre"))
    world.add(16, 0)
    first = world.step([16], -1, -1, 0)
    while not first.chunks:
        first = world.step([1], -1, -1, 0)
    assert not first.gather
    for number in range(1, STEPS_TOGETHER):
        if prompts:
            world.add(3, 0)
        metadata = world.step([3], -1, -1, 0)
        assert metadata.gather == (number == STEPS_TOGETHER - 1), number
        assert metadata.report or not metadata.gather


def test_rows_leave_at_once_when_nothing_runs_or_a_quarter_of_the_staging_memory_waits(tmp_path: object) -> None:
    world = World(make_tracker(tmp_path, "resid_pre"))
    for _ in range(2):
        world.add(40, 0)
    assert not world.step([40], -1, -1, 0).gather
    world.finish(0)
    assert not world.step([1], -1, -1, 0).gather and world.step([0], -1, -1, 0).gather
    world.finish(0)
    world.tracker.keep_rows = 79
    assert world.step([0], -1, -1, 0).gather
    assert not world.step([0], -1, -1, 0).gather, "the rows must have left"


@pytest.mark.parametrize(("policy", "each"), [("block", STEPS_TOGETHER), ("drop", 1)])
def test_ranks_report_every_few_steps_and_in_each_one_where_rows_may_be_lost(
    tmp_path: object, policy: str, each: int
) -> None:
    world = World(make_tracker(tmp_path, "resid_pre", policy=policy))
    world.add(4, 0)
    told = [world.step([1], -1, -1, 0).report for _ in range(STEPS_TOGETHER)]
    assert [n for n, report in enumerate(told, 1) if report] == [*range(each, STEPS_TOGETHER + 1, each)]
    assert world.step([0], -1, -1, 0).report, "the report must be in this step, because it may be the last one"


def test_ranks_report_in_each_step_while_staging_memory_is_short(tmp_path: object) -> None:
    world = World(make_tracker(tmp_path, "resid_pre"))
    world.add(70, 0)
    world.tracker.keep_rows = 60
    assert [world.step([amount], -1, -1, 0).report for amount in (70, 1, 1)] == [True] * 3
    world.tracker.on_report(Report(64))
    assert not world.step([1], -1, -1, 0).report


def test_chunks_are_sent_sooner_if_they_fill_a_quarter_of_the_staging_memory(tmp_path: object) -> None:
    """keep_rows is half of the staging memory."""
    world = World(make_tracker(tmp_path, "resid_pre"))
    world.tracker.keep_rows = 120
    world.add(70, 0)
    assert [len(world.step([30], -1, -1, 0).chunks) for _ in range(3)] == [0, 0, 4]


def test_the_rows_of_a_prompt_only_request_end_with_its_prompt(tmp_path: object) -> None:
    """The rows after its last whole chunk are exported when it ends."""
    world = World(make_tracker(tmp_path, "resid_pre"), each_step=True)
    world.add(40, 0, output=False)
    world.step([40], -1, -1, 0)
    [tracked] = world.tracker.tracked.values()
    assert tracked.exported == 32 and tracked.due > 1 << 40
    for _ in range(30):
        assert world.step([1], -1, -1, 0).chunks == []
    world.finish(0)
    [close] = world.tracker.pending_closes
    assert [len(rows.slots) for rows in close.rows] == [8] and close.length == 40


@pytest.mark.parametrize(
    ("blocks", "policy", "others", "kept"),
    [
        (48, "block", 1, [3]),  # a sixteenth of the cache
        (47, "block", 1, []),
        (95, "block", 2, [3]),
        (96, "block", 2, [3, 3]),
        (96, "drop", 2, [3, 3]),
        (96, "block", 1, [3]),  # the second request is the last one: no further step may follow
    ],
)
def test_blocks_of_ended_requests_are_kept_while_others_run(
    tmp_path: object, blocks: int, policy: str, others: int, kept: list[int]
) -> None:
    tracker = make_tracker(tmp_path, "resid_pre", blocks, policy=policy)
    world = World(tracker)
    for _ in range(others + 1):
        world.add(40, 0)
    world.step([40], -1, -1, 0)
    for _ in range(2):
        world.finish(0)
    assert [close.keeps_blocks for close in tracker.pending_closes] == [
        f"r{i}" if i < len(kept) else None for i in (0, 1)
    ]
    assert [count for _, count in tracker.slots.held.values()] == kept
    tracker.slots.freed(["r0", "other"])
    assert [count for _, count in tracker.slots.held.values()] == kept[1:]


def test_no_blocks_are_kept_for_a_sink_that_takes_no_rows(tmp_path: object) -> None:
    world = World(make_tracker(tmp_path, "resid_pre", 1000, sink="null"))
    for _ in range(2):
        world.add(40, 0)
    world.step([40], -1, -1, 0)
    world.finish(0)
    assert world.tracker.pending_closes[0].keeps_blocks is None


def output_of(**more: Any) -> Any:
    """The scheduler output of a step without requests."""
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    given = {
        "preempted_req_ids": None,
        "num_scheduled_tokens": {},
        "scheduled_new_reqs": [],
        "total_num_scheduled_tokens": 0,
    }
    return SimpleNamespace(**{**given, "scheduled_cached_reqs": nothing, **more})


@pytest.mark.parametrize(
    ("preempted", "named"),
    [(None, []), (set(), []), ({"r1"}, [2]), ({"r0", "r2"}, [1, 3]), ({"other"}, []), ({"r2", "other", "skip"}, [3])],
)
def test_a_step_names_the_captures_that_were_preempted_and_no_other(
    tmp_path: object, preempted: set[str] | None, named: list[int]
) -> None:
    tracker = make_tracker(tmp_path, "resid_pre")
    for name in ("r0", "r1", "skip", "r2"):
        kv = {"dmi": {"enabled": False}} if name == "skip" else {}
        tracker.on_new_request(ask(kv, 20, name))  # type: ignore[arg-type]
    assert sorted(tracker.step(output_of(preempted_req_ids=preempted)).preempted) == named
    assert tracker.step(output_of()).preempted == []
