# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that runs an engine process on its node. `ray_workers.py` starts the actor."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence

from dmi_connector.bulk.engines import PROCESS
from dmi_connector.store.format.locks import LIFE_LOCK
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.messages import Message

ASK_S, SILENCE_S = 5.0, 60.0
"""Maximum seconds that a call of `events` waits, and seconds without a call after which the engine is killed."""


class EngineWorker:
    """Starts an engine process on its node, and exchanges messages with the process. This is the class of a Ray actor.

    The engine runs in a process of its own, so vLLM does not detect Ray. The process ends with the actor.

    If `events` is not called for `silence_s` seconds, the connection to the run counts as lost, and the engine is
    killed. The run waits until the engine's processes have exited, and captures the engine's prompts again.

    log: file for the engine's output. lives: paths of lock files on which all processes of the engine hold shared
    locks. start: the first message to the engine. Ray calls `post` and `events` on separate threads.
    """

    def __init__(self, log: str, lives: Sequence[str], start: Message, silence_s: float = SILENCE_S) -> None:
        self._outbox: queue.SimpleQueue[Message | tuple[str, int | None]] = queue.SimpleQueue()
        self._child: Child | None = None
        if missing := [path for path in lives if not os.path.exists(path)]:
            out = os.path.dirname(missing[0])
            host = socket.gethostname()
            self._outbox.put({"failed": f"--out {out}: node {host} has another directory there; give a shared one"})
            self._outbox.put(("no engine was started", 1))
            return
        env = {**os.environ, LIFE_LOCK: "\n".join(lives)}
        arguments = ["--parent", str(os.getpid()), "--log", log]
        self._child = Child("engine", PROCESS, arguments, [], self._on_message, self._on_death, env=env)
        self._child.post({"start": start})
        self._silence_s, self._asked = silence_s, time.monotonic()
        threading.Thread(target=self._watch, name="dmi-watch", daemon=True).start()

    def _on_message(self, _child: Child, message: Message) -> None:
        self._outbox.put(message)

    def _on_death(self, child: Child, how: str) -> None:
        self._outbox.put((how, child.status))

    def post(self, message: Message | None) -> None:
        """Queue a message for the engine. None: no more messages follow, and the engine exits after its last prompt."""
        if self._child is not None:
            if message is None:
                self._child.finish()
            else:
                self._child.post(message)

    def events(self) -> tuple[list[Message], tuple[str, int | None] | None]:
        """(messages since the last call, end). Waits up to ASK_S seconds for a message.

        end: None while the process runs, else (how it ended, its exit status).
        """
        self._asked = time.monotonic()
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._outbox.get(timeout=0.0 if messages else ASK_S)
                if isinstance(item, tuple):
                    return messages, item
                messages.append(item)
        return messages, None

    def _watch(self) -> None:
        while (left := self._asked + self._silence_s - time.monotonic()) > 0:
            time.sleep(left)
        assert self._child is not None
        self._child.kill()
