# SPDX-License-Identifier: Apache-2.0
"""A child process as its parent sees it: a queue of messages, a callback for answers, one for its death."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dmi_connector.store.write.messages import Decoder, Message, pack, write_all

logger = logging.getLogger(__name__)

_THREADS_END_S = 5.0
"""Time for the threads of a process that has ended."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""No thread pool of numpy's: it would only take memory."""


class Child:
    """Runs `python -m MODULE ARGUMENTS...` and carries messages to and from it on two threads.

    It uses subprocess, not multiprocessing: the engine's workers are daemonic processes, which may not have children of
    the latter kind.

    name: what errors call it. pass_fds: descriptors it inherits. apart: it has a process group of its own (`group`),
    out of reach of signals to the parent's, and leaves the parent's family. vLLM kills an engine with all descendants;
    the coordinator must outlive that. pid: the child's own once it has answered `ready`. status: the value of its last
    answer, `bye`, or the exit status of a child that is not apart. env: its environment, by default this process's
    without threads of numpy's.

    on_message(child, message) and, once, on_death(child, how) are called from the reader thread.
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
        self._deaf = False  # no message is sent any more
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
        """Queue a message. Never blocks; after the death of the process the message goes nowhere."""
        if not self._deaf:
            self._queue.put(message)

    def finish(self) -> None:
        """Let the process stop after the messages queued so far."""
        self._queue.put(None)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def join(self, timeout: float) -> bool:
        """Wait for the process to end; kill it after `timeout` seconds. Returns whether it ended by itself."""
        receiver = self._threads[1]
        receiver.join(timeout)
        ended = not receiver.is_alive()
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
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
            pass  # the process died: the reader thread sees it too, and says why
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
                except Exception:  # a faulty callback must not stop the answers: the ring would never drain
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
    # -P keeps the working directory off the path, so the package must be named where it is not installed.
    home = str(Path(__file__).resolve().parents[3])
    return {**env, "PYTHONPATH": os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])}
