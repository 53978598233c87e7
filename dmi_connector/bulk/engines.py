# SPDX-License-Identifier: Apache-2.0
"""`Engines`, the interface of the engines of a run, and `EngineProcesses`: engines in processes on this machine."""

from __future__ import annotations

import itertools
import os
import queue
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dmi_connector.bulk.engine_log import cause
from dmi_connector.store.format.locks import LIFE_LOCK
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.messages import Message

PROCESS = "dmi_connector.bulk.engine_process"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_AHEAD = 2.0
"""Number of prompts that an engine should have, as a multiple of max_num_seqs. Those beyond max_num_seqs wait in its
scheduler's queue.
"""
_END_S = 600.0
"""Seconds that `close` waits for an engine to exit. Then the engine is killed."""


@dataclass(frozen=True)
class Answer:
    """The result of a prompt.

    position: position of the prompt in the run. engine: name of the engine. prompt_tokens: number of tokens of the
    prompt. generated_tokens: number of generated tokens. finish_reason: vLLM's finish reason. store: path of the store,
    if known. refused: why the engine refused the prompt, or None. error: why the request was served without a capture,
    or None.
    """

    position: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finish_reason: str | None = None
    store: str | None = None
    refused: str | None = None
    error: str | None = None
    engine: str = ""


@dataclass(frozen=True)
class Death:
    """An engine that exited too early: before it was told to exit, with prompts left, or with an error.

    name: name of the engine. how: how it exited, for messages. positions: positions of the prompts that it had not
    finished. life: path of a file on which only processes of this engine hold shared locks. Once these processes have
    exited, other engines get the prompts. If `life` is None, the next start of the run captures the prompts. began:
    whether the engine was ready for prompts.
    """

    name: str
    how: str
    positions: tuple[int, ...]
    life: Path | None = None
    began: bool = True


class Engines(Protocol):
    """What a run calls to start its engines, submit prompts and get their results."""

    def start(self) -> None:
        """Start the engines. A second call does nothing."""

    def room(self) -> int:
        """Number of prompts that the engine with the most room can take now; 0 or less for none."""

    def submit(self, position: int, key: str, prompt: Mapping[str, Any]) -> None:
        """Send a prompt to the engine with the most room.

        position: position of the prompt in the run. key: key of its store. prompt: a result of `Prompt.to_json`.
        """

    def events(self, timeout: float) -> list[Answer | Death]:
        """The answers and deaths since the last call. If there are none, waits up to `timeout` seconds for one."""

    def finish(self) -> None:
        """Let each engine exit after its last prompt. No prompt may be submitted after this call."""

    def starting(self) -> list[Path]:
        """Paths of the logs of the engines that are starting; [] once an engine is ready for prompts."""

    def alive(self) -> bool:
        """Whether an engine is running, or `start` was not called yet."""

    def close(self) -> None:
        """Stop all engines. Engines that have prompts or are starting are killed. The others may exit by themselves."""


class EngineChild(Protocol):
    """The process of an engine, on this machine (`Child`) or on a node of a Ray cluster.

    status: the exit status, None while it is unknown.
    """

    status: int | None

    def post(self, message: Message) -> None:
        """Queue a message for the process."""

    def finish(self) -> None:
        """Let the process exit after it has handled the messages that are queued now."""

    def kill(self) -> None:
        """Kill the process at once."""

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the process exits, then kill it. Returns whether it exited by itself."""


@dataclass(eq=False)
class Engine:
    """The state of one engine.

    log: path of its log. logged: bytes of the log before the engine started. life: see `Death`. window: number of
    prompts that it should have at a time; 0 until it is ready for prompts. has: positions of its unfinished prompts.
    answered: number of its finished prompts, without refused ones. alive: whether it has not exited. finishing: whether
    it was told to exit. failure: the error that it reported before it exited, or None.
    """

    child: EngineChild
    name: str
    log: Path
    life: Path | None = None
    window: int = 0
    has: set[int] = field(default_factory=set)
    answered: int = 0
    alive: bool = True
    finishing: bool = False
    failure: str | None = None
    logged: int = 0


class EnginePool(ABC):
    """Distributes prompts over engine processes (engine_process.py). Subclasses start the processes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[EngineChild, Message | str]] = queue.SimpleQueue()
        self._engines: list[Engine] = []

    def start(self) -> None:
        if not self._engines:
            self._engines = self._begin()

    @abstractmethod
    def _begin(self) -> list[Engine]:
        """Start the engines."""

    def _on_message(self, child: EngineChild, message: Message) -> None:
        self._queue.put((child, message))

    def _on_death(self, child: EngineChild, how: str) -> None:
        self._queue.put((child, how))

    def room(self) -> int:
        if any(e.alive and not e.window for e in self._engines):
            return 0  # once all engines are ready, a few prompts are spread evenly
        return max((e.window - len(e.has) for e in self._engines if e.alive), default=0)

    def submit(self, position: int, key: str, prompt: Mapping[str, Any]) -> None:
        engine = max((e for e in self._engines if e.alive), key=lambda e: e.window - len(e.has))
        engine.has.add(position)
        engine.child.post({"position": position, "key": key, "prompt": dict(prompt)})

    def events(self, timeout: float) -> list[Answer | Death]:
        found: list[Answer | Death] = []
        deadline = time.monotonic() + timeout
        while not found:
            try:
                child, message = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            found += self._handle(child, message)
        while not self._queue.empty():
            found += self._handle(*self._queue.get())
        return found

    def _handle(self, child: EngineChild, message: Message | str) -> list[Answer | Death]:
        engine = next(e for e in self._engines if e.child is child)
        if isinstance(message, str):
            engine.alive = False
            if engine.finishing and child.status == 0 and not engine.has:
                return []
            how = cause(engine.failure or f"it died ({message})", engine.log, engine.logged)
            lost = tuple(sorted(engine.has))
            engine.has.clear()
            return [Death(engine.name, f"{how}; its log: {engine.log}", lost, engine.life, engine.window > 0)]
        if "ready" in message:
            engine.window = max(2, int(_AHEAD * message["max_num_seqs"]))
        elif "failed" in message:
            engine.failure = message["failed"]
        elif "refused" in message:
            engine.has.discard(message["refused"])
            return [Answer(message["refused"], refused=message["why"])]
        elif "ended" in message:
            engine.answered += 1
            engine.has.discard(message["ended"])
            fields = ("prompt_tokens", "generated_tokens", "finish_reason", "store", "error")
            return [Answer(message["ended"], **{name: message[name] for name in fields}, engine=engine.name)]
        return []

    def finish(self) -> None:
        for engine in self._engines:
            if not engine.finishing:
                engine.finishing = True
                engine.child.finish()

    def starting(self) -> list[Path]:
        if any(e.window for e in self._engines):
            return []
        return [e.log for e in self._engines if e.alive and not e.finishing]

    def alive(self) -> bool:
        return not self._engines or any(engine.alive for engine in self._engines)

    def answered(self) -> list[int]:
        """The number of finished prompts of each engine, without refused ones; [] before `start`."""
        return [engine.answered for engine in self._engines]

    def close(self) -> None:
        self.finish()
        for engine in self._engines:
            if engine.alive and (engine.has or not engine.window):
                engine.child.kill()
            engine.child.join(_END_S)


class EngineProcesses(EnginePool):
    """Engines in processes on this machine.

    count: number of engines, which get equal numbers of GPUs. start: `RunSettings.engine_message`. out: directory for
    the logs. life: path of the file on which all processes of the engines hold shared locks until they exit. suffix:
    `Order.suffix`, for the names of logs. Raises ValueError if there are fewer GPUs than engines.
    """

    def __init__(self, count: int, start: Message, out: Path, life: Path, suffix: str = "") -> None:
        super().__init__()
        self._shares = device_shares(count, visible_devices())
        self._message, self._out, self._life, self._suffix = start, out, life, suffix

    def _begin(self) -> list[Engine]:
        engines = []
        for number, devices in enumerate(self._shares):
            env = {**os.environ, LIFE_LOCK: str(self._life)}
            if devices:
                env[_DEVICES] = ",".join(devices)
            log = self._out / f"engine{self._suffix}-{number}.log"
            logged = log.stat().st_size if log.exists() else 0
            arguments = ["--parent", str(os.getpid()), "--log", str(log)]
            child = Child(f"engine {number}", PROCESS, arguments, [], self._on_message, self._on_death, env=env)
            child.post({"start": self._message})
            engines.append(Engine(child, f"engine {number}", log, logged=logged))
        return engines


def visible_devices() -> list[str]:
    """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES; [] without GPUs.

    As in CUDA, devices after an invalid one, such as -1, do not count.
    """
    named = os.environ.get(_DEVICES)
    if named is not None:
        devices = [device.strip() for device in named.split(",") if device.strip()]
        return [*itertools.takewhile(lambda device: not (device.startswith("-") or device == "NoDevFiles"), devices)]
    try:
        return sorted((n[6:] for n in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", n)), key=int)
    except OSError:
        return []


def device_shares(count: int, devices: Sequence[str]) -> list[list[str]]:
    """The GPUs of each of `count` engines, the same number for each.

    Lists are empty if there is one engine or no GPU. CUDA_VISIBLE_DEVICES of the engine is then left unchanged. GPUs
    that cannot be shared equally are not used. Raises ValueError if there are fewer GPUs than engines.
    """
    if not devices or count == 1:
        return [[] for _ in range(count)]
    each = len(devices) // count
    if not each:
        raise ValueError(
            f"--data-parallel {count}: there are {len(devices)} GPUs ({', '.join(devices)}); give as many or fewer"
        )
    return [list(devices[number * each : (number + 1) * each]) for number in range(count)]
