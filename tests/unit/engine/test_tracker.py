# SPDX-License-Identifier: Apache-2.0
"""Of most requests nothing is due in most steps: a tracker that looks at those only where it must tells the workers the
same as one that looks at all of them in every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmi_connector.engine.tracker import Tracked, Tracker
from tests.trackerkit import FakeRequest, ask, make_tracker

BLOCK = 16


class Thorough(Tracker):
    """Looks at every request in every step."""

    def _may_be_due(self) -> Iterable[Tracked]:
        return [tracked for tracked in self.tracked.values() if tracked.opened]


@dataclass
class World:
    """A scheduler of requests, as far as a tracker sees it: what it tells of each step."""

    tracker: Tracker
    running: dict[str, FakeRequest] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    preempted: dict[str, FakeRequest] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    told: list[object] = field(default_factory=list)

    def add(self, prompt: int, start: int, stop: int | None = None, output: bool = True) -> None:
        name = f"r{len(self.running) + len(self.preempted) + len(self.told)}"
        request = ask({"include_output_tokens": output, "dmi": {"tokens": [start, stop]}}, prompt, name)
        self.tracker.on_new_request(request)  # type: ignore[arg-type]
        self.running[name] = request
        self.new.append(name)

    def step(self, amounts: list[int], preempt: int, resume: int, cached: int) -> None:
        """One step: tokens for each running request (0: it is not scheduled), one preempted, one resumed, of whose
        tokens so many are found in the prefix cache.
        """
        gone = sorted(self.running)[preempt : preempt + 1] if preempt >= 0 and not self.new else []
        for name in gone:
            self.preempted[name] = self.running.pop(name)
            self.preempted[name].num_computed_tokens = 0
            self.blocks.pop(name, None)
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
            request, had = self.running[name], self.blocks.get(name, 0)
            need = -(-(request.num_computed_tokens + amount) // BLOCK)
            fresh = list(range(had + 1, need + 1))
            self.blocks[name] = max(had, need)
            if name in begun:
                about = {"req_id": name, "block_ids": (fresh,), "num_computed_tokens": request.num_computed_tokens}
                new_reqs.append(SimpleNamespace(**about))
            else:
                cached_ids.append(name)
                new_blocks.append((fresh,) if fresh else None)
                computed.append(request.num_computed_tokens)
        of_running = SimpleNamespace(
            req_ids=cached_ids, new_block_ids=new_blocks, resumed_req_ids=set(back), num_computed_tokens=computed
        )
        output: Any = SimpleNamespace(
            preempted_req_ids=set(gone) or None,
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=of_running,
        )
        told = self.tracker.step(output, 0)
        chunks = [(c.capture, c.first, c.slots.tolist()) for c in told.chunks]
        opens, samples = [o.capture for o in told.opens], [vars(s) for s in told.samples]
        self.told.append((opens, sorted(told.preempted), sorted(chunks), samples))
        self.new = []
        for name, amount in scheduled.items():
            request = self.running[name]
            request.num_computed_tokens += amount
            if request.num_computed_tokens == request.num_tokens:
                request.tokens.append(7)

    def finish(self, which: int) -> None:
        for name in sorted(self.running)[which : which + 1]:
            request = self.running.pop(name)
            if name in self.new:
                self.new.remove(name)
            _, response = self.tracker.finish(request, list(range(1, self.blocks.pop(name, 0) + 1)))  # type: ignore
            self.told.append(
                (response is not None, [r.slots.tolist() for c in self.tracker.pending_closes for r in c.rows])
            )


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
@given(events=EVENTS)
@settings(max_examples=40, deadline=None)
def test_the_tracker_reports_the_same_as_one_that_checks_every_request(
    hooks: str, events: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        worlds = []
        for kind in (Tracker, Thorough):
            tracker = make_tracker(directory, hooks)
            tracker.__class__ = kind
            worlds.append(World(tracker))
        for name, *arguments in [("add", 40, 0), *events]:
            for world in worlds:
                getattr(world, name)(*arguments)
        assert worlds[0].told == worlds[1].told


def test_steps_skip_requests_that_have_nothing_due(tmp_path: object) -> None:
    """In 63 steps each of the 8 requests gets four blocks and completes four chunks."""
    world = World(make_tracker(tmp_path, "resid_pre"))
    for i in range(8):
        world.add(17 + i, 0)
    looked: list[object] = []

    class Counted(dict[str, Any]):
        def get(self, key: object, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    world.tracker.tracked = Counted(world.tracker.tracked)
    world.step([40], -1, -1, 0)
    looked.clear()
    for _ in range(63):
        world.step([1], -1, -1, 0)
    chunks = sum(len(told[2]) for told in world.told)  # type: ignore[index]
    assert chunks == 8 * 5 and len(looked) < 0.6 * 8 * 63


def test_a_prompt_only_request_is_skipped_once_its_chunks_are_exported(tmp_path: object) -> None:
    """The rows after its last whole chunk are exported when it ends."""
    world = World(make_tracker(tmp_path, "resid_pre"))
    world.add(40, 0, output=False)
    world.step([40], -1, -1, 0)
    [tracked] = world.tracker.tracked.values()
    assert tracked.exported == 32 and tracked.due > 1 << 40
    for _ in range(30):
        world.step([1], -1, -1, 0)
    assert world.tracker._due == []
    world.finish(0)
    [close] = world.tracker.pending_closes
    assert [len(rows.slots) for rows in close.rows] == [8] and close.length == 40


def output_of(**more: Any) -> Any:
    """What the scheduler says of a step in which nothing runs."""
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    given = {"preempted_req_ids": None, "num_scheduled_tokens": {}, "scheduled_new_reqs": []}
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
    assert sorted(tracker.step(output_of(preempted_req_ids=preempted), 0).preempted) == named
    assert tracker.step(output_of(), 0).preempted == []
