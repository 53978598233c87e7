# SPDX-License-Identifier: Apache-2.0
"""Starts a child process and exchanges messages with it, with callbacks for its answers and its death."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dmi_connector.store.write.messages import Decoder, Message, pack, write_all

logger = logging.getLogger(__name__)

_THREADS_END_S = 5.0
"""Maximum time to wait for the threads of a process that has ended."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Turns off numpy's thread pools, which would only use memory."""


def allow_open_files(most: int | None = None) -> int:
    """Raise this process's limit of open files to `most`, or as far as allowed. Returns the new limit.

    most: None for as many as allowed.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = hard == resource.RLIM_INFINITY
    soft = hard if most is None else most if unlimited else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class Child:
    """Runs `python -m MODULE ARGUMENTS...` and exchanges messages with it on two threads.

    It uses subprocess instead of multiprocessing: the engine's workers are daemonic processes, which cannot start
    children with multiprocessing.

    name: name in error messages. pass_fds: file descriptors that the child inherits. apart: whether the child gets its
    own process group (`group`) and detaches from this process, so that signals to this process's group do not reach it.
    vLLM kills an engine with all its descendants, and the coordinator must survive that. pid: process id of the child,
    valid once it has answered `ready`. status: the value of the answer `bye`, or without `apart` the exit status of the
    child, which is -N if signal N killed it. env: the environment of the child. By default it is that of this process,
    without numpy's thread pools.

    The reader thread calls on_message(child, message) for each answer, and on_death(child, how) once.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int],
        on_message: Callable[[Child, Message], None],
        on_death: Callable[[Child, str], None],
        apart: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.apart = name, apart
        self.status: int | None = None
        self._deaf = False  # messages are no longer sent
        self._on_message, self._on_death = on_message, on_death
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            env=with_package(os.environ) | _NO_THREADS if env is None else with_package(env),
            bufsize=0,
            process_group=0 if apart else None,
        )
        self.pid = self.group = self.process.pid
        self.ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, name=f"dmi-send-{name}", daemon=True),
            threading.Thread(target=self._receive, name=f"dmi-receive-{name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: Message) -> None:
        """Queue a message. Never blocks. After the death of the process, messages are dropped."""
        if not self._deaf:
            self._queue.put(message)

    def finish(self) -> None:
        """End the process after the messages that are queued now."""
        self._queue.put(None)

    def kill(self) -> None:
        """Kill the process, with `apart` its whole process group. Does nothing if it has ended."""
        if not self.apart:
            self.process.kill()
        else:  # `process` has ended, and `pid` may not be known yet
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(self.group, signal.SIGKILL)

    def join(self, timeout: float) -> bool:
        """Wait for the process to end, and kill it after `timeout` seconds. Returns whether it ended by itself."""
        receiver = self._threads[1]
        receiver.join(timeout)
        ended = not receiver.is_alive()
        if not ended:
            self.kill()
        for thread in self._threads:
            thread.join(_THREADS_END_S)
        return ended

    def _send(self) -> None:
        assert self.process.stdin is not None
        fd = self.process.stdin.fileno()
        open_ = True
        try:
            while open_:
                message = self._queue.get()
                batch = bytearray()
                while message is not None:
                    batch += pack(message)
                    if self._queue.empty():
                        break
                    message = self._queue.get()
                open_ = message is not None
                write_all(fd, batch)
        except OSError:
            pass  # the process died: the reader thread detects it and reports the cause
        finally:
            self._deaf = True
            self.process.stdin.close()

    def _receive(self) -> None:
        assert self.process.stdout is not None
        decoder = Decoder()
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            for message in decoder.feed(data):
                if "ready" in message:
                    self.pid = message["ready"]
                    self.ready.set()
                elif "bye" in message:
                    self.status = message["bye"]
                try:
                    self._on_message(self, message)
                except Exception:  # later answers must still be read, or the ring never drains
                    logger.exception("dmi: handling an answer of %s failed", self.name)
        self.process.stdout.close()
        code = self.process.wait()
        self._queue.put(None)
        if self.apart:
            how = "killed" if self.status is None else f"exit status {self.status}"
        else:
            self.status, how = code, f"signal {-code}" if code < 0 else f"exit status {code}"
        self._on_death(self, how)


def with_package(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `python -P` finds this package."""
    # -P keeps the working directory out of sys.path, so a package that is not installed must be in PYTHONPATH.
    home = str(Path(__file__).resolve().parents[3])
    return {**env, "PYTHONPATH": os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])}
