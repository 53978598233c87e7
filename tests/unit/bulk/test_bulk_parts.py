# SPDX-License-Identifier: Apache-2.0
"""Parts of a bulk run without an engine: recovery, counts, progress, and messages of the engine process."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmi_connector.bulk import budget as budget_module
from dmi_connector.bulk import engine_process, engines, ray_workers, recovery
from dmi_connector.bulk import run as run_module
from dmi_connector.bulk.budget import Budget
from dmi_connector.bulk.engines import Answer, Death
from dmi_connector.bulk.flight import Flight
from dmi_connector.bulk.manifest import Manifest
from dmi_connector.bulk.order import Order, Placed
from dmi_connector.bulk.progress import Counts, Progress, _rounded
from dmi_connector.bulk.prompts import Prompt
from dmi_connector.bulk.recovery import recover, settle_left, store_key
from dmi_connector.bulk.settings import _changed, _refusal
from dmi_connector.store.format.remote_path import place_of
from tests.bulkkit import RUN, FakeEngines, start_run, template, write_prompts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "one.zarr")


class Folder:
    """The directory of a run. bad: names of invalid stores. uploads: {position: URL}."""

    def __init__(self, out: Path, patch: pytest.MonkeyPatch) -> None:
        self.out, self.bad, self.uploads = out, set[str](), dict[int, str]()
        patch.setattr(recovery, "is_sound", lambda path: path.name not in self.bad)
        patch.setattr(recovery, "uploaded_stores", lambda _out: [(self.name(p, "up"), u) for p, u in self.url()])
        patch.setattr(recovery, "_is_whole", lambda place: "torn" not in str(place))
        patch.setattr(recovery, "record_ends", lambda _out: None)

    def url(self) -> list[tuple[int, str]]:
        return list(self.uploads.items())

    @staticmethod
    def name(position: int, which: str) -> str:
        return f"{store_key(RUN, position)}--{which}.zarr"

    def add(self, position: int, which: str, bad: bool = False, ending: str = "") -> Path:
        path = self.out / f"{self.name(position, which)}{ending}"
        path.mkdir()
        if bad:
            self.bad.add(path.name)
        return path

    def there(self) -> list[str]:
        return sorted(path.name for path in self.out.glob(f"{RUN}*"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    (tmp_path / "out").mkdir()
    return Folder(tmp_path / "out", monkeypatch)


# ---- recovery -------------------------------------------------------------------------------------------------------


def test_recovery_counts_each_store_that_it_removes(folder: Folder) -> None:
    manifest = Manifest(folder.out / "manifest.jsonl")
    for position, which in ((0, "a"), (7, "a"), (8, "a")):
        manifest.add({"key": store_key(RUN, position), "store": folder.name(position, which)})
    manifest.flush()
    kept = [folder.add(0, "a"), folder.add(1, "a"), folder.add(4, "b"), folder.add(7, "a")]
    folder.add(2, "a", bad=True)  # damaged
    folder.add(3, "a", ending=".partial")
    folder.add(1, "z", ending=".partial")
    folder.add(4, "a", bad=True)  # two stores, one valid
    folder.add(7, "b")  # two stores, and the manifest names the other one
    folder.uploads = {
        0: "s3://bucket/0",
        2: "s3://bucket/2",
        3: "s3://bucket/torn",
        8: "s3://bucket/8",
        9: "s3://bucket/9",
    }
    found = recover(folder.out, RUN, Order(), folder.out / "manifest.jsonl")
    assert folder.there() == sorted(path.name for path in kept)
    assert found.found == {1: kept[1], 4: kept[2], 2: place_of("s3://bucket/2"), 9: place_of("s3://bucket/9")}
    assert (list(found.done), found.removed, found.gone) == ([0, 7, 8], 5, 0)


@pytest.mark.parametrize("redo", [False, True])
def test_prompts_of_removed_stores_are_counted_or_captured_again(redo: bool, folder: Folder) -> None:
    """A store that was uploaded never counts as removed, even if it is incomplete."""
    manifest = Manifest(folder.out / "manifest.jsonl")
    for position in (0, 1, 2, 3):
        manifest.add({"key": store_key(RUN, position), "store": folder.name(position, "a")})
    manifest.add({"key": "other-000000005", "store": "x"})
    manifest.flush()
    folder.add(0, "a")
    folder.uploads = {2: "s3://bucket/torn"}
    found = recover(folder.out, RUN, Order(), folder.out / "manifest.jsonl", redo)
    assert (list(found.done), found.gone) == (([0, 2], 0) if redo else ([0, 1, 2, 3], 2))
    assert (found.found, found.removed) == ({}, 0)


def test_one_complete_store_per_prompt_of_a_dead_engine_is_kept(folder: Folder) -> None:
    kept = [folder.add(1, "a"), folder.add(5, "a"), folder.add(6, "a", ending=".partial")]
    for position, which, bad, ending in (
        (1, "b", False, ""),
        (2, "a", True, ""),
        (2, "b", False, ".partial"),
        (3, "a", True, ""),
    ):
        folder.add(position, which, bad, ending)
    names = folder.there()
    folder.uploads = {1: "s3://bucket/1", 2: "s3://bucket/2", 3: "s3://bucket/torn", 5: "s3://bucket/5"}
    found = settle_left(folder.out, RUN, [1, 2, 3, 4])
    one = next(place for place in found.values() if isinstance(place, Path))
    assert found == {1: one, 2: place_of("s3://bucket/2")} and one.name in names
    assert folder.there() == sorted([one.name, *(path.name for path in kept[1:])]), "other stores must not be changed"


@pytest.mark.parametrize(
    ("key", "position"),
    [
        (f"{RUN}-000000012", 12),
        (f"{RUN}-1234567890", 1234567890),
        (f"{RUN}-12", None),
        (f"{RUN}-000000012x", None),
        ("x-000000012", None),
        (f"{RUN}-٠٠٠٠٠٠٠١٢", None),
    ],
)
def test_the_position_of_a_prompt_is_read_from_its_key(key: str, position: int | None) -> None:
    assert recovery.position_of(RUN, key) == position
    assert recovery._position(RUN, f"{key}--x--1.zarr") == position
    assert recovery._position(RUN, f"{key}--x.zarr.partial") is None and recovery._position(RUN, key) is None


# ---- a run ----------------------------------------------------------------------------------------------------------


class Shown(Progress):
    """A fake output that records what is shown. flushed: number of flushes."""

    def __init__(self) -> None:
        super().__init__(True, io.StringIO())
        self.counts: list[tuple[Counts, bool]] = []

    def show(self, counts: Counts, force: bool = False) -> None:
        self.counts.append((counts, force))


def test_counts_of_prompts_in_flight_are_those_without_and_with_an_answer(store: Path, folder: Folder) -> None:
    shown = Shown()
    prompts = write_prompts(folder.out.parent / "p.jsonl", 9)
    run = start_run(prompts, folder.out, FakeEngines(store, folder.out), progress=shown)
    run._engines.starting = lambda: [Path("a.log"), Path("b.log")]  # type: ignore[method-assign]
    for position in range(5):
        answer = Answer(position, 1, 1, "stop", None) if position < 2 else None
        run._flights[position] = Flight(Placed(position, position, b""), Prompt("a"), answer)
    run.outcome.counts.done, run.outcome.counts.rejected, run.outcome.counts.failed = 10, 20, 30
    for total, estimated, wanted in ((9, False, 9), (9, True, 60), (99, True, 99), (None, False, None)):
        rows: Any = SimpleNamespace(total=lambda t=total: t, estimates=lambda e=estimated: e)
        run._rows = rows
        run._show()
        counts, force = shown.counts.pop()
        assert (counts.engine, counts.backlog, counts.total, counts.estimated) == (3, 2, wanted, estimated)
        assert counts.starting == ("a.log", "b.log") and force is False
    run._show(force=True)
    assert shown.counts.pop()[1] is True
    run.outcome.stopped = "engines"
    run._show()
    assert shown.counts == [], "no engine is ready"


def test_progress_is_flushed_at_once() -> None:
    class Out(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    for as_json in (True, False):
        out = Out()
        progress = Progress(as_json, out)
        progress.say({"event": "x"}, "text")
        assert out.flushed == 1
        progress.show(Counts(), force=True)
        assert out.flushed == 2


# ---- settings -------------------------------------------------------------------------------------------------------


def test_a_run_of_other_settings_is_told_the_first_difference(tmp_path: Path) -> None:
    def why(noted: dict[str, Any], wanted: dict[str, Any]) -> str:
        return str(_refusal(tmp_path, noted, wanted)).removeprefix(f"--out {tmp_path}")

    another = "; give the same, or another --out"
    assert why({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "c": 6}) == f" was begun with b 2, not 5{another}"
    assert why({"a": 1}, {"a": 1, "b": 5}) == f" was begun with b None, not 5{another}"
    assert why({"a": 1, "z": 3, "b": 2}, {"a": 1}) == " was begun with b 2; give it too, or another --out"
    file = {"name": "x", "bytes": 3}
    assert why({"prompts": [file]}, {"prompts": [{"name": "x", "bytes": 4}]}) == (
        ": the prompts have changed since its run began: x has 4 bytes, not 3; give the same files, or another --out"
    )
    assert why({"prompts": []}, {"prompts": [1]}) == f" was begun with prompts [], not [1]{another}"


@pytest.mark.parametrize(
    ("before", "now", "how"),
    [
        ([("a", 1, "x"), ("b", 2, "y")], [("b", 2, "y"), ("c", 1, "x")], "a is gone, c is new"),
        ([("a", 1, "x"), ("b", 2, "y"), ("c", 2, "y")], [("b", 2, "y")], "a is gone"),
        ([("b", 2, "y")], [("b", 3, "y"), ("a", 1, "x"), ("c", 1, "x")], "a is new"),
        ([("a", 1, "x"), ("b", 2, "y")], [("a", 1, "x"), ("b", 3, "z")], "b has 3 bytes, not 2"),
        ([("a", 1, "x"), ("b", 2, "y")], [("a", 1, "z"), ("b", 3, "y")], "a has other content"),
        ([("a", 1, "x"), ("b", 2, "y")], [("b", 2, "y"), ("a", 1, "x")], "its files are in another order"),
    ],
)
def test_how_an_input_has_changed(before: Any, now: Any, how: str) -> None:
    old, new = ([dict(zip(("name", "bytes", "sha"), one, strict=True)) for one in files] for files in (before, now))
    assert _changed(old, new) == how


# ---- engines --------------------------------------------------------------------------------------------------------


def test_gpus_are_those_of_the_system_where_no_variable_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/dev": ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "xnvidia3", "null"]}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(engines.os, "listdir", lambda path: names[path])
    assert engines.visible_devices() == ["2", "10"]


def test_there_is_no_room_without_a_worker() -> None:
    def room(*workers: tuple[bool, int, int]) -> int:
        made = [SimpleNamespace(alive=alive, window=window, has=range(has)) for alive, window, has in workers]
        return ray_workers.RayWorkers.room(SimpleNamespace(_engines=made))  # type: ignore[arg-type]

    assert room() == room((False, 9, 0)) == 0
    assert room((True, 4, 1), (True, 5, 4), (False, 9, 0)) == 3


class System:
    """A fake `os` for the engine process."""

    O_WRONLY, O_CREAT, O_APPEND, O_CLOEXEC, O_NOFOLLOW, devnull = 1, 2, 4, 8, 16, "/dev/null"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: (self.calls.append((name, *given)), {"dup": 40, "open": 50}.get(name))[1]


@pytest.mark.parametrize("said", ["", "word " * 1000])
def test_an_engine_process_answers_on_its_output_and_logs_all_else(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is reported on one line of at most 2,000 characters."""
    system, calls, sent = System(), list[tuple[Any, ...]](), list[tuple[int, Any]]()
    inbox = SimpleNamespace(take=lambda most, wait: calls.append(("take", most, wait)) or [{"start": {"model": "m"}}])

    def serve(given: Any, start: Any) -> Any:
        assert given is inbox and start == {"model": "m"}
        yield {"ready": 1}
        if said:
            raise ValueError(f"a\n b {said}")

    monkeypatch.setattr(engine_process, "os", system)
    monkeypatch.setattr(engine_process, "Inbox", lambda fd: calls.append(("inbox", fd)) or inbox)
    monkeypatch.setattr(engine_process, "serve", serve)
    monkeypatch.setattr(engine_process, "pack", lambda message: message)
    monkeypatch.setattr(engine_process, "write_all", lambda fd, data: sent.append((fd, data)))
    monkeypatch.setattr(engine_process, "end_with_parent", lambda parent: calls.append(("tied to", parent)))
    monkeypatch.setattr(engine_process, "end_forks_with_this", lambda: calls.append(("forks",)))
    monkeypatch.setattr(engine_process.signal, "signal", lambda *given: calls.append(("signal", *given)))
    arguments = ["--parent", "12", "--log", "the.log"]
    if said:
        with pytest.raises(ValueError, match=re.escape("a\n b word")):
            engine_process.main(arguments)
    else:
        assert engine_process.main(arguments) == 0
    failed = [(40, {"failed": f"ValueError: a b {said}"[:2000]})] if said else []
    assert sent == [(40, {"ready": 1}), *failed]
    ignored = ("signal", signal.SIGINT, signal.SIG_IGN)
    assert calls == [("tied to", 12), ("forks",), ignored, ("inbox", 40), ("take", 1, True)]
    assert system.calls[:6] == [
        *(("setsid",), ("dup", 1), ("open", "the.log", 31, 0o666)),
        *(("dup2", 50, 1), ("dup2", 50, 2), ("dup", 0)),
    ]
    ((name, _, target),) = system.calls[6:]
    assert (name, target) == ("dup2", 0)


# ---- order and budget -----------------------------------------------------------------------------------------------


class Lines:
    """A source of numbered rows, whose count may be unknown."""

    def __init__(self, rows: int, known: bool, fraction: float | None = None) -> None:
        self.rows, self.known, self.part = rows, known, fraction
        self.load = repr

    def __iter__(self) -> Any:
        return iter((number, f"row {number}") for number in range(self.rows))

    def count(self) -> int | None:
        return self.rows if self.known else None

    def fraction(self) -> float | None:
        return self.part

    def random_access(self, scratch: Path) -> Any:
        assert scratch == Path("x")

        class Shuffled(list[str]):
            load = staticmethod(str)

        return Shuffled(f"row {number}" for number in range(self.rows))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("limit", "share", "positions"), [(None, 1, [1, 4, 7]), (7, 0, [0, 3, 6]), (7, 1, [1, 4])])
def test_a_share_has_every_third_row(known: bool, limit: int | None, share: int, positions: list[int]) -> None:
    source: Any = Lines(9, known)
    rows = Order(None, limit, share, 3).rows(source, Path("x"))
    assert rows.load("x") == source.load("x") and rows.limit == limit
    assert (rows.total(), rows.estimates()) == ((len(positions), False) if known else (None, True))
    assert list(rows) == [(n, n, f"row {n}") for n in positions]
    assert (rows.total(), rows.estimates()) == (len(positions), False)


@pytest.mark.parametrize(("limit", "count"), [(None, 9), (5, 5), (99, 9)])
def test_shuffled_rows_have_numbers_of_the_input(limit: int | None, count: int) -> None:
    source: Any = Lines(9, False)
    one, two = (list(Order(3, limit, share, 2).rows(source, Path("x"))) for share in (0, 1))
    assert [placed.position for placed in one] == list(range(0, count, 2))
    assert [placed.position for placed in two] == list(range(1, count, 2))
    assert all(placed.raw == f"row {placed.number}" for placed in one + two)
    assert len({placed.number for placed in one + two}) == count
    rows = Order(3, limit, 1, 2).rows(source, Path("x"))
    assert (rows.total(), rows.estimates(), rows.load(7)) == (len(two), False, "7")


def test_the_number_of_rows_is_estimated_from_what_was_read() -> None:
    """The estimate starts after a hundred rows, and never exceeds the limit."""
    source: Any = Lines(500, False, 0.25)
    for limit, wanted in ((None, 400), (1000, 400), (450, 225), (801, 400)):
        rows = Order(None, limit, 0, 2).rows(source, Path("x"))
        going = iter(rows)
        for _ in range(99):
            next(going)
        assert rows.total() is None and rows.estimates()
        next(going)
        assert rows.total() == wanted, limit
    source.part = 0.0
    assert rows.total() is None
    source.part = None
    assert rows.total() is None


def test_a_budget_keeps_bytes_of_the_file_system_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt in flight counts as much as the largest store, plus 4,096 bytes for its document."""
    free = [100]
    stat = lambda out: SimpleNamespace(f_bavail=free[0], f_frsize=1000) if out == tmp_path else None  # noqa: E731
    monkeypatch.setattr(budget_module.os, "statvfs", stat)
    budget = Budget(tmp_path, min_free_bytes=50_000)
    assert budget.allows(0) and not budget.allows(1), "only one prompt until the first store"
    budget.stored(5904)
    budget.stored(904)
    assert [budget.allows(n) for n in (0, 3, 4, 5)] == [True, True, True, False]
    free[0] = 60
    assert [budget.allows(n) for n in (0, 1)] == [True, False]
    free[0] = 59
    assert not budget.allows(0)


@pytest.mark.parametrize(("seconds", "wait"), [(0.0, 1.0), (0.05, 1.0), (0.5, 5.0)])
def test_a_directory_is_measured_again_after_a_while(
    seconds: float, wait: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval is ten times the duration of a measurement, and at least a second."""
    now, sizes = [0.0], iter([10, 20, 5])

    def measure(path: str, sizes_: Any = None, **_: Any) -> Any:
        assert path == str(tmp_path)
        now[0] += seconds
        return SimpleNamespace(nbytes=next(sizes))

    monkeypatch.setattr(budget_module, "measure", measure)
    budget = Budget(tmp_path, max_bytes=10, clock=lambda: now[0])
    assert not budget.allows(0)
    end = now[0] + wait
    now[0] = end - 0.01
    assert not budget.allows(0)
    now[0] = end
    assert not budget.allows(0), "the measurement gave 20 bytes"
    now[0] += wait
    assert budget.allows(0) and next(sizes, None) is None


# ---- engines that end, captures that fail ---------------------------------------------------------------------------


class Told(Progress):
    """A fake progress that records events."""

    def __init__(self) -> None:
        super().__init__(True, io.StringIO())
        self.told: list[tuple[dict[str, Any], str]] = []

    def say(self, event: dict[str, Any], text: str = "") -> None:
        self.told.append((event, text))


@pytest.mark.parametrize("life", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_an_engine_that_ends_early_is_reported(life: bool, began: bool, store: Path, folder: Folder) -> None:
    told, made = Told(), FakeEngines(store, folder.out)
    run = start_run(write_prompts(folder.out.parent / "p.jsonl", 9), folder.out, made, progress=told)
    flights = {n: Flight(Placed(n, n, b""), Prompt("a")) for n in range(4)}
    flights[2].answer = Answer(2, 1, 1, "stop", None, engine="engine 0")
    flights[3].answer = Answer(3, 1, 1, "stop", None, engine="engine 1")
    run._flights |= flights
    death = Death("engine 0", "it died", (0, 1, 7), folder.out / "life" if life else None, began)
    run._on_death(death)
    event = {"event": "engine_ended", "engine": "engine 0", "why": "it died", "left": 2}
    text = "dmi: engine 0 ended early: it died. 2 prompts are left to the next start of this run"
    if life:
        event |= {"left": 0, "again": 3}
        text = "dmi: engine 0 ended early: it died. 3 prompts go to other engines"
    assert told.told == [(event, text if began else "dmi: engine 0 did not start: it died")]
    assert list(run._flights) == ([3] if life else [2, 3]) and run.outcome.deaths == [death]
    assert run.outcome.lost == (0 if life else 2) and run.outcome.stopped is None
    assert run._orphans == ([(death, [flights[0], flights[1], flights[2]])] if life else [])
    made.dead = True
    run._on_death(Death("engine 1", "x", ()))
    assert run.outcome.stopped == "engines"


def test_many_failures_in_a_row_stop_a_run(store: Path, folder: Folder) -> None:
    told = Told()
    run = start_run(
        write_prompts(folder.out.parent / "p.jsonl", 9), folder.out, FakeEngines(store, folder.out), progress=told
    )
    most = run_module._MOST_FAILURES
    states = ["failed"] * (most - 1) + ["complete"] + ["failed"] * (most + 1)
    for position, state in enumerate(states):
        path = folder.out / folder.name(position, "a")
        info: Any = SimpleNamespace(state=state, reason=f"why {position}", store=path, bytes=None)
        answer = Answer(position, 2, 3, "stop", str(path))
        run._flights[position] = flight = Flight(Placed(position, position, b""), Prompt("a"), answer, captured=info)
        run._settle(flight)
    last = 2 * most - 1
    assert told.told == [
        (
            {"event": "captures_fail", "count": most, "why": f"why {last}"},
            f"dmi: {most} captures in a row failed, the last one because: why {last}",
        )
    ]
    counts = run.outcome.counts
    assert run.outcome.stopped == "captures" and (counts.done, counts.tokens, counts.bytes) == (1, 5, 0)
    assert counts.failed == 2, "captures that fail after the stop are not repeated"


def test_speeds_for_programs_have_one_decimal() -> None:
    assert _rounded({"a": 1.26, "b": None, "c": 3}) == {"a": 1.3, "b": None, "c": 3}
