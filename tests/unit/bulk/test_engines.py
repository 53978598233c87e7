# SPDX-License-Identifier: Apache-2.0
"""Between a run and its engines: the messages to them, their responses, and their ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.bulk import engine_process, engine_worker, engines
from dmi_connector.bulk.engine_process import Inbox, serve
from dmi_connector.bulk.engine_worker import EngineWorker
from dmi_connector.bulk.engines import Answer, Death, Engine, EnginePool, EngineProcesses
from dmi_connector.engine.offline import feed as feed_module
from dmi_connector.store.format.locks import LIFE_LOCK
from dmi_connector.store.write.messages import Decoder, Message, pack

START = {"model": "m", "capture": {"hooks": "q"}, "flags": ["--x"], "sampling": {"n": 1}, "max_tokens": 3}


@dataclass(eq=False)
class Process:
    """A fake engine process. sent: its messages. told: other calls, in order."""

    status: int | None = None
    sent: list[Message] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)

    def post(self, message: Message) -> None:
        self.sent.append(message)

    def finish(self) -> None:
        self.told.append("finish")

    def kill(self) -> None:
        self.told.append("kill")

    def join(self, timeout: float) -> bool:
        self.told.append(timeout)
        return True


class Pool(EnginePool):
    """A pool of engines with fake processes, whose messages the test sends."""

    def __init__(self, logs: Path, count: int = 2) -> None:
        super().__init__()
        self.logs, self.children, self.begun = logs, [Process() for _ in range(count)], 0

    def _begin(self) -> list[Engine]:
        self.begun += 1
        return [Engine(one, f"e{i}", self.logs / f"{i}.log", Path(f"l{i}")) for i, one in enumerate(self.children)]

    def says(self, number: int, message: Message) -> None:
        self._on_message(self.children[number], message)

    def dies(self, number: int, how: str, status: int) -> None:
        self.children[number].status = status
        self._on_death(self.children[number], how)


def pool_of(logs: Path, *seqs: int) -> Pool:
    """A pool of ready engines. seqs: `max_num_seqs` of each engine."""
    pool = Pool(logs, len(seqs))
    pool.start()
    for number, most in enumerate(seqs):
        pool.says(number, {"ready": 7, "max_num_seqs": most})
    assert pool.events(0) == []
    return pool


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_no_prompt_is_handed_out_before_every_engine_is_ready(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    assert pool.alive() and pool.answered() == [] and pool.room() == 0
    pool.start()
    pool.start()
    assert pool.begun == 1 and pool.alive() and pool.answered() == [0, 0] and pool.room() == 0
    pool.says(0, {"ready": 1, "max_num_seqs": 3})
    assert pool.events(0) == [] and pool.room() == 0
    pool.says(1, {"ready": 2, "max_num_seqs": 1})
    assert pool.events(0) == [] and pool.room() == 6, "the room is twice the number of concurrent requests"


def test_a_prompt_goes_to_the_engine_with_the_most_room(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 3, 1)
    rooms = []
    for position in range(8):
        rooms.append(pool.room())
        pool.submit(position, f"key-{position}", {"text": f"t{position}"})
    assert rooms == [6, 5, 4, 3, 2, 2, 1, 1] and pool.room() == 0
    sent = [[message["position"] for message in child.sent] for child in pool.children]
    assert sent == [[0, 1, 2, 3, 4, 6], [5, 7]]
    assert pool.children[1].sent[0] == {"position": 5, "key": "key-5", "prompt": {"text": "t5"}}


def test_answers_have_all_that_an_engine_says(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 2, 2)
    for position in range(3):
        pool.submit(position, "k", {})
    ended = {"prompt_tokens": 5, "generated_tokens": 2, "finish_reason": "stop", "store": "/o/a.zarr", "error": None}
    pool.says(0, {"ended": 0, **ended})
    pool.says(1, {"refused": 1, "why": "it is too long"})
    pool.says(0, {"ended": 2, **ended, "store": None, "error": "no room"})
    pool.says(0, {"bye": 0})
    assert pool.events(0) == [
        Answer(0, 5, 2, "stop", "/o/a.zarr", None, None, "e0"),
        Answer(1, refused="it is too long"),
        Answer(2, 5, 2, "stop", None, None, "no room", "e0"),
    ]
    assert pool.events(0) == [] and pool.answered() == [2, 0] and pool.room() == 4, "no prompt is in flight"


def test_events_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the timeout, even if messages arrive that are not events of the run."""
    pool, waits, now = pool_of(tmp_path, 1), [], [100.0]
    monkeypatch.setattr(engines.time, "monotonic", lambda: now[0])
    get = pool._queue.get
    coming: list[Message] = [{"bye": 0}, {"refused": 4, "why": "no"}]

    class Queue:
        empty, put = staticmethod(pool._queue.empty), staticmethod(pool._queue.put)

        def get(self, timeout: float | None = None) -> Any:
            waits.append(timeout)
            now[0] += 2
            if coming:
                pool.says(0, coming.pop(0))
            return get(timeout=0)

    pool._queue = Queue()  # type: ignore[assignment]
    assert pool.events(5) == [Answer(4, refused="no")] and waits == [5, 3]
    waits.clear()
    assert pool.events(1) == [] and waits == [1], "no event arrived"
    coming += [{"bye": 0}, {"bye": 0}]
    assert pool.events(3) == [] and waits == [1, 3, 1, 0]


def test_an_engine_that_dies_leaves_its_prompts_in_order(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 3, 1)
    for position in (9, 3, 6):
        pool.submit(position, "k", {})
    pool.dies(0, "signal 9", -9)
    how = f"it died (signal 9); its log: {tmp_path}/0.log"
    assert pool.events(0) == [Death("e0", how, (3, 6, 9), Path("l0"), True)]
    assert pool.alive() and pool.room() == 2, "the other engine must continue"
    pool.submit(1, "k", {})
    assert [message["position"] for message in pool.children[1].sent] == [1]
    pool.dies(1, "exit status 1", 1)
    assert [death.positions for death in pool.events(0) if isinstance(death, Death)] == [(1,)]
    assert not pool.alive() and pool.room() == 0


def test_an_engine_that_ends_as_requested_is_not_a_death(tmp_path: Path) -> None:
    """An exit status other than 0 or prompts in flight make it a death."""
    pool = pool_of(tmp_path, 1, 1, 1, 1)
    pool.submit(0, "k", {})
    pool.dies(3, "exit status 0", 0)
    assert [death.name for death in pool.events(0) if isinstance(death, Death)] == ["e3"], "no call of finish preceded"
    pool.finish()
    pool.finish()
    assert [child.told for child in pool.children] == [["finish"]] * 4
    for number, status in ((0, 0), (1, 0), (2, 1)):
        pool.dies(number, f"exit status {status}", status)
    found = [(death.name, death.positions) for death in pool.events(0) if isinstance(death, Death)]
    assert found == [("e0", (0,)), ("e2", ())] and not pool.alive()


def test_closing_kills_engines_that_would_not_end_by_themselves(tmp_path: Path) -> None:
    """It kills engines with prompts in flight and engines that still start, and waits for all engines."""
    pool = Pool(tmp_path, 4)
    pool.start()
    for number in (0, 1, 3):
        pool.says(number, {"ready": 1, "max_num_seqs": 1})
    pool.dies(3, "signal 9", -9)
    pool.events(0)
    pool.submit(0, "k", {})
    pool.close()
    wanted = [["finish", "kill", 600.0], ["finish", 600.0], ["finish", "kill", 600.0], ["finish", 600.0]]
    assert [child.told for child in pool.children] == wanted


class Started(Process):
    """Records the arguments of `Child`."""

    made: list[Started] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.arguments, self.options = arguments, options
        Started.made.append(self)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The processes that engines start."""
    monkeypatch.setattr(Started, "made", [])
    monkeypatch.setattr(engines, "Child", Started)
    monkeypatch.setattr(engine_worker, "Child", Started)
    return Started.made


@pytest.mark.parametrize("devices", ["4,5,6,7", ""])
def test_each_engine_has_its_own_gpus_and_its_own_log(
    devices: str, made: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.setenv("OTHER", "kept")
    (tmp_path / "engine-1-of-3-1.log").write_text("of an earlier start")
    pool = EngineProcesses(2, START, tmp_path, tmp_path / "life", "-1-of-3")
    assert made == []
    pool.start()
    logs = [tmp_path / f"engine-1-of-3-{i}.log" for i in range(2)]
    assert pool.starting() == logs and [e.logged for e in pool._engines] == [0, len("of an earlier start")]
    assert [e.name for e in pool._engines] == ["engine 0", "engine 1"] and [e.life for e in pool._engines] == [None] * 2
    for number, child in enumerate(made):
        name, module, arguments, fds, on_message, on_death = child.arguments
        assert (name, module, fds) == (f"engine {number}", "dmi_connector.bulk.engine_process", [])
        assert arguments == ["--parent", str(os.getpid()), "--log", str(logs[number])]
        env = child.options["env"]
        assert (env[LIFE_LOCK], env["OTHER"]) == (str(tmp_path / "life"), "kept")
        assert env["CUDA_VISIBLE_DEVICES"] == (("4,5", "6,7")[number] if devices else "")
        assert child.sent == [{"start": START}]
        on_message(child, {"ready": 1, "max_num_seqs": 4})
        assert pool.events(0) == []
        on_death(child, "signal 9")
        (death,) = pool.events(0)
        assert isinstance(death, Death) and death.name == name and death.began and death.life is None


# ---- the process ----------------------------------------------------------------------------------------------------


def test_messages_are_taken_as_they_come(tmp_path: Path) -> None:
    read, write = os.pipe()
    inbox = Inbox(read)
    assert inbox.take(5, wait=False) == [] and not inbox.over
    os.write(write, b"".join(pack({"n": n}) for n in range(5)) + pack({"n": 5})[:3])
    assert [m["n"] for m in inbox.take(2, wait=True)] == [0, 1]
    assert [m["n"] for m in inbox.take(9, wait=True)] == [2, 3, 4], "the last message is incomplete"
    assert inbox.take(1, wait=False) == []
    os.write(write, pack({"n": 5})[3:] + pack({"n": 6}))
    os.close(write)
    assert [m["n"] for m in inbox.take(1, wait=True)] == [5] and not inbox.over
    assert [m["n"] for m in inbox.take(9, wait=True)] == [6] and inbox.ended and inbox.over
    assert inbox.take(9, wait=True) == []
    os.close(read)


class Feed:
    """A fake `EngineFeed` that finishes each prompt in the step after the one that accepted it."""

    made: list[Feed] = []
    max_num_seqs = 4

    def __init__(self, *given: Any) -> None:
        self.given, self.added, self.waits, self.ended = given, list[tuple[str, str, Any]](), list[str](), False
        Feed.made.append(self)

    @property
    def busy(self) -> bool:
        return bool(self.waits)

    def add(self, name: str, key: str, prompt: Any) -> None:
        if prompt == "bad":
            raise feed_module.PromptRefused("it is\n  too long")
        self.added.append((name, key, prompt))
        self.waits.append(name)

    def step(self) -> list[feed_module.Ended]:
        return [feed_module.Ended(self.waits.pop(0), 5, 2, "stop", "/o/a.zarr", None)]

    def shutdown(self) -> None:
        self.ended = True


class Given:
    """A fake `Inbox`. Each call returns the next messages. asked: the arguments of the calls."""

    def __init__(self, *batches: list[Message]) -> None:
        self.batches, self.asked = list(batches), list[tuple[int, bool]]()

    def take(self, most: int, wait: bool) -> list[Message]:
        self.asked.append((most, wait))
        return self.batches.pop(0) if self.batches else []

    @property
    def over(self) -> bool:
        return not self.batches


def test_an_engine_answers_each_prompt_and_waits_only_when_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "made", [])
    monkeypatch.setattr(feed_module, "EngineFeed", Feed)
    prompts = [{"position": n, "key": f"k{n}", "prompt": "bad" if n == 1 else f"p{n}"} for n in range(3)]
    inbox = Given(prompts[:2], prompts[2:], [])
    answers = list(serve(inbox, {**START, "store_dir": "/o"}))  # type: ignore[arg-type]
    (feed,) = Feed.made
    assert feed.given == ("m", {"hooks": "q", "store_dir": "/o"}, ["--x"], {"n": 1}, 3) and feed.ended
    assert feed.added == [("0", "k0", "p0"), ("2", "k2", "p2")]
    ended = {"prompt_tokens": 5, "generated_tokens": 2, "finish_reason": "stop"}
    assert answers == [
        {"ready": os.getpid(), "max_num_seqs": 4},
        {"refused": 1, "why": "it is too long"},
        {"ended": 0, "store": "/o/a.zarr", "error": None, **ended},
        {"ended": 2, "store": "/o/a.zarr", "error": None, **ended},
        {"bye": 0},
    ]
    assert inbox.asked == [(64, True), (64, True), (64, True)], "the engine must wait each time, because it is idle"


def test_a_busy_engine_does_not_wait_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "EngineFeed", Feed)
    inbox = Given([{"position": n, "key": "k", "prompt": "p"} for n in range(3)], [])
    answers = list(serve(inbox, {**START, "store_dir": "/o"}))  # type: ignore[arg-type]
    assert [answer["ended"] for answer in answers if "ended" in answer] == [0, 1, 2]
    assert inbox.asked == [(64, True), (64, False), (64, False)]


def test_an_engine_that_cannot_start_says_why_and_leaves_the_rest_in_its_log(tmp_path: Path) -> None:
    """A process without a start message exits silently."""
    log, start = tmp_path / "engine.log", {"capture": {"upload": "ftp://host/x"}}
    command = [sys.executable, "-m", engine_process.__name__, "--parent", str(os.getpid()), "--log", str(log)]
    log.write_text("earlier\n")
    done = subprocess.run(command, input=pack({"start": start}), capture_output=True)
    (answer,) = Decoder().feed(done.stdout)
    assert done.returncode == 1 and done.stderr == b"" and answer["failed"].startswith("ValueError: upload: ")
    said = log.read_text()
    assert said.startswith("earlier\nTraceback") and said.endswith("\n") and "ValueError: upload" in said
    done = subprocess.run(command, input=b"", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr, log.read_text()) == (0, b"", b"", said)


# ---- on a node of a cluster -----------------------------------------------------------------------------------------


@pytest.fixture
def worker(made: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineWorker]:
    monkeypatch.setattr(engine_worker, "ASK_S", 0.0)
    lives = [tmp_path / "life", tmp_path / "life.worker-0-1"]
    for path in lives:
        path.touch()
    yield EngineWorker("/x/engine.log", [str(path) for path in lives], START, silence_s=10**6)


def test_a_worker_carries_messages_both_ways(worker: EngineWorker, made: list[Started], tmp_path: Path) -> None:
    (child,) = made
    name, module, arguments, fds, on_message, on_death = child.arguments
    assert (name, module, fds) == ("engine", "dmi_connector.bulk.engine_process", [])
    assert arguments == ["--parent", str(os.getpid()), "--log", "/x/engine.log"]
    assert child.options["env"][LIFE_LOCK] == f"{tmp_path}/life\n{tmp_path}/life.worker-0-1"
    assert child.options["env"]["PATH"] == os.environ["PATH"]
    worker.post({"position": 1})
    worker.post(None)
    assert child.sent == [{"start": START}, {"position": 1}] and child.told == ["finish"]
    assert worker.events() == ([], None)
    on_message(child, {"ready": 1})
    on_message(child, {"bye": 0})
    assert worker.events() == ([{"ready": 1}, {"bye": 0}], None) and worker.events() == ([], None)
    child.status = 3
    on_message(child, {"failed": "x"})
    on_death(child, "exit status 3")
    on_message(child, {"late": 1})
    assert worker.events() == ([{"failed": "x"}], ("exit status 3", 3)) and worker.events() == ([{"late": 1}], None)


def test_a_worker_with_recent_calls_does_not_kill_its_engine(
    worker: EngineWorker, made: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [1000.0], list[float]()
    worker._silence_s, worker._asked = 60.0, 990.0

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        if len(slept) == 1:
            worker.events()

    monkeypatch.setattr(engine_worker.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(engine_worker.time, "sleep", sleep)
    worker._watch()
    assert slept == [50.0, 60.0] and made[0].told == ["kill"]


def test_a_worker_on_a_node_with_another_directory_starts_no_engine(made: list[Started], tmp_path: Path) -> None:
    (tmp_path / "life").touch()
    worker = EngineWorker("/x/log", [str(tmp_path / "life"), str(tmp_path / "other" / "life.worker")], START)
    messages, end = worker.events()
    assert made == [] and end == ("no engine was started", 1)
    (message,) = messages
    assert message["failed"].startswith(f"--out {tmp_path}/other: node ")
    worker.post({"position": 1})
    worker.post(None)
