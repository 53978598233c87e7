# SPDX-License-Identifier: Apache-2.0
"""An engine process on a node of a Ray cluster, and the actor beside it. `ray_workers.py` starts it."""

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
"""`events` answers after the first time at the latest. If nobody calls it for the second, the run is out of reach."""


class EngineWorker:
    """Starts an engine process on its node and carries messages to and from it. A Ray actor is made of it.

    The engine is in a process of its own, as without Ray: vLLM then finds no Ray around it, and ends with the actor.

    log: file for what the engine says. lives: paths of lock files on which all its processes hold a part. start: its
    first message. silence_s: seconds without a call of `events` after which the engine is killed. The node has lost the
    run then, or the run this node, and waits for the end of its processes to do their prompts again.

    `post` and `events` run on a thread each.
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
        """Queue a message for the engine. None: none will come, so that it ends."""
        if self._child is not None:
            if message is None:
                self._child.finish()
            else:
                self._child.post(message)

    def events(self) -> tuple[list[Message], tuple[str, int | None] | None]:
        """Messages since the last call, and how the process ended, if it has. Waits up to ASK_S for the first."""
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
