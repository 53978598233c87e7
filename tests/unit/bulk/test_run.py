# SPDX-License-Identifier: Apache-2.0
"""Runs with fake engines: bad rows, captures that fail, engines that die, disk budgets."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmi_connector.bulk import budget as budget_module
from dmi_connector.bulk import run as run_module
from dmi_connector.bulk.budget import Budget
from dmi_connector.bulk.engines import Answer, Death
from dmi_connector.bulk.order import Order
from dmi_connector.bulk.progress import Counts, Progress
from dmi_connector.bulk.run import Run
from dmi_connector.bulk.signals import stopped_by_signals
from dmi_connector.cli.run import _summarise, _wait_for_uploads
from dmi_connector.store.format.locks import lock_alone
from dmi_connector.store.write.finish.commit import append_index
from dmi_connector.store.write.finish.retention import remove_store
from tests.bulkkit import PROMPT, ROWS, RUN, FakeEngines, check_whole, go, start_run, template, write_prompts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "one.zarr")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def rejects(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]


def test_bad_rows_are_listed_and_the_others_are_captured(store: Path, out: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 6, bad=(1,))
    with open(prompts, "a") as file:
        file.write('\n{"prompt": 3, "id": "three"}\n{"text": "x", "id": 4}\n"text"\nnull\n')
    engines = FakeEngines(store, out, refuses={4: "the prompt is too long"})
    outcome = go(prompts, out, engines)
    assert outcome.all_done, "bad rows must not count as remaining prompts"
    check_whole(out, [0, 2, 3, 5])
    found = {entry["line"]: entry for entry in rejects(out)}
    assert sorted(found) == [2, 5, 8, 9, 10, 11], "line 7 of the file is blank"
    assert outcome.counts.total == outcome.counts.done + outcome.counts.rejected, "a blank line must not count as a row"
    assert all(entry["row"] == line - 1 and entry["kind"] == "rejected" for line, entry in found.items())
    assert "not JSON" in found[2]["reason"] and found[5]["reason"] == "the prompt is too long"
    assert (found[5]["id"], found[8]["id"], found[9]["id"]) == ("id-4", "three", "4")
    assert found[8]["reason"] == "prompt: 3 is not a string"
    assert "none of the columns" in found[9]["reason"] and "is not an object" in found[10]["reason"]
    assert found[11]["reason"].startswith("the line is null; give an object")
    assert (outcome.counts.done, outcome.counts.rejected, outcome.counts.failed) == (4, 6, 0)


def test_a_run_fails_if_every_row_is_rejected(store: Path, out: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    prompts, progress = write_prompts(tmp_path / "p.jsonl", 3), Progress(False, said)
    refuses = dict.fromkeys(range(3), "the prompt is too long")
    outcome = start_run(prompts, out, FakeEngines(store, out, refuses=refuses), progress=progress).go()
    assert outcome.all_done and _summarise(outcome, [0], (0, None), out, "", progress) == 1
    assert said.getvalue().endswith(
        "no prompt was captured: correct the input, --column or other options by the reasons above\n"
    )
    outcome = start_run(prompts, out, FakeEngines(store, out, refuses={1: "it is too long"}), progress=progress).go()
    assert _summarise(outcome, [2], (0, None), out, "", progress) == 0, "one bad row must not fail the run"


@pytest.mark.parametrize(
    "fault",
    [{"complete": False, "reason": "a disk was full"}, {"finish_reason": "abort"}],
    ids=["incomplete", "aborted"],
)
def test_an_incomplete_capture_is_repeated(fault: dict[str, Any], store: Path, out: Path, tmp_path: Path) -> None:
    engines = FakeEngines(store, out, faults={2: fault})
    outcome = go(write_prompts(tmp_path / "p.jsonl", 5), out, engines)
    assert outcome.all_done and engines.submitted.count(2) == 2
    check_whole(out, range(5))


def test_a_capture_that_stays_incomplete_fails_and_is_tried_by_the_next_start(
    store: Path, out: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 5)

    class Bad(FakeEngines):
        def submit(self, position: int, key: str, prompt: Any) -> None:
            if position == 2:
                self.faults[2] = {"complete": False, "reason": "a disk was full"}
            super().submit(position, key, prompt)

    engines = Bad(store, out)
    outcome = go(prompts, out, engines)
    assert not outcome.all_done and outcome.counts.failed == 1 and engines.submitted.count(2) == 2
    assert [(e["row"], e["kind"]) for e in rejects(out)] == [(2, "failed")] and "a disk was full" in rejects(out)[0][
        "reason"
    ]
    check_whole(out, [0, 1, 3, 4])
    assert go(prompts, out, FakeEngines(store, out)).all_done
    check_whole(out, range(5))


def test_an_engine_that_dies_is_reported_and_its_prompts_are_left(store: Path, out: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 9)
    outcome = go(prompts, out, FakeEngines(store, out, dies_with=[4]))
    assert not outcome.all_done and outcome.stopped == "engines" and outcome.lost
    assert [death.how for death in outcome.deaths] == ["it died (signal 9)"]
    assert go(prompts, out, FakeEngines(store, out)).all_done
    check_whole(out, range(9))


class Mute(FakeEngines):
    """Answers each prompt of `mute` once, but its store is never finished: the index gets no line."""

    def __init__(self, *args: Any, mute: Collection[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.mute = set(mute)

    def submit(self, position: int, key: str, prompt: Any) -> None:
        if position not in self.mute:
            super().submit(position, key, prompt)
            return
        self.mute.remove(position)
        self.submitted.append(position)
        final = self.out / f"{key}--{position}-mute.zarr"
        (self.out / f"{final.name}.partial" / "c").mkdir(parents=True)
        self.work[position] = iter(()), Answer(position, PROMPT, ROWS - PROMPT + 1, "length", str(final))


def test_a_store_whose_writers_died_is_captured_again(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine is alive, so the run must not wait until all processes have ended."""
    monkeypatch.setattr(run_module, "_QUIET_S", 0.05)
    engines = Mute(store, out, mute={2})
    outcome = go(write_prompts(tmp_path / "p.jsonl", 5), out, engines)
    assert outcome.all_done and engines.submitted.count(2) == 2
    shutil.rmtree(next(out.glob("*-mute.zarr.partial")))
    check_whole(out, range(5))


def test_prompts_of_a_dead_engine_are_lost_while_another_continues(store: Path, out: Path, tmp_path: Path) -> None:
    """A signal then ends the run, and the summary has the number of lost prompts."""
    said = io.StringIO()

    class Two(FakeEngines):
        """Engine 0 dies with position 2 in flight."""

        def events(self, timeout: float) -> list[Answer | Death]:
            if 2 in self.work:
                del self.work[2]
                return [Death("engine 0", "it died (signal 9)", (2,))]
            if len(self.submitted) > 8:
                run.stop("signal")
            return super().events(timeout)

    progress = Progress(True, said)
    run = start_run(write_prompts(tmp_path / "p.jsonl", 300), out, Two(store, out), progress=progress)
    outcome = run.go()
    assert outcome.lost == 1 and outcome.stopped == "signal"
    assert _summarise(outcome, [0, 9], (0, None), out, "", progress) == 1
    events = [json.loads(line) for line in said.getvalue().splitlines()]
    (ended,) = [event for event in events if event["event"] == "engine_ended"]
    assert ended["engine"] == "engine 0" and "signal 9" in ended["why"]
    assert events[-1]["lost"] == ended["left"] == 1 and events[-1]["stopped"] == "signal"
    assert events[-1]["engines"] == [0, 9]


class Survived(FakeEngines):
    """One of its engines dies with prompts in flight.

    It has finished the stores of `whole` of these prompts. For the prompt `answered`, the response has arrived, but the
    store is not finished. The engine's processes run for three more calls of `events`. waits: the reasons for waiting
    that the run shows.
    """

    def __init__(self, *args: Any, held: ExitStack, whole: int = 1, answered: int = 4, **options: Any) -> None:
        super().__init__(*args, window=5, **options)
        self.held, self.whole, self.answered, self.looks = held, whole, answered, 0
        self.run: Any = None
        self.waits: list[str] = []

    def shows(self, counts: Counts, force: bool = False) -> None:
        if self.looks:
            self.waits.append(counts.waiting)

    def events(self, timeout: float) -> list[Answer | Death]:
        if self.looks == 0 and self.work:
            life = self.out / ".life.lock.worker-0-1"
            assert self.held.enter_context(lock_alone(life))
            self.looks, mine = 1, sorted(self.work)[1:]
            for position in mine[: self.whole]:
                assert [None for _ in self.work[position][0]]
            found: list[Answer | Death] = []
            for position in mine:
                pieces, answer = self.work.pop(position)
                next(pieces, None)
                if position == self.answered:
                    found.append(replace(answer, engine="worker 0"))
            lost = tuple(position for position in mine if position != self.answered)
            return [*found, Death("worker 0", "it died (signal 9)", lost, life)]
        if self.looks:
            self.looks += 1
            if self.looks == 4:
                self.held.close()
        return super().events(timeout)


def test_prompts_of_a_dead_engine_go_to_others_once_its_processes_have_ended(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores that these processes finished are kept. Unfinished ones are removed, so that no prompt has two stores."""
    said = io.StringIO()
    with ExitStack() as held:
        engines, progress = Survived(store, out, held=held), Progress(True, said)
        monkeypatch.setattr(progress, "show", engines.shows)
        outcome = start_run(write_prompts(tmp_path / "p.jsonl", 7), out, engines, progress=progress).go()
    assert outcome.all_done and (outcome.counts.done, outcome.counts.failed, outcome.lost) == (7, 0, 0)
    check_whole(out, range(7))
    assert [engines.submitted.count(n) for n in range(7)] == [1, 1, 2, 2, 2, 1, 1]
    assert engines.waits[:3] == ["writers of worker 0 finish their stores"] * 3 and set(engines.waits[3:]) == {""}
    (ended,) = [e for line in said.getvalue().splitlines() if (e := json.loads(line))["event"] == "engine_ended"]
    assert (ended["engine"], ended["why"], ended["left"], ended["again"]) == ("worker 0", "it died (signal 9)", 0, 4)
    assert outcome.counts.tokens == 7 * (ROWS + 1) and outcome.counts.bytes > 0


def test_a_run_stops_naming_writers_that_have_ended(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if all their stores are complete, so that no prompt is submitted again."""
    with ExitStack() as held:
        engines, progress = Survived(store, out, held=held, whole=2), Progress(True, io.StringIO())
        monkeypatch.setattr(progress, "show", engines.shows)
        outcome = start_run(write_prompts(tmp_path / "p.jsonl", 3), out, engines, progress=progress).go()
    assert outcome.all_done and engines.submitted == [0, 1, 2]
    assert engines.waits[:3] == ["writers of worker 0 finish their stores"] * 3 and set(engines.waits[3:]) == {""}


def test_a_run_that_stops_leaves_prompts_whose_engine_still_writes(store: Path, out: Path, tmp_path: Path) -> None:
    said = io.StringIO()

    class Stopped(Survived):
        def events(self, timeout: float) -> list[Answer | Death]:
            if self.looks == 2:
                self.run.stop("signal")
                self.run.stop("max_bytes")
            return super().events(timeout)

    with ExitStack() as held:
        engines = Stopped(store, out, held=held)
        run = engines.run = start_run(
            write_prompts(tmp_path / "p.jsonl", 7), out, engines, progress=Progress(False, said)
        )
        outcome = run.go()
    assert (outcome.stopped, outcome.lost, outcome.all_done) == ("signal", 4, False), "the first reason must count"
    assert "dmi: worker 0 ended early: it died (signal 9). 4 prompts go to other engines\n" in said.getvalue()
    assert [engines.submitted.count(n) for n in (1, 2, 3, 4)] == [1] * 4
    assert go(tmp_path / "p.jsonl", out, FakeEngines(store, out)).all_done
    check_whole(out, range(7))


def test_a_run_whose_captures_all_fail_stops(store: Path, out: Path, tmp_path: Path) -> None:
    said = io.StringIO()

    class Failing(FakeEngines):
        """Its writers have died, and each capture is recorded as failed."""

        def submit(self, position: int, key: str, prompt: Any) -> None:
            self.submitted.append(position)
            final = self.out / f"{key}--{position}-{len(self.submitted)}.zarr"
            line = {"event": "finish", "store": final.name, "key": key, "request_id": key, "finished": ""}
            append_index(str(self.out), {**line, "state": "failed", "reason": "the coordinator died"})
            self.work[position] = iter(()), Answer(position, PROMPT, ROWS - PROMPT + 1, "length", str(final))

    engines, progress = Failing(store, out), Progress(False, said)
    outcome = start_run(write_prompts(tmp_path / "p.jsonl", 3000), out, engines, progress=progress).go()
    assert outcome.stopped == "captures" and not outcome.all_done and len(engines.submitted) < 200
    assert "100 captures in a row failed, the last one because: the coordinator died" in said.getvalue()
    assert _summarise(outcome, [0], (0, None), out, "", progress) == 1
    assert said.getvalue().endswith(
        "prompts are left (too many captures in a row failed): start the same command again\n"
    )


def test_the_end_of_a_run_waits_for_uploads(tmp_path: Path) -> None:
    """Processes of the engines hold the lock while they upload."""
    life = tmp_path / ".life.lock"
    with lock_alone(life) as alone:
        assert alone
        _wait_for_uploads(life, 0.2)  # returns after its timeout
        waits = threading.Thread(target=_wait_for_uploads, args=(life, 600))
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()
    waits.join(600)
    assert not waits.is_alive()


def test_a_lower_limit_excludes_prompts_beyond_it_from_the_counts(store: Path, out: Path, tmp_path: Path) -> None:
    prompts, said = write_prompts(tmp_path / "p.jsonl", 9), io.StringIO()
    assert go(prompts, out, FakeEngines(store, out)).all_done
    (out / "manifest.jsonl").write_text("".join((out / "manifest.jsonl").read_text().splitlines(True)[:7]))
    progress = Progress(False, said)
    outcome = start_run(prompts, out, FakeEngines(store, out), order=Order(limit=3), progress=progress).go()
    assert (outcome.counts.done, outcome.counts.total, outcome.beyond) == (3, 3, 6)
    assert "3/3 stored" in said.getvalue() and "9/" not in said.getvalue()
    assert _summarise(outcome, [], (0, None), out, "", progress) == 0
    assert "; 6 more are beyond --limit" in said.getvalue()
    assert go(prompts, out, FakeEngines(store, out)).beyond == 0


def test_a_run_tells_that_its_engine_starts_and_which_total_is_an_estimate(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FakeEngines):
        """Ready after three calls of `events`."""

        looks = 0

        def starting(self) -> list[Path]:
            return [] if self.looks > 2 else [out / "engine-0.log"]

        def room(self) -> int:
            return 0 if self.starting() else super().room()

        def events(self, timeout: float) -> list[Answer | Death]:
            self.looks += 1
            return super().events(timeout)

    said = io.StringIO()
    progress = Progress(False, said)
    monkeypatch.setattr(progress, "show", lambda counts, force=False: Progress.show(progress, counts, True))
    prompts = write_prompts(tmp_path / "p.jsonl", 250)
    assert start_run(prompts, out, Slow(store, out, window=40), progress=progress).go().all_done
    lines = said.getvalue().splitlines()
    assert lines[:2] == [f"starting the engine (its log: {out}/engine-0.log)"] * 2
    assert not any("starting" in line for line in lines[3:])
    assert any(re.match(r"\d+/about \d+ stored", line) for line in lines), lines
    assert lines[-1].startswith("250/250 stored")


class Unstartable(FakeEngines):
    """An engine that ends before it is ready."""

    def room(self) -> int:
        return 0

    def events(self, timeout: float) -> list[Answer | Death]:
        self.dead = True
        return [Death("engine 0", "OptionError: hooks: 'x' is unknown; its log: l", (), began=False)]


def test_a_run_without_an_engine_says_that_it_cannot_continue(store: Path, out: Path, tmp_path: Path) -> None:
    prompts, said = write_prompts(tmp_path / "p.jsonl", 3), io.StringIO()
    progress = Progress(False, said)
    outcome = start_run(prompts, out, Unstartable(store, out), progress=progress).go()
    assert outcome.stopped == "engines" and not outcome.began and "stored" not in said.getvalue()
    assert _summarise(outcome, [0], (0, None), out, "", progress) == 2
    assert "dmi: engine 0 did not start: OptionError: hooks: 'x' is unknown; its log: l\n" in said.getvalue()
    assert said.getvalue().endswith("no engine could start: correct the error above and start again\n")
    outcome = start_run(prompts, out, FakeEngines(store, out, dies_with=[1]), progress=progress).go()
    assert outcome.began and _summarise(outcome, [1], (0, None), out, "", progress) == 1
    assert said.getvalue().endswith("prompts are left (no engine is left): start the same command again\n")


def test_a_store_whose_index_line_is_missing_is_found_by_its_path(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bulkkit.append_finish", lambda *_args: None)
    monkeypatch.setattr("dmi_connector.bulk.run._QUIET_S", 0.0)
    assert go(write_prompts(tmp_path / "p.jsonl", 4), out, FakeEngines(store, out)).all_done
    check_whole(out, range(4))


def test_shards_of_a_shuffled_and_limited_input_have_each_row_once(store: Path, out: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 20)
    seen: list[int] = []
    for share in range(3):
        order = Order(shuffle=5, limit=14, share=share, shares=3)
        assert go(prompts, out, FakeEngines(store, out), order=order).all_done
        entries = [json.loads(line) for line in (out / f"manifest-{share}-of-3.jsonl").read_text().splitlines()]
        assert sorted(int(e["key"].split("-")[1]) for e in entries) == list(range(share, 14, 3))
        assert all(e["id"] == f"id-{e['row']}" for e in entries)
        seen += [e["row"] for e in entries]
    assert len(set(seen)) == 14 and sorted(seen) != list(range(14))
    raised = FakeEngines(store, out)
    assert go(prompts, out, raised, order=Order(shuffle=5, share=1, shares=3)).all_done
    assert raised.submitted == [16, 19], "a higher limit must continue"


def test_the_budget_waits_until_somebody_removes_stores(store: Path, out: Path, tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in store.rglob("*") if path.is_file()]
    limit = 4 * (sum(sizes) + 4096)
    now, most = [0.0], [0]

    class Consumed(FakeEngines):
        """Another process moves all stores away whenever the run is idle."""

        def events(self, timeout: float) -> list[Any]:
            now[0] += 10
            finished = sorted(out.glob("*.zarr"))
            most[0] = max(most[0], sum(f.stat().st_size for path in finished for f in path.rglob("*") if f.is_file()))
            if not self.work and finished and self.submitted:
                for path in finished:
                    assert remove_store(path)
            return super().events(timeout)

    engines = Consumed(store, out)
    budget = Budget(out, max_bytes=limit, clock=lambda: now[0])
    prompts = write_prompts(tmp_path / "p.jsonl", 12)
    assert go(prompts, out, engines, budget=budget).all_done
    assert sorted(engines.submitted) == list(range(12)) and 0 < most[0] <= limit
    assert len((out / "manifest.jsonl").read_text().splitlines()) == 12


def test_a_run_that_waits_for_uploads_which_fail_says_why(store: Path, out: Path, tmp_path: Path) -> None:
    """The stores stay on this disk, so the budget stays used up."""
    waits: list[str] = []

    class Stuck(FakeEngines):
        """An upload fails after the first store is finished. The run is stopped at the end."""

        def events(self, timeout: float) -> list[Any]:
            if (finished := next(out.glob("*.zarr"), None)) is not None and len(waits) < 3:
                failed = {
                    "event": "upload",
                    "store": finished.name,
                    "upload": "failed",
                    "upload_reason": "no such bucket",
                }
                append_index(str(out), failed)
                waits.append(run.outcome.counts.waiting)
            if len(waits) == 3:
                run.stop("signal")
            return super().events(timeout)

    sizes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    said, prompts = io.StringIO(), write_prompts(tmp_path / "p.jsonl", 9)
    progress = Progress(False, said)
    run = start_run(prompts, out, Stuck(store, out), budget=Budget(out, max_bytes=sizes + 9000), progress=progress)
    outcome = run.go()
    want = "the disk budget is used up, and uploads fail: no such bucket"
    assert outcome.counts.waiting == want and f"waiting: {want}" in said.getvalue(), said.getvalue()
    assert _summarise(outcome, [1], (1, "no such bucket"), out, "", progress) == 1
    assert "1 stores are not uploaded (no such bucket): when all is done, dmi repair" in said.getvalue()
    append_index(str(out), {"event": "upload", "store": "x.zarr", "upload": "done", "upload_reason": None})
    run._read_index()
    assert run._tail.upload_failure is None, "a finished upload must clear the failure"


def test_prompts_in_flight_count_as_the_largest_store(tmp_path: Path) -> None:
    now = [0.0]
    budget = Budget(tmp_path, max_bytes=100_000, clock=lambda: now[0])
    assert budget.allows(0) and not budget.allows(1), "only one prompt until the first store"
    budget.stored(10_000 - 4096)
    budget.stored(20_000 - 4096)
    assert budget.allows(2) and not budget.allows(3), "30 kB are used, so three more stores of 20 kB fit"
    now[0] += 5
    assert budget.allows(4) and not budget.allows(5), "the stores are gone, so five fit"
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "data").write_bytes(bytes(90_000))
    assert not Budget(tmp_path, max_bytes=90_000, clock=lambda: now[0]).allows(0), (
        "stores from before the start must count"
    )
    assert Budget(tmp_path, max_bytes=90_001, clock=lambda: now[0]).allows(0)


def test_a_budget_used_up_at_the_start_notices_removed_stores(tmp_path: Path) -> None:
    now = [0.0]
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "data").write_bytes(bytes(90_000))
    budget = Budget(tmp_path, max_bytes=90_000, clock=lambda: now[0])
    shutil.rmtree(tmp_path / "a.zarr")
    assert not budget.allows(0), "the last measurement is recent"
    now[0] = 5.0
    assert not budget.allows(1), "only one prompt until the first store"
    assert budget.allows(0)


@pytest.mark.parametrize(("takes", "rest"), [(0.02, 1.0), (0.1, 1.0), (0.5, 5.0), (3.0, 30.0)])
def test_a_budget_is_measured_for_a_tenth_of_the_time_at_most(
    takes: float, rest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval is also at least a second, from the end of the last measurement."""
    now, measured = [100.0], list[float]()

    def measure(directory: str, sizes: Any) -> Any:
        assert directory == str(tmp_path) and sizes is budget_sizes[-1]
        measured.append(now[0])
        now[0] += takes
        return SimpleNamespace(nbytes=1000)

    budget_sizes: list[Any] = []
    monkeypatch.setattr(budget_module, "StoreSizes", lambda: budget_sizes.append(object()) or budget_sizes[-1])
    monkeypatch.setattr(budget_module, "measure", measure)
    budget = Budget(tmp_path, max_bytes=1000, clock=lambda: now[0])
    assert not budget.allows(0) and measured == [100]
    now[0] = 100 + takes + rest - 0.01
    assert not budget.allows(0) and len(measured) == 1
    now[0] = 100 + takes + rest
    assert not budget.allows(0) and len(measured) == 2


@pytest.mark.parametrize(("free", "allowed"), [(3 * 4096 + 10_000, True), (3 * 4096 + 9_999, False)])
def test_min_free_bytes_stay_free_with_all_prompts_in_flight(
    free: int, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts in flight and the next one have one byte and a root document each."""
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1) if path == tmp_path else 0
    )
    budget = Budget(tmp_path, min_free_bytes=10_000 - 3)
    budget.stored(1)
    assert budget.allows(2) == allowed
    assert Budget(tmp_path).allows(10**9), "a budget without limits must allow any number"


def test_a_run_that_ends_at_its_budget_can_resume(store: Path, out: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 12)
    sizes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    budget = Budget(out, max_bytes=5 * (sizes + 4096))
    outcome = go(prompts, out, FakeEngines(store, out), budget=budget, end_when_full=True)
    assert outcome.stopped == "max_bytes" and not outcome.all_done and 0 < outcome.counts.done < 12
    check_whole(out, range(outcome.counts.done))
    assert go(prompts, out, FakeEngines(store, out)).all_done
    check_whole(out, range(12))


def test_a_run_continues_if_stores_in_flight_were_counted_twice(store: Path, out: Path, tmp_path: Path) -> None:
    """A store of a prompt in flight counts in a measurement of the directory, and again when it is finished."""
    prompts = write_prompts(tmp_path / "p.jsonl", 12)
    sizes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    budget = Budget(out, max_bytes=13 * (sizes + 4096), clock=lambda: 0.0)
    budget._used += 10 * (sizes + 4096)
    assert go(prompts, out, FakeEngines(store, out), budget=budget, end_when_full=True).all_done


def test_min_free_bytes_counts_what_is_free_on_the_disk(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs_result((4096, 4096, 1000, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: free)
    engines = FakeEngines(store, out)
    prompts = write_prompts(tmp_path / "p.jsonl", 3)
    short = go(prompts, out, engines, budget=Budget(out, min_free_bytes=100 * 4096 + 1), end_when_full=True)
    assert short.stopped == "max_bytes" and engines.submitted == []
    assert go(prompts, out, engines, budget=Budget(out, min_free_bytes=50 * 4096), end_when_full=True).all_done


def test_a_signal_ends_a_run_in_order(store: Path, out: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 12)

    class Told(FakeEngines):
        def submit(self, position: int, key: str, prompt: Any) -> None:
            super().submit(position, key, prompt)
            if position == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    run = start_run(prompts, out, Told(store, out))
    before = signal.getsignal(signal.SIGTERM)
    with stopped_by_signals(run.stop):
        outcome = run.go()
    assert signal.getsignal(signal.SIGTERM) is before
    assert outcome.stopped == "signal" and outcome.lost == 0
    check_whole(out, range(outcome.counts.done))
    assert outcome.counts.done < 12
    assert go(prompts, out, FakeEngines(store, out)).all_done
    check_whole(out, range(12))


def test_a_signal_while_the_last_prompts_run_stops_nothing(store: Path, out: Path, tmp_path: Path) -> None:
    class Told(FakeEngines):
        def events(self, timeout: float) -> list[Any]:
            run.stop("signal")
            return super().events(timeout)

    prompts = write_prompts(tmp_path / "p.jsonl", 3)
    run = start_run(prompts, out, Told(store, out, window=9))
    outcome = run.go()
    assert outcome.all_done and outcome.stopped is None
    check_whole(out, range(3))


def test_the_second_signal_ends_a_run_at_once() -> None:
    """This holds for both signals."""
    stopped: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for first, second in ((signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)):
        with pytest.raises(KeyboardInterrupt), stopped_by_signals(stopped.append):
            os.kill(os.getpid(), first)
            assert stopped.pop() == "signal"
            os.kill(os.getpid(), second)
        assert stopped == [] and all(signal.getsignal(number) is then for number, then in before.items())


def test_keys_name_run_and_position(store: Path, out: Path, tmp_path: Path) -> None:
    go(write_prompts(tmp_path / "p.jsonl", 2), out, FakeEngines(store, out))
    assert {path.name.split("--")[0] for path in out.glob("*.zarr")} == {f"{RUN}-000000000", f"{RUN}-000000001"}


def test_the_store_of_an_answer_without_its_name_is_found_by_its_key(tmp_path: Path) -> None:
    """The store may be finished or still be written. None if there is none."""
    run, where = SimpleNamespace(_out=tmp_path, _run="0123abcd"), Run._path
    answers = [SimpleNamespace(store=None, position=position) for position in range(4)]
    (tmp_path / "0123abcd-000000000--0-aaaaaaaaaaaa.zarr").mkdir()
    (tmp_path / "0123abcd-000000001--1-aaaaaaaaaaaa.zarr.partial").mkdir()
    (tmp_path / "9999abcd-000000002--2-aaaaaaaaaaaa.zarr").mkdir()
    names = ["0123abcd-000000000--0-aaaaaaaaaaaa.zarr", "0123abcd-000000001--1-aaaaaaaaaaaa.zarr"]
    assert [where(run, answer) for answer in answers] == [*(tmp_path / name for name in names), None, None]
    assert where(run, SimpleNamespace(store="/a/b.zarr", position=0)) == Path("/a/b.zarr")
