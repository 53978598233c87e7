# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that runs an engine process on its node. `ray_workers.py` starts it."""

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
"""Maximum time that a call of `events` waits, and time without a call after which the run counts as unreachable."""


class EngineWorker:
    """Starts an engine process on its node and exchanges messages with it. It is the class of a Ray actor.

    The engine runs in its own process, as without Ray. vLLM then does not detect Ray, and the engine ends with the
    actor.

    log: file for the engine's output. lives: paths of lock files on which all processes of the engine hold shared
    locks. start: the first message to the engine. silence_s: seconds without a call of `events` after which the engine
    is killed. The connection between run and node is then lost. The run waits until the engine's processes have ended,
    and captures their prompts again.

    `post` and `events` run on separate threads.
    """

    def __init__(self, log: str, lives: Sequence[str], start: Message, silence_s: float = SILENCE_S) -> None:
        self._outbox: queue.SimpleQueue[Message | tuple[str, int | None]] = queue.SimpleQueue()
        self._child: Child | None = None
        if missing := [path for path in lives if not os.path.exists(path)]:
            out = os.path.dirname(missing[0])
            host = socket.gethostname()
            self._outbox.put({"failed": f"--out {out}: node {host} sees another directory there; take a shared one"})
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
        """Queue a message for the engine. None: no more messages follow, so the engine ends."""
        if self._child is not None:
            if message is None:
                self._child.finish()
            else:
                self._child.post(message)

    def events(self) -> tuple[list[Message], tuple[str, int | None] | None]:
        """The messages since the last call, and how the process ended, if it has. Waits up to ASK_S for a message."""
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
