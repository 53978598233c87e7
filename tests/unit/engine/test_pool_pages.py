# SPDX-License-Identifier: Apache-2.0
"""Slots of rows in a pool, in random histories of a simulated scheduler and worker.

The simulated worker gathers rows as late as it may, so a page that is written too early gives a wrong row.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.connector import DMIConnector
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.host_scores import KEPT_STEPS
from dmi_connector.engine.messages import RankMemory, Report, Rows, StepMetadata
from dmi_connector.engine.owners import pool_borrowing, pool_limits
from dmi_connector.engine.owners.pool_free import Pages
from dmi_connector.engine.owners.pool_limits import StepLimits, page_size, pages_of
from dmi_connector.engine.owners.pool_pages import PoolSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from tests.probekit import save_probe
from tests.trackerkit import DIMS, FakeRequest, dropped, make_tracker

TOKENS, REQUESTS = 48, 4
"""Maximum tokens of a step, and maximum number of running requests."""
LONGEST = 130
"""Maximum tokens of a request."""
STORES: set[str] = set()
"""Paths of the stores that exist."""
HELD: Counter[str] = Counter()
"""{path: number of holds}. A held store stays readable after it is removed."""


class Held:
    """Fake holds of the stores in STORES, which HELD counts."""

    @staticmethod
    def hold(store: str) -> str:
        """Hold a store. Returns its path."""
        if store not in STORES:
            raise FileNotFoundError(store)
        HELD[store] += 1
        return store

    @staticmethod
    def release(held: str) -> None:
        """Release a hold."""
        assert HELD[held] > 0
        HELD[held] -= 1


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Make the minimum token budget small, so that these short steps can be lowered to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_limits, "_PROMPT_TOKENS", 6)
        patch.setattr(pool_borrowing, "_WAIT_S", -1.0)
        yield


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, CaptureContext]:
    """{tokens per chunk: context}."""
    root = tmp_path_factory.mktemp("stores")
    risk = str(save_probe(root / "risk.safetensors", "mlp_out", (1,), DIMS.hidden, 1))
    options = {"hooks": "q,probe.risk", "probes": {"risk": risk}, "sink": "host"}
    return {n: make_tracker(root, chunk_tokens=n, segment_tokens=8 * n, **options).context for n in (1, 8, 16, 24)}


@dataclass
class Life(FakeRequest):
    """A request of the simulation.

    blocks: its blocks of vLLM's cache. left: tokens that it will still generate. drafts: draft tokens of its next step.
    rows: positions of gathered rows. length: number of rows according to its close. cached: number of its blocks in the
    prefix cache. borrowed: number of borrowed rows. handed: number of rows that were passed to the worker. age: number
    of cache resets before it began. least: for `keep_if`: the request is kept if a row's score, which is its position,
    exceeds this.
    """

    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    status: Any = None
    num_output_placeholders: int = 0
    blocks: list[int] = field(default_factory=list)
    left: int = 0
    drafts: int = 0
    captured: bool = True
    rows: list[int] = field(default_factory=list)
    length: int | None = None
    start: int = 0
    cached: int = -1
    borrowed: int = 0
    handed: int = 0
    age: int = 0
    least: int | None = None
    finish: str = "length"

    def get_finished_reason(self) -> str:  # type: ignore[override]
        return self.finish

    def hash_tokens(self, size: int) -> None:
        """Add hashes of the new full blocks. As in vLLM, each hash covers all tokens up to the end of its block."""
        for stop in range((len(self.block_hashes) + 1) * size, self.num_tokens + 1, size):
            self.block_hashes.append(repr(self.tokens[:stop]).encode())


class Model:
    """Simulates vLLM's scheduler, cache and runner, and a worker, for one history."""

    def __init__(self, seed: int, contexts: dict[int, CaptureContext]) -> None:
        self.random = r = random.Random(seed)
        context = contexts[r.choice([*contexts])]
        self.block = r.choice([8, 16, 16, 32])
        self.size = page_size(self.block)
        self.ahead = r.random() < 0.6
        self.drafts = 0 if self.ahead or r.random() < 0.6 else r.randrange(1, 4)
        self.config = SimpleNamespace(max_num_batched_tokens=TOKENS)
        limits = StepLimits(self.config, TOKENS, REQUESTS, 1 + self.drafts, whole=r.random() < 0.1)
        self.free = list(range(1, 1 + -(-LONGEST // self.block) * r.choice([1, 2, 4])))
        self.slots = PoolSlots(context, 0, self.block, len(self.free) + 1, limits)
        least = limits.pages_of_step(limits.floor(REQUESTS), self.size) + self.slots.most
        pages = least + r.choice([0, 0, 1, self.slots.most, 4 * self.slots.most, 200])
        self.slots.sized(pages)
        self.tracker = Tracker(context, self.slots, r.choice([4, 40, 1 << 60]), behind=int(self.ahead))
        # {slot: (request, position, whether the token was accepted)}
        self.memory: dict[int, tuple[str, int, bool]] = {}
        self.table: dict[int, int] = {}
        self.due: deque[Rows] = deque()
        self.gathered = 0
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.results: deque[list[tuple[Life, bool]]] = deque()  # whether each step samples a token for a request
        self.copies: deque[list[tuple[int, int]]] = deque()  # slots and scores of rows of steps, to be copied
        slots = self.block * (len(self.free) + 1)
        self.lines = np.full((slots + KEPT_STEPS * TOKENS, 1), np.nan, np.float32)
        self.tracker.scores._lines, self.tracker.scores._cache_lines = [self.lines], slots
        self.lives: dict[str, Life] = {}
        self.by_capture: dict[int, Life] = {}
        self.preempted: set[str] = set()
        self.seen: set[str] = set()  # requests that the runner knows
        self.lowest = TOKENS
        self.by_store: dict[str, Life] = {}
        self.over: list[str] = []  # stores that no report has named
        self.spoiled: set[str] = set()  # stores with missing rows
        self.kept = [0, 0]  # requests with `keep_if` that were dropped, and that were kept
        self.heads: set[str] = set()  # requests for which all others waited
        self.copied = 0  # number of scores of preempted requests that were copied to other lines
        self.slots.borrowing.sources._enabled = True
        self.slots.borrowing._holds = Held()
        STORES.clear()
        HELD.clear()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(self) -> None:
        r, name = self.random, f"r{len(self.lives)}"
        longest = TOKENS if self.slots.limits.whole else LONGEST
        prompt = r.randrange(1, longest * 2 // 3)
        kv: Any = {"include_output_tokens": r.random() < 0.8}
        start = 0
        if r.random() < 0.2:
            start = r.randrange(0, prompt)
            kv["dmi"] = {"tokens": [start, r.choice([None, start + 1 + r.randrange(60)])]}
        captured = r.random() < 0.8
        first = r.choice([0, 0, 0, 1000])
        life = Life(name, kv if captured else None, list(range(first, first + prompt)), prompt)
        life.hash_tokens(self.block)
        life.left, life.captured, life.start = min(r.randrange(1, 40), longest - prompt), captured, start
        life.skip_reading_prefix_cache = r.random() < 0.1
        life.max_tokens = life.left
        if captured and r.random() < 0.3:
            life.least = r.randrange(-1, prompt + life.left)
            kv.setdefault("dmi", {})["keep_if"] = f"max(risk) > {life.least}"
        if not captured:
            life.kv_transfer_params = {"dmi": {"enabled": False}}
        self.lives[name] = life
        self.tracker.on_new_request(life)  # type: ignore[arg-type]
        life.captured = name in self.tracker.tracked
        assert life.captured == (captured and (life.least is None or self.holds(life)))
        if life.captured:
            self.by_capture[self.tracker.tracked[name].capture] = life
            self.by_store[self.tracker.tracked[name].path] = life
        self.waiting.append(life)

    def holds(self, life: Life) -> bool:
        """Whether the pool has room for all rows of a request in addition to the largest of the shortest steps."""
        dmi: Any = life.kv_transfer_params["dmi"]  # type: ignore[index]
        include = life.kv_transfer_params["include_output_tokens"]  # type: ignore[index]
        _, stop = dmi.get("tokens") or (0, None)
        tokens = life.num_prompt_tokens + (life.max_tokens + 2 * (1 + self.drafts) if include else 0)
        last = min(tokens, tokens if stop is None else stop) - 1
        pages = len({position // self.size for position in range(life.start, last + 1)})
        limits = self.slots.limits
        return pages + limits.pages_of_step(limits.floor(REQUESTS), self.size) <= self.slots.pages.count

    def end(self, life: Life, own: bool = False) -> None:
        """End a request. own: whether it ended by itself; otherwise it is aborted."""
        life.finish = "length" if own else "abort"
        for queue in (self.waiting, self.running):
            if life in queue:
                queue.remove(life)
        before, inputs = len(self.tracker.pending_closes), max(life.num_prompt_tokens, life.num_tokens - 1)
        if (tracked := self.tracker.tracked.get(life.request_id)) is not None:
            self.over.append(tracked.path)
        self.tracker.finish(life, life.blocks)  # type: ignore[arg-type]
        for close in self.tracker.pending_closes[before:]:
            life.length = close.length
        if tracked is not None and tracked.opened and life.least is not None:
            assert tracked.scores is not None
            known, first = tracked.scores.of("risk").ravel().tolist(), tracked.scores.first
            assert known == [*range(first, first + len(known))], f"{life.request_id} has scores of others"
            if own and life.blocks:
                assert first + len(known) == max(first, min(inputs, tracked.limit)), (
                    f"{life.request_id} has too few scores"
                )
            kept = not known or max(known) > life.least or (own and not life.blocks)  # some scores are not known yet
            assert (life.length is not None) == kept, f"{life.request_id} was wrongly kept or dropped"
            self.kept[life.length is not None] += 1
        self.free += life.blocks
        self.random.shuffle(self.free)
        life.blocks, life.left = [], -1
        self.seen.discard(life.request_id)

    def preempt(self, life: Life) -> None:
        self.running.remove(life)
        self.waiting.insert(0, life)
        self.free += life.blocks
        life.blocks, life.num_computed_tokens = [], 0
        life.drafts = 0
        self.preempted.add(life.request_id)

    # ---- a pass of the scheduler ------------------------------------------------------------------------------------

    def give(self, life: Life, tokens: int) -> list[int] | None:
        more = -(-(life.num_computed_tokens + tokens) // self.block) - len(life.blocks)
        if more > len(self.free):
            return None
        given = [self.free.pop() for _ in range(max(0, more))]
        life.blocks += given
        return given

    def ask(self, life: Life) -> int:
        """Number of tokens that a request could compute."""
        return life.num_tokens + self.in_flight(life) + life.drafts - life.num_computed_tokens

    def in_flight(self, life: Life) -> int:
        """Number of its sampled tokens that are not known yet."""
        return sum(one is life and samples for step in self.results for one, samples in step)

    def step(self) -> int:
        """Run one step. Returns its number of tokens."""
        budget = self.config.max_num_batched_tokens
        self.lowest = min(self.lowest, budget)
        scheduled: dict[str, int] = {}
        given: dict[str, list[int]] = {}
        computed: dict[str, int] = {}
        for life in [*self.running]:
            if life not in self.running or not budget:
                continue
            n = min(self.ask(life), budget)
            if n <= 0:
                continue
            blocks = self.give(life, n)
            while blocks is None:
                victim = self.running[-1]
                if victim.request_id in scheduled:
                    budget += scheduled.pop(victim.request_id)
                self.preempt(victim)
                if victim is life:
                    break
                blocks = self.give(life, n)
            if blocks is not None:
                scheduled[life.request_id], given[life.request_id] = n, blocks
                computed[life.request_id] = life.num_computed_tokens
                budget -= n
        new: list[Any] = []
        resumed: set[str] = set()
        for life in [*self.waiting] if not self.preempted else []:
            if not budget or len(self.running) >= REQUESTS:
                break
            if self.in_flight(life):
                continue  # its last result is still in flight
            most = min((life.num_tokens - 1) // self.block, len(life.block_hashes))
            most = 0 if life.skip_reading_prefix_cache else most
            if life.cached < 0 or self.random.random() < 0.1:  # blocks were evicted, or other requests computed them
                life.cached = self.random.choice([0, self.random.randrange(most + 1), LONGEST, LONGEST])
            hit = min(life.cached, most) * self.block
            answer, _ = self.slots.matched(life, hit)  # type: ignore[arg-type]
            if life.skip_reading_prefix_cache:
                answer = 0
            if answer is None:
                continue
            assert len(life.block_hashes) >= life.num_tokens // self.block, "vLLM needs the hashes of all full blocks"
            life.num_computed_tokens = hit
            n = min(life.num_tokens - hit, budget)
            if (self.slots.limits.whole and n < life.num_tokens - hit) or self.give(life, n) is None:
                life.num_computed_tokens = 0
                break
            self.waiting.remove(life)
            self.running.append(life)
            scheduled[life.request_id], computed[life.request_id] = n, hit
            budget -= n
            if life.request_id in self.seen:
                resumed.add(life.request_id)
                given[life.request_id] = life.blocks
            else:
                life.age = self.slots.borrowing.sources.age
                new.append(SimpleNamespace(req_id=life.request_id, block_ids=(life.blocks,), num_computed_tokens=hit))
                self.seen.add(life.request_id)
        self.prompts = {name for name in scheduled if name in self.slots._prompts}
        old = [name for name in scheduled if name not in {one.req_id for one in new}]
        output: Any = SimpleNamespace(
            preempted_req_ids=set(self.preempted) or None,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old,
                new_block_ids=[(given[name],) if given[name] else None for name in old],
                resumed_req_ids=resumed,
                num_computed_tokens=[computed[name] for name in old],
            ),
            scheduled_spec_decode_tokens={},
        )
        self.preempted.clear()
        message = self.tracker.step(output)
        for name, rows in self.slots._rows.items():
            prompt = scheduled.get(name, 0) if name in self.prompts else 0
            assert len(rows.pages) <= rows.most + prompt // self.size, f"{name} has {len(rows.pages)} pages"
        if self.slots.head.request is not None:
            self.heads.add(self.slots.head.request.tracked.request.request_id)
        self.work(message, [(self.lives[name], computed[name], n) for name, n in scheduled.items()])
        if scheduled:
            self.results.append([])
        for name, n in scheduled.items():
            life = self.lives[name]
            self.results[-1].append((life, n == self.ask(life)))
            life.num_computed_tokens += n
        if self.results and (not self.ahead or len(self.results) > 1 or not scheduled):
            self.take_result()
        return sum(scheduled.values())

    def copy_scores(self, left: int) -> None:
        """Copy the scores of all steps except the last `left` to the host. The score of a row is its position."""
        while len(self.copies) > left:
            for slot, position in self.copies.popleft():
                self.lines[slot] = position

    def take_result(self) -> None:
        self.copy_scores(len(self.results) - 1)
        for life, samples in self.results.popleft():
            if life.left < 0 or not samples:
                continue  # the request has ended, or its prompt is not complete
            if self.drafts:
                rejected = self.random.randrange(life.drafts + 1) if life.drafts else 0
                if life.num_computed_tokens:
                    life.num_computed_tokens -= rejected
                grown = 1 + life.drafts - rejected
                taken = range(life.num_tokens, life.num_tokens + grown - 1)
                for slot, (name, position, _) in self.memory.items():
                    if name == life.request_id and position in taken:
                        self.memory[slot] = name, position, True
            else:
                grown = 1
            grown = min(grown, life.left)
            life.tokens += [7] * grown
            life.hash_tokens(self.block)
            life.left -= grown
            life.drafts = self.random.randrange(self.drafts + 1) if life.num_computed_tokens else 0
            life.drafts = min(life.drafts, max(0, life.left - 1))
            if not life.left:
                life.num_computed_tokens = min(life.num_computed_tokens, life.num_tokens)
                self.end(life, own=True)

    # ---- the worker -------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        rows = self.due.popleft()
        life = self.by_capture[rows.capture]
        for index, slot in enumerate(rows.slots.tolist()):
            position = life.start + rows.first + index
            found = self.memory.get(slot)
            assert found == (life.request_id, position, True), f"{life.request_id} {position} at {slot}: {found}"
            life.rows.append(position)
        self.gathered += len(rows.slots)

    def check_opens(self, message: StepMetadata) -> None:
        """Check that borrowed rows exist, were passed to the worker, and belong to the same first tokens."""
        resets = self.slots.borrowing.sources.age
        for opened in message.opens:
            life, borrow = self.by_capture[opened.capture], opened.borrow
            if borrow is None:
                continue
            assert life.least is None, "a request with keep_if must not borrow, because borrowed rows have no scores"
            source, rows = self.by_store[borrow.path], len(borrow.token_ids)
            stop = life.start + rows
            assert borrow.request_id == source.request_id and opened.attrs["borrowed_tokens"] == rows > 0
            assert source.start == life.start and rows % self.tracker.context.options.chunk_tokens == 0
            assert source.tokens[:stop] == life.tokens[:stop] and source.age == resets
            assert borrow.token_ids.tolist() == life.tokens[life.start : stop]
            assert borrow.path not in self.spoiled
            assert source.handed + source.borrowed >= rows, "borrowed rows were not passed to the worker"
            assert source.left >= 0 or HELD[borrow.path], "the source's store is gone"
            life.borrowed = rows

    def work(self, message: StepMetadata, tokens: list[tuple[Life, int, int]]) -> None:
        for told in (message.closes, message.leaving, message.chunks):
            if told is message.chunks:
                self.check_opens(message)
            for each in told:
                life = self.by_capture[each.capture]  # type: ignore[attr-defined]
                assert life.least is None or life.left < 0, "rows of a request with keep_if must wait for its end"
                life.handed += sum(len(rows.slots) for rows in getattr(each, "rows", [each]))
        for close in message.closes:
            assert close.stays and not close.keeps_blocks
            self.due += close.rows
        self.due += message.leaving
        for slots, line in message.kept_scores:
            self.copy_scores(0)  # on the stream, these copies come first
            self.lines[line : line + len(slots)] = self.lines[slots]
            self.copied += len(slots)
        while self.gathered < message.need:
            self.gather()
        if message.table is not None:
            entries, pages = message.table.tolist()
            assert len(set(entries)) == len(entries)
            self.table.update(zip(entries, pages, strict=True))
            used = [page for page in self.table.values() if page >= 0]
            assert len(used) == len(set(used)) and 0 not in used, "a page has two entries"
        copies: list[tuple[int, int]] = []
        for life, first, count in tokens:
            for position in range(first, first + count):
                slot = life.blocks[position // self.block] * self.block + position % self.block
                page = self.table.get(slot // self.size, -1)
                if page >= 0:
                    copies.append((slot, position))
                    assert life.captured, "a row of a request that is not captured"
                    known = position < life.num_tokens + self.in_flight(life)
                    self.memory[page * self.size + slot % self.size] = life.request_id, position, known
        if tokens:
            self.copies.append(copies)
        if self.random.random() < 0.5:
            self.copy_scores(0)
        self.due += message.chunks
        while self.due and self.random.random() < 0.3:
            self.gather()
        if message.report or self.random.random() < 0.2:
            self.tracker.gathered = self.gathered

    # ---- a history --------------------------------------------------------------------------------------------------

    def live(self, steps: int) -> None:
        r, idle = self.random, 0
        for number in range(100_000):
            if number < steps and r.random() < 0.4 and len(self.waiting) < 5:
                self.add()
            here = [*self.waiting, *self.running]
            if here and r.random() < 0.03:
                self.end(r.choice(here))
            if r.random() < 0.5:
                STORES.update(self.over)
                self.tracker.on_report(Report(self.tracker.gathered, stored=dict.fromkeys(self.over, True)))
                self.over.clear()
            if STORES and r.random() < 0.03:
                STORES.discard(r.choice(sorted(STORES)))
            if self.by_store and r.random() < 0.03:
                spoiled = r.choice([*self.by_store])
                report = Report(self.tracker.gathered, stored={spoiled: False})
                if r.random() < 0.5:
                    capture = next(n for n, life in self.by_capture.items() if life is self.by_store[spoiled])
                    report = Report(self.tracker.gathered, lost={capture: [dropped([0, 1])]})
                self.tracker.on_report(report)
                self.spoiled.add(spoiled)
            if r.random() < 0.015:
                self.slots.borrowing.sources.reset()
            if self.running and r.random() < 0.02:
                self.preempt(r.choice(self.running))
            tokens = self.step()
            idle = 0 if tokens or self.results or not here else idle + 1
            if number >= steps and not (self.waiting or self.running or self.results):
                break
            assert idle < 6, f"{len(self.waiting)} requests wait and {len(self.running)} run forever"
        self.step()
        while self.due:
            self.gather()

    def check(self) -> None:
        """Check that every row was gathered once and that all pages and holds were released."""
        for life in self.lives.values():
            if life.length is None:
                assert not life.rows
                continue
            assert life.rows == list(range(life.start + life.borrowed, life.start + life.length)), life.request_id
        assert not self.slots._rows and not self.slots._prompts and self.slots._waiting == 0
        assert HELD.total() == len(self.slots.borrowing._lent)
        self.tracker.gathered = self.gathered
        self.step()
        assert sorted(self.slots.pages.free) == list(range(1, self.slots.pages.count + 1)), "a page was not released"
        assert all(page < 0 for page in self.table.values()), "an entry was not removed"
        assert self.config.max_num_batched_tokens == TOKENS


def run(seeds: range, contexts: dict[int, CaptureContext]) -> Counter[str]:
    """Counts of events in these histories. lowered: histories in which the token budget was lowered."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        model = Model(seed, contexts)
        try:
            model.live(model.random.randrange(5, 40))
            model.check()
        except Exception as error:
            raise AssertionError(f"history {seed}: {error}") from error
        borrowed = sum(life.borrowed for life in model.lives.values())
        assert model.slots.take_counts()["borrowed_tokens"] == borrowed
        seen["rows"] += sum(len(life.rows) for life in model.lives.values())
        seen["borrowed"] += borrowed
        seen["lowered"] += model.lowest < TOKENS
        seen["dropped"] += model.kept[0]
        seen["kept"] += model.kept[1]
        seen["heads"] += len(model.heads)
        seen["copied"] += model.copied
        seen["refused"] += sum(life.least is not None and not life.captured for life in model.lives.values())
    return seen


def test_every_row_comes_once_from_its_page_in_random_histories(contexts: dict[int, CaptureContext]) -> None:
    seen = run(range(400), contexts)
    assert seen["rows"] > 10_000 and seen["borrowed"] > 1_000 and seen["lowered"] > 50, seen
    assert min(seen[what] for what in ("dropped", "kept", "heads", "refused", "copied")) > 40, seen


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_every_row_comes_once_in_many_histories(contexts: dict[int, CaptureContext], part: int) -> None:
    run(range(1000 + 5000 * part, 1000 + 5000 * (part + 1)), contexts)


@pytest.mark.parametrize(("rows", "pages"), [(1, 1), (2, 2), (16, 2), (17, 2), (18, 3), (97, 7)])
def test_rows_take_so_many_pages_at_most(rows: int, pages: int) -> None:
    assert pages_of(rows) == pages == max(len({(at + i) // 16 for i in range(rows)}) for at in range(16))


def test_pages_are_used_again_in_the_order_in_which_their_rows_left() -> None:
    pages = Pages(2)
    assert [pages.take(), pages.take(), pages.take_need()] == [1, 2, 0]
    with pytest.raises(RuntimeError, match="the pool has no free page"):
        pages.take()
    pages.give_back(2, 10)
    pages.give_back(1, 30)
    pages.gathered(10)
    assert (pages.take(), pages.take_need()) == (2, 0), "the rows of this page are gathered"
    assert (pages.take(), pages.take_need(), pages.take_need()) == (1, 30, 0), (
        "the rows of this page must be gathered first"
    )


def test_the_scheduler_half_hears_of_the_smallest_pool_and_of_none() -> None:
    """vLLM passes empty metadata if no worker has any."""
    heard: list[Any] = []
    connector = DMIConnector.__new__(DMIConnector)
    scores = SimpleNamespace(open=lambda *given: heard.append(given))
    parts = {"slots": SimpleNamespace(sized=heard.append), "scores": scores}
    connector.tracker = SimpleNamespace(**parts)  # type: ignore[assignment]
    connector.set_xfer_handshake_metadata({})
    connector.set_xfer_handshake_metadata({1: RankMemory(), 0: RankMemory()})
    connector.set_xfer_handshake_metadata({1: RankMemory(9, "b", 48), 0: RankMemory(7, "a", 48)})
    assert heard == [(["", ""], 0), 7, (["a", "b"], 48)]
