# SPDX-License-Identifier: Apache-2.0
"""The writer processes: what each has still to read of the ring, how arrays are shared out, and how fast they work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dmi_connector.store.capture import Group
from dmi_connector.store.pace import ROOM_BYTES, Pace, Shares, shares_for
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.process import Child
from dmi_connector.store.ring import Extent, RingBase
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.wire import Message


class WriterPool:
    """A number of writer processes, each replaced when it is next needed after its death.

    Call everything with the owner's lock held. pass_fds: descriptors that writers keep open for as long as they live.
    on_message, on_death: see `Child`. loads: bytes a token of what each writer has open.
    """

    def __init__(
        self,
        count: int,
        ring: RingBase,
        settings: PersistSettings,
        pass_fds: Sequence[int],
        on_message: Callable[[Child, Message], None],
        on_death: Callable[[Child, str], None],
    ) -> None:
        self._ring, self._settings, self._pass_fds = ring, settings, pass_fds
        self._on_message, self._on_death = on_message, on_death
        self._pending: dict[Child, dict[int, Extent]] = {}  # by process and number: payloads it has not read yet
        self._sent = self._started = 0
        self._pace = Pace()
        self.loads = [0] * count
        self.processes = [self._spawn() for _ in range(count)]

    def _spawn(self) -> Child:
        s, ring = self._settings, self._ring
        self._started += 1
        arguments = ["--ring-fd", str(ring.fd), "--ring-bytes", str(ring.nbytes), "--pace-fd", str(self._pace.fd)]
        arguments += ["--file-mode", s.file_mode, "--nice", str(s.nice), *(["--idle"] if s.idle else [])]
        fds = [ring.fd, self._pace.fd, *self._pass_fds]
        name = f"writer process {self._started}"
        process = Child(name, "dmi_connector.store.writer", arguments, fds, self._on_message, self._on_death)
        self._pending[process] = {}
        return process

    def alive(self, process: Child) -> bool:
        """Whether a process has not been buried yet."""
        return process in self._pending

    def process(self, writer: int) -> Child:
        """The process of a writer, by its number modulo their count; a new one if it has died."""
        writer %= len(self.processes)
        if not self.alive(self.processes[writer]):
            self.processes[writer] = self._spawn()
        return self.processes[writer]

    def group(self, arrays: Sequence[ArraySpec], part: list[int], writer: int) -> Group:
        """The arrays `part` of a capture, for a writer. Its load is counted already (`capture.assign`)."""
        mine = [arrays[i] for i in part]
        rows = frozenset(a.name for a in mine if a.per_sample)
        load = sum(a.token_bytes for a in mine)
        return Group(self.process(writer), part, any(not a.per_sample for a in mine), rows, writer, load)

    def leave(self, group: Group) -> None:
        """A group is done, or given up."""
        group.open = False
        self.loads[group.writer] -= group.load

    def send(self, process: Child, extent: Extent, message: Message) -> None:
        """Send a message about a payload, which is held until the writer has read it."""
        self._sent += 1
        self._ring.hold(extent)
        self._pending[process][self._sent] = extent
        process.post({**message, "seq": self._sent, "sent": time.monotonic()})

    def read(self, process: Child, seq: int) -> None:
        """A writer has read the payload of message `seq`."""
        self._ring.release(self._pending[process].pop(seq))

    def bury(self, process: Child) -> int:
        """A process is dead: let go of what it had still to read. Returns how many payloads that were."""
        extents = self._pending.pop(process, {})
        for extent in extents.values():
            self._ring.release(extent)
        return len(extents)

    def set_pace(self, to_come: int | None) -> None:
        """Say how fast writers work from now on, by how much waits for them. to_come: bytes that open captures may yet
        bring; None: nobody is slowed by writers.
        """
        if to_come is None:
            self._pace.shares = Shares(1.0, 1.0)
            return
        room = min(self._ring.nbytes, ROOM_BYTES)
        self._pace.shares = shares_for(self._settings.least_share, self._ring.used / room, to_come / room)

    def end(self, deadline: float) -> bool:
        """Let all processes stop after what was sent to them, by force from `deadline` (of time.monotonic) on. Returns
        whether all stopped by themselves. Without the lock.
        """
        for process in self.processes:
            process.finish()
        ended = [process.join(max(0.5, deadline - time.monotonic())) for process in self.processes]
        self._pace.close()
        return all(ended)
