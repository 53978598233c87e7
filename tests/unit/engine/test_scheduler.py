# SPDX-License-Identifier: Apache-2.0
"""The connector with vLLM's own scheduler: every row is exported once, from the slot to which the model wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from dmi_connector.engine.owners import pool_limits
from dmi_connector.engine.owners.pool_pages import PoolSlots
from dmi_connector.layout import DRAFT_UNKNOWN
from tests.lanekit import Event
from tests.schedulerkit import Engine, sessions_of_033
from tests.shorter import seeds

PROMPT = range(5, 45)
Make = Callable[..., Engine]


@pytest.fixture
def make(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # the configuration reads it; there is no runner
    return lambda **more: Engine(tiny_model("qwen3"), tmp_path, monkeypatch, **more)


def live(engine: Engine, steps: int, ends: bool = True) -> None:
    """Run random arrivals, prefix hits, aborts, preemptions in a small cache, and resets of the prefix cache.

    ends: whether to run until all requests have ended.
    """
    random = engine.random
    for _ in range(steps):
        if random.random() < 0.35 and len(engine.requests) - len(engine.replies) < 12:
            first = random.choice([3, 4, 5])
            tokens = {"tokens": [random.choice([0, 5, 20, 300]), None]} if random.random() < 0.3 else None
            engine.add([first + n % 20 for n in range(random.randrange(1, 120))], random.randrange(1, 60), tokens)
        running = [name for name, request in engine.requests.items() if not request.is_finished()]
        if running and random.random() < 0.05:
            engine.abort(random.choice(running))
        if random.random() < 0.03:
            engine.scheduler.reset_prefix_cache(reset_running_requests=random.random() < 0.5)
        engine.step()
    if ends:
        engine.drain()


@pytest.mark.parametrize("seed", seeds(16))
def test_every_row_comes_from_its_slot_in_random_histories(make: Make, seed: int) -> None:
    """With the last seeds, workers report before they export the rows of a step, as vLLM's V2 runner does with
    a draft.
    """
    kinds = {"ahead": seed % 4 != 0, "on_gpu": seed % 2 == 0, "late": seed >= 12}
    engine = make(seed=seed, blocks=(24, 40, 120)[seed % 3], **kinds)
    live(engine, steps=120)
    assert engine.faults() == [] and engine.stored


@pytest.mark.parametrize("seed", seeds(16))
@pytest.mark.parametrize("borrows", [False, True])
def test_every_row_comes_from_its_page_in_random_histories(make: Make, seed: int, borrows: bool) -> None:
    """The pool has room for all requests, for a few, or for hardly one beside the smallest step."""
    engine = make(
        borrows=borrows,
        seed=seed,
        blocks=(24, 40, 120)[seed % 3],
        pages=(9, 12, 20, 60)[seed % 4],
        ahead=seed % 5 != 0,
        on_gpu=seed % 2 == 0,
    )
    live(engine, steps=120)
    assert engine.faults() == [] and engine.stored
    assert any(stored.borrowed for stored in engine.stored.values()) == borrows


def test_captures_with_rows_in_a_pool_end_without_further_requests(make: Make) -> None:
    """Staging memory has room for few of the rows, and the link is blocked when the last request ends."""
    engine = make(on_gpu=True, pages=200, tokens=lambda: 9)
    Event.link.clear()
    for _ in range(6):
        engine.add(PROMPT, 60)
    while len(engine.replies) < 6:
        engine.step()
    for _ in range(20):
        engine.step()
    assert engine.exporter.ending and engine.busy
    Timer(0.1, Event.link.set).start()
    engine.drain()
    assert not engine.exporter.ending
    assert engine.faults() == [] and len(engine.stored) == 6


def test_cached_tokens_are_computed_again_for_their_rows_in_a_pool(make: Make) -> None:
    """The metric and the store have the number of tokens. Requests without a capture read these tokens from the
    cache.
    """
    engine = make(pages=60, tokens=lambda: 9)
    taken: list[dict[str, int]] = []
    take = engine.tracker.take_counts
    engine.tracker.take_counts = lambda: taken.append(take()) or taken[-1]  # type: ignore[func-returns-value,method-assign]
    cached: dict[str, int] = {}
    execute = engine._execute

    def noted(output: Any) -> Any:
        cached.update({new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs})
        return execute(output)

    engine._execute = noted  # type: ignore[method-assign]
    first = engine.add(PROMPT, 3)
    engine.drain()
    again = engine.add(PROMPT, 3)
    behind = engine.add(PROMPT, 3, {"tokens": [32, None]})
    silent = engine.add(PROMPT, 3, {"enabled": False})
    engine.drain()
    assert [counts for counts in taken if counts] == [{"recomputed_tokens": 32}]
    attributes = {name: engine.stored[name].ends[0][3] for name in (first, again, behind)}
    assert attributes[again]["recomputed_tokens"] == 32
    assert all("recomputed_tokens" not in attributes[name] for name in (first, behind))
    assert cached == {first: 0, again: 0, behind: 32, silent: 32}
    assert engine.faults() == []


def test_children_of_one_prompt_borrow_its_rows(make: Make) -> None:
    """vLLM's scheduler reads whole chunks from the cache, here of 32 tokens."""
    engine = make(pages=60, tokens=lambda: 9, borrows=True, chunk=32)
    taken = Counter[str]()
    take = engine.tracker.take_counts
    engine.tracker.take_counts = lambda: taken.update(counts := take()) or counts  # type: ignore[func-returns-value,method-assign]
    prompt = list(range(10, 70))
    names = [engine.add(prompt, 3) for _ in range(3)]
    engine.drain()
    assert [engine.stored[name].borrowed for name in names] == [0, 32, 32]
    assert taken == {"borrowed_tokens": 64, "recomputed_tokens": 32}, "of a hit of 48 tokens each"
    later = engine.add([*prompt, 9, 9, *range(3, 40)], 3)  # the next turn of a chat
    other = engine.add([*prompt[:50], 7, 7], 3, {"tokens": [10, None]})
    engine.drain()
    assert engine.stored[later].borrowed == 32 and engine.stored[other].borrowed == 0
    assert engine.scheduler.reset_prefix_cache()
    engine.add(prompt, 3, {"enabled": False})
    engine.drain()
    again = engine.add(prompt, 3)
    engine.drain()
    assert engine.stored[again].borrowed == 0, "the model may have other weights by now"
    assert engine.stored[again].ends[0][3]["recomputed_tokens"] == 48
    assert engine.faults() == []


def test_a_hit_whose_last_block_vllm_drops_is_borrowed(make: Make) -> None:
    """With EAGLE and MTP, vLLM drops the last block of each hit, also of one that was cut to whole chunks.

    The first cut shows that. Afterwards one block more is left.
    """
    engine = make(pages=200, tokens=lambda: 9, borrows=True, chunk=32, ahead=False)
    coordinator: Any = engine.scheduler.kv_cache_manager.coordinator
    coordinator.eagle_group_ids, coordinator.single_type_managers[0].use_eagle = {0}, True
    prompt = [3 + 7 * i % 23 for i in range(230)]
    names = []
    for _ in range(3):
        names.append(engine.add(prompt, 3))
        engine.drain()
    assert [engine.stored[name].borrowed for name in names] == [0, 160, 192], "hits of 208 tokens"
    assert engine.faults() == []


def test_all_requests_run_while_a_preempted_one_has_tokens_to_compute(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of a step stays above the tokens of running requests, although they were few at the admission."""
    monkeypatch.setattr(pool_limits, "_PROMPT_TOKENS", 6)
    engine = make(pages=9, tokens=lambda: 9, blocks=1000)
    scheduler, slots = engine.scheduler, engine.tracker.slots
    assert isinstance(slots, PoolSlots)
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = slots.limits.requests = 64
    captured = [engine.add(range(5, 25), 200) for _ in range(2)]
    for _ in range(4):
        engine.step()
    others = [engine.add([30 + i, 4, 5], 200, {"enabled": False}) for i in range(40)]
    for _ in range(12):
        engine.step()
    running = [name for name in captured if engine.requests[name] in scheduler.running]
    assert running and len(scheduler.running) == 40 + len(running)
    engine.preempt(running[-1])
    before = {name: engine.requests[name].num_output_tokens for name in others}
    for _ in range(60):
        engine.step()
        assert slots.limits.scheduler.max_num_batched_tokens >= len(scheduler.running)
    assert min(engine.requests[name].num_output_tokens - before[name] for name in others) > 50
    assert engine.requests[running[-1]].status == RequestStatus.RUNNING


def test_a_request_aborted_while_it_waits_for_a_pool_makes_room_for_others(make: Make) -> None:
    engine = make(pages=9, tokens=lambda: 9)
    names = [engine.add(PROMPT, 20) for _ in range(4)]
    engine.add([7] * 30, 20, {"enabled": False})
    for _ in range(6):
        engine.step()
    assert len(engine.scheduler.running) == 2 and list(engine.stored) == names[:1], "the one without a capture passes"
    engine.abort(names[1])
    engine.drain()
    assert list(engine.stored) == [names[0], *names[2:]] and engine.faults() == []


@pytest.mark.parametrize("seed", seeds(8))
def test_rows_and_logits_of_accepted_tokens_come_from_a_pool(make: Make, seed: int) -> None:
    """Drafts are rejected, and their slots are written again."""
    kinds = {"blocks": (24, 40, 120)[seed % 3], "pages": (24, 60)[seed % 2], "drafts": 1 + seed % 4}
    kinds |= {"borrows": seed % 3 == 0}
    engine = make(seed=seed, hooks="q,logits", ahead=seed % 4 != 0, on_gpu=seed % 2 == 0, **kinds)
    live(engine, steps=80)
    assert engine.faults() == [] and any(map(any, engine.drafted.values()))


@pytest.mark.parametrize("seed", seeds(12))
def test_only_rows_and_logits_of_accepted_tokens_are_stored_in_random_histories(make: Make, seed: int) -> None:
    """With speculative decoding, rows of rejected drafts are never exported, and each row of logits belongs to the
    right token.
    """
    engine = make(
        seed=seed,
        drafts=1 + seed % 4,
        hooks="q,logits",
        blocks=(24, 40, 120)[seed % 3],
        ahead=seed % 4 != 0,
        on_gpu=seed % 2 == 0,
        chunk=(1, 8)[seed % 5 == 0],
    )
    live(engine, steps=100)
    assert engine.faults() == [] and any(map(any, engine.drafted.values()))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_reset_of_the_prefix_cache_frees_kept_blocks(make: Make, ahead: bool) -> None:
    """The reset comes while other requests run, or after the last reply, when an in-process engine may run no further
    step.
    """
    engine = make(ahead=ahead, tokens=lambda: 9)
    for _ in range(3):
        engine.add(PROMPT, 6)
    engine.add(PROMPT, 60)
    while len(engine.replies) < 3:
        engine.step()
    assert engine.tracker.slots.held
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not engine.tracker.slots.held and not engine.scheduler.running
    for _ in range(2):
        engine.add(PROMPT, 6)
    while len(engine.replies) < 6:
        engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.faults() == [] and len(engine.stored) == 6


@pytest.mark.parametrize("steps", [6, 9, 17, 20, 25, 30])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("pages", [0, 60])
def test_no_row_is_pending_in_an_engine_that_may_sleep(make: Make, steps: int, on_gpu: bool, pages: int) -> None:
    """The engine pauses, keeps its requests, and sleeps. Sleep discards all rows on the GPU before another step runs.

    In steps 9, 17 and 25, the last known token completes a chunk.
    """
    engine = make(on_gpu=on_gpu, sleeps=True, tokens=lambda: 9, pages=pages)
    for _ in range(2):
        engine.add(PROMPT, 50)
    for _ in range(steps):
        engine.step()
    engine.pause()
    engine.sleep()
    engine.drain()
    assert engine.faults() == [] and len(engine.stored) == 2


@pytest.mark.parametrize("seed", seeds(12))
def test_every_row_is_correct_in_random_histories_with_sleep(make: Make, seed: int) -> None:
    """The engine sleeps after each pause that keeps its requests. Every third engine has no pool."""
    pages = (0, 12, 60)[seed % 3]
    engine = make(
        sleeps=True,
        seed=seed,
        pages=pages,
        blocks=(24, 120)[seed % 2],
        borrows=bool(pages) and seed % 4 < 2,
        ahead=seed % 5 != 0,
        on_gpu=seed % 4 != 0,
    )
    for _ in range(12):
        live(engine, steps=10, ends=False)
        engine.pause()
        engine.sleep()
    engine.drain()
    assert engine.faults() == [] and engine.stored


@pytest.mark.parametrize("requests", [1, 6])
@pytest.mark.parametrize("pages", [0, 200])
@pytest.mark.parametrize(("here", "late"), [(False, False), (True, False), (False, True)])
def test_sleep_waits_for_rows_behind_a_blocked_link(
    make: Make, monkeypatch: pytest.MonkeyPatch, here: bool, late: bool, pages: int, requests: int
) -> None:
    """The rows of one request fit into staging memory, those of six do not. here: whether the worker is in this
    process.
    """
    engine = make(on_gpu=True, sleeps=True, tokens=lambda: 9, late=late, pages=pages)
    if here:
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", engine.worker)
    Event.link.clear()
    for _ in range(requests):
        engine.add(PROMPT, 100)
    for _ in range(60):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(20):
        engine.step()
    assert engine.exporter.lane is not None and bool(engine.exporter.lane.waiting) == (requests == 6)
    assert engine.busy is (bool(pages) or not here)
    Timer(0.1, Event.link.set).start()
    engine.drain()
    engine.sleep()
    engine.drain()
    assert engine.faults() == [] and len(engine.stored) == requests


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pages", [0, 60])
def test_requests_end_before_an_in_process_engine_sleeps(
    make: Make, monkeypatch: pytest.MonkeyPatch, ahead: bool, on_gpu: bool, pages: int
) -> None:
    """The engine runs no step between the last reply and sleep."""
    engine = make(ahead=ahead, on_gpu=on_gpu, sleeps=True, tokens=lambda: 9, pages=pages)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", engine.worker)
    for number in range(3):
        engine.add(PROMPT, 6 + 4 * number)
    running = engine.add(PROMPT, 60)
    while len(engine.replies) < 3:
        engine.step()
    engine.abort(running)
    assert engine.tracker.pending_closes
    engine.sleep()
    engine.add(PROMPT, 3)
    engine.drain()
    assert engine.faults() == [] and len(engine.stored) == 5


def test_a_request_aborted_during_its_prompt_step_has_all_its_rows(make: Make) -> None:
    """The step that computes the prompt is in flight. Its sampled token is never returned."""
    engine = make(tokens=lambda: 9)
    name = engine.add(PROMPT, 6)
    engine.step()
    engine.abort(name)
    engine.drain()
    [(length, *_, losses)] = engine.stored[name].ends
    assert (length, losses) == (40, []) and engine.faults() == []


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("pages", [0, 60])
def test_a_request_that_is_aborted_while_its_prompt_is_computed_again_ends(make: Make, pages: int, again: bool) -> None:
    """The engine has drafts. A reset of the prefix cache drops the first sampled token. The logits of the last row then
    belong to no token, and are not stored.

    again: whether it is preempted once more before it is aborted.
    """
    engine = make(drafts=2, hooks="q,logits", pages=pages)
    other, name = engine.add(PROMPT, 60), engine.add(range(5, 93), 60)
    while engine.requests[name].num_computed_tokens < 88:
        engine.step()
    assert engine.requests[name].num_in_flight_tokens and engine.tracker.tracked[name].exported == 88
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert 0 < engine.requests[name].num_computed_tokens < 80 and not engine.requests[name].num_output_tokens
    if again:
        engine.preempt(name)
        engine.step()
    engine.abort(name)
    engine.drain()
    assert list(engine.stored) == [other, name] and engine.faults() == []
    assert engine.stored[name].ends[0][:2] == (88, {"logits": 0})


def test_rows_of_later_turns_of_a_session_come_from_their_own_blocks(make: Make) -> None:
    """The scheduler passes the request again like a new one, with all its blocks."""
    engine = make(ahead=False, tokens=lambda: 9)
    name = engine.add(range(5, 15), 12, resumable=True)
    while engine.requests[name].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()
    more: Any = Request(
        name, list(range(40, 60)), SamplingParams(max_tokens=30), None, block_hasher=engine.hasher, resumable=True
    )
    engine.scheduler.add_request(more)
    engine.requests[name].resumable = False
    for _ in range(25):
        engine.step()
    known, given = engine.tracker.tracked[name].blocks, engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
    assert len(known) > 3 and known == given[: len(known)], "the last ones are noted with later steps"
    engine.drain()
    assert engine.faults() == []


@pytest.mark.parametrize("pages", [0, 60])
def test_a_session_without_output_tokens_has_those_of_earlier_turns(make: Make, pages: int) -> None:
    """Output tokens of earlier turns are part of the next prompt. A pool frees rows before the next turn, so it also
    stores the output tokens of the last turn.
    """
    engine = make(pages=pages, tokens=lambda: 9)
    name = engine.add(range(5, 15), 30, outputs=False, resumable=True)
    engine.turn(name, range(40, 60), 30)
    engine.drain()
    request = engine.requests[name]
    assert engine.faults() == [] and request.num_prompt_tokens == 10 + 29 + 20
    assert engine.stored[name].ends[0][0] == (request.num_tokens - 1 if pages else request.num_prompt_tokens)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_logits_of_every_turn_of_a_session_are_stored_with_drafts(make: Make, on_gpu: bool, outputs: bool) -> None:
    """No step runs between the last step of a turn and the next prompt."""
    numbers = count(5)
    engine = make(ahead=False, on_gpu=on_gpu, drafts=3, hooks="q,logits", tokens=lambda: next(numbers))
    name = engine.add(range(5, 15), 12, outputs=outputs, resumable=True)
    request = engine.requests[name]
    while request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()
    first = list(range(9, request.num_computed_tokens if outputs else 10))
    engine.turn(name, range(40, 60), 20)
    second = request.num_prompt_tokens - 1
    engine.drain()
    engine.exporter.shutdown()
    stored, tokens = engine.stored[name], list(request.all_token_ids)
    length, samples, *_, losses = stored.ends[0]
    positions = [*first, *range(second, length)]
    assert samples == {"logits": len(positions)} and len(first) > 9 * outputs and losses == []
    assert [stored.logits[index] for index in range(len(positions))] == [(tokens[at], at) for at in positions]


def test_a_turn_of_a_single_step_has_its_logits_with_drafts(make: Make) -> None:
    """The first step of the session is the last one of its turn, because the next prompt arrives before another
    step.
    """
    numbers = count(5)
    engine = make(ahead=False, drafts=3, hooks="q,logits", tokens=lambda: next(numbers))
    name = engine.add(range(5, 15), 1, resumable=True)
    engine.turn(name, range(40, 60), 20)
    request = engine.requests[name]
    assert request.num_prompt_tokens == 30
    engine.drain()
    engine.exporter.shutdown()
    stored, tokens = engine.stored[name], list(request.all_token_ids)
    length, samples, *_, losses = stored.ends[0]
    positions = [9, *range(29, length)]
    assert samples == {"logits": len(positions)} and losses == []
    assert [stored.logits[index] for index in range(len(positions))] == [(tokens[at], at) for at in positions]


@pytest.mark.parametrize("waits", [False, True])
def test_the_drafts_at_the_end_of_a_turn_are_known(make: Make, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """The step in flight is dropped before another one is planned. waits: whether the next prompt is there already."""
    sessions_of_033(monkeypatch)
    engine = make(drafts=3, tokens=lambda: 9)
    name = engine.add(range(5, 15), 30, resumable=True)
    for turn in range(4):
        if waits:
            engine.send(name, range(40, 50), 30)
        while engine.requests[name].status != RequestStatus.WAITING_FOR_STREAMING_REQ and (
            len(engine.turns.get(name, ())) <= turn
        ):
            engine.step()
        engine.settle()
        if not waits:
            engine.send(name, range(40, 50), 30)
    engine.hang_up(name)
    engine.drain()
    assert engine.faults() == [] and len(engine.turns[name]) == 4
    index: Any = engine.stored[name].draft_index
    assert index.max() == 3


def test_an_abort_between_two_turns_keeps_the_logits_of_the_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt has arrived when the turn ends. The client disconnects before another step."""
    sessions_of_033(monkeypatch)
    numbers = count(5)
    engine = make(ahead=False, drafts=3, hooks="q,logits", tokens=lambda: next(numbers))
    name = engine.add(range(5, 15), 12, resumable=True)
    engine.send(name, range(40, 60), 20)
    while name not in engine.turns:
        engine.step()
    engine.abort(name)
    engine.drain()
    assert engine.faults() == [] and len(engine.stored[name].logits) > 9


@pytest.mark.parametrize("pages", [0, 60])
@pytest.mark.parametrize(("drafts", "outputs"), [(0, True), (3, True), (3, False)])
def test_a_turn_that_ends_after_a_preemption_is_complete(
    make: Make, monkeypatch: pytest.MonkeyPatch, drafts: int, outputs: bool, pages: int
) -> None:
    """Its last step is in flight at the preemption, and the next prompt has arrived."""
    sessions_of_033(monkeypatch)
    numbers, preempted = count(5), 0
    engine = make(drafts=drafts, hooks="q,logits", tokens=lambda: next(numbers), pages=pages)
    name = engine.add(range(5, 15), 9, outputs=outputs, resumable=True)
    request = engine.requests[name]
    for turn in range(6):
        engine.send(name, range(40, 50), 9)
        while len(engine.turns.get(name, ())) <= turn:
            before = request.status
            engine.step()
            preempted += before == RequestStatus.PREEMPTED and len(engine.turns.get(name, ())) > turn
            if request in engine.scheduler.running and request.num_output_tokens > 4:
                engine.preempt(name)
    engine.hang_up(name)
    engine.drain()
    assert engine.faults() == [] and preempted > 1


def converse(engine: Engine, steps: int) -> None:
    """Run sessions of several turns next to other requests, with waiting prompts, aborts between turns, and
    preemptions.
    """
    random, sessions = engine.random, dict[str, int]()
    for _ in range(steps):
        for name in [name for name, turns in sessions.items() if random.random() < 0.2]:
            sessions[name] -= 1
            if engine.requests[name].is_finished() or not sessions[name]:
                del sessions[name]
                if not engine.requests[name].is_finished():
                    engine.hang_up(name)
            else:
                engine.send(name, [random.randrange(5, 30) for _ in range(random.randrange(1, 16))], 12)
        if random.random() < 0.3 and len(engine.requests) - len(engine.replies) < 8:
            prompt = [3 + n % 20 for n in range(random.randrange(1, 50))]
            name = engine.add(prompt, 12, outputs=random.random() < 0.7, resumable=len(sessions) < 3)
            if engine.requests[name].resumable:
                sessions[name] = random.randrange(1, 5)
        running = [request.request_id for request in engine.scheduler.running]
        if running and random.random() < 0.08:
            engine.preempt(random.choice(running))
        alive = [name for name, request in engine.requests.items() if not request.is_finished()]
        if alive and random.random() < 0.05:
            engine.abort(random.choice(alive))
        engine.step()
    for name in sessions:
        if not engine.requests[name].is_finished():
            engine.hang_up(name)
    engine.drain()


@pytest.mark.parametrize("seed", seeds(12))
def test_turns_of_sessions_are_complete_in_random_histories(
    make: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In some of them, no step is planned between the end of a turn and a result that the turn drops."""
    sessions_of_033(monkeypatch)
    kind = {"blocks": 60, "ahead": seed > 0, "pages": 60 * (seed % 2), "chunk": (1, 8)[seed % 3 == 0]}
    engine = make(seed=seed, drafts=seed % 5, hooks="q,logits", on_gpu=seed % 3 == 0, **kind)
    converse(engine, steps=80)
    assert engine.faults() == [] and sum(map(len, engine.turns.values())) > 10


def test_draft_indexes_of_two_steps_that_return_at_once_are_unknown(make: Make) -> None:
    """A pause lets the steps in flight end before another step is planned."""
    engine = make(drafts=3, hooks="q,logits", tokens=lambda: 9)
    name = engine.add(PROMPT, 60)
    for _ in range(6):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    known = engine.requests[name].num_tokens
    while engine.busy:
        engine.step()
    paused = engine.requests[name].num_tokens
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    index = engine.stored[name].draft_index
    assert index is not None and paused > known + 1
    unknown = [at for at, number in enumerate(index) if number == DRAFT_UNKNOWN]
    assert unknown and set(unknown) <= set(range(known - 5, paused))
    [fault] = engine.faults()
    assert "draft_index" in fault, "rows and logits are right"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_draft_index_is_wrong_if_two_steps_end_at_once(make: Make, seed: int, reset: bool) -> None:
    """Two steps end at once in a pause, and at the start and the end of requests. Indexes are then unknown.

    reset: whether the pause ends with a reset of the cache and of the running requests, as after new weights.
    """
    engine = make(seed=seed, drafts=3)
    for _ in range(80):
        if engine.random.random() < 0.2:
            engine.add([5 + engine.random.randrange(20) for _ in range(9)], engine.random.randrange(1, 60))
        engine.step()
        if engine.random.random() < 0.2:
            engine.settle()
            if reset:
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    found: Counter[bool] = Counter()
    for name, stored in engine.stored.items():
        index: Any = stored.draft_index
        found.update((index == DRAFT_UNKNOWN).tolist())
        pairs = zip(index.tolist(), engine.drafted[name], strict=False)
        assert all(mine in (number, DRAFT_UNKNOWN) for mine, number in pairs), name
    assert 0 < found[True] < found[False]


@pytest.mark.parametrize("ahead", [False, True])
def test_only_logits_of_captured_requests_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """With asynchronous scheduling, logits of as many tokens as the previous step may have accepted are kept too."""
    engine, kept = make(drafts=3, hooks="q,logits", ahead=ahead), []
    held = engine.exporter.logits.draft_logits
    add = held.add

    def noted(number: int, logits: torch.Tensor, slots: torch.Tensor) -> None:
        kept.append(len(logits))
        add(number, logits, slots)

    monkeypatch.setattr(held, "add", noted)
    engine.add(PROMPT, 40)
    for _ in range(5):
        engine.add(PROMPT, 60, {"enabled": False})
    engine.drain()
    assert engine.faults() == [] and len(engine.stored) == 1 and max(kept) == (8 if ahead else 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_response_names_lost_logits(make: Make, ahead: bool) -> None:
    """A response names rows that were lost before the last step. The store lists all lost rows."""
    engine = make(drafts=3, hooks="q,logits", ahead=ahead, policy="drop", tokens=lambda: 9)
    name = engine.add(PROMPT, 60)
    send, logits = engine.exporter.logits._send, engine.exporter.logits

    def take_steps(number: int, room: bool) -> None:
        logits._send = send if room else lambda *_: False  # type: ignore[method-assign]
        for _ in range(number):
            engine.step()

    take_steps(5, room=True)
    take_steps(4, room=False)
    take_steps(3, room=True)
    assert name not in engine.replies
    logits._send = send  # type: ignore[method-assign]
    engine.drain()
    *_, losses = engine.stored[name].ends[0]
    lost = {row for loss in losses for start, stop in loss.rows for row in range(start, stop)}
    named = {row for start, stop in engine.replies[name]["dmi_missing"] for row in range(start, stop)}
    assert named == lost and len(lost) > 4
    assert lost.isdisjoint(position for _, position in engine.stored[name].logits.values())


def test_each_row_of_logits_is_requested_once(make: Make) -> None:
    """A request that waits for its last token while others run is not scheduled."""
    engine = make(hooks="q,logits", tokens=lambda: 9)
    for length in range(5):
        engine.add(PROMPT, 5 + 2 * length)
    engine.drain()
    assert len(engine.samples) == len(set(engine.samples)) == sum(5 + 2 * length for length in range(5))


def test_a_chunk_completed_by_the_last_step_is_exported_before_its_blocks_are_freed(make: Make) -> None:
    """The cache is too small for six requests. Of a preempted request, all whole chunks of known tokens are
    exported.
    """
    engine = make(blocks=24, chunk=4, hooks="q,logits", tokens=lambda: 9)
    schedule, found = engine.scheduler.schedule, 0

    def look() -> Any:
        nonlocal found
        running = {r.request_id: min(r.num_computed_tokens, r.num_tokens) for r in engine.scheduler.running}
        output = schedule()
        for name in output.preempted_req_ids or ():
            found += 1
            assert engine.tracker.tracked[name].exported == running[name] // 4 * 4
        return output

    engine.scheduler.schedule = look  # type: ignore[method-assign]
    for _ in range(6):
        engine.add(PROMPT, 100)
    engine.drain()
    assert found > 5 and engine.faults() == []
