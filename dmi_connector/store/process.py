# SPDX-License-Identifier: Apache-2.0
"""One writer process as the engine sees it: a queue in, answers out, and the news of its death."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dmi_connector.store.wire import Decoder, Message, pack, write_all

logger = logging.getLogger(__name__)


class WriterProcess:
    """Starts `dmi_connector.store.writer` and carries messages to and from it on two threads.

    subprocess, not multiprocessing: the engine's workers are daemonic processes, which may not have
    children of the latter kind. `on_message(process, message)` and, once, `on_death(process, reason)` are
    called from the reader thread.
    """

    def __init__(
        self,
        number: int,
        ring_fd: int,
        ring_bytes: int,
        on_message: Callable[[WriterProcess, Message], None],
        on_death: Callable[[WriterProcess, str], None],
    ) -> None:
        self.number = number
        self._on_message, self._on_death = on_message, on_death
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        command = [sys.executable, "-P", "-m", "dmi_connector.store.writer"]
        command += ["--ring-fd", str(ring_fd), "--ring-bytes", str(ring_bytes)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[ring_fd],
            env=_environment(),
            bufsize=0,
        )
        self._threads = [
            threading.Thread(target=self._send, name=f"dmi-send-{number}", daemon=True),
            threading.Thread(target=self._receive, name=f"dmi-receive-{number}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: Message) -> None:
        """Queue a message. Never blocks; after the death of the process the message goes nowhere."""
        self._queue.put(message)

    def finish(self) -> None:
        """Let the process stop after the messages queued so far."""
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the process to end, kill it after `timeout` seconds. Returns whether it ended by
        itself.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        finally:
            for thread in self._threads:
                thread.join(5)
        return True

    def _send(self) -> None:
        assert self.process.stdin is not None
        fd = self.process.stdin.fileno()
        try:
            while (message := self._queue.get()) is not None:
                write_all(fd, pack(message))
        except OSError:
            pass  # the process died: the reader thread sees it too, and says why
        finally:
            self.process.stdin.close()

    def _receive(self) -> None:
        assert self.process.stdout is not None
        decoder = Decoder()
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            for message in decoder.feed(data):
                try:
                    self._on_message(self, message)
                except Exception:  # a faulty callback must not stop the answers: the ring would never drain
                    logger.exception("dmi: handling an answer of writer process %d failed", self.number)
        self.process.stdout.close()
        code = self.process.wait()
        self._queue.put(None)
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        self._on_death(self, f"writer process {self.number} died ({how})")


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    # -P keeps the working directory off the path, so a package that is not installed must be named.
    home = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])
    # numpy's thread pool would only cost memory here.
    env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return env
