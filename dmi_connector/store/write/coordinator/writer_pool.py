# SPDX-License-Identifier: Apache-2.0
"""The pool of writer processes: their arrays, the payloads that they have not read yet, and their duty cycle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.messages import Message
from dmi_connector.store.write.pace import FULL, ROOM_BYTES, Pace, Shares, shares_for
from dmi_connector.store.write.ring import Extent, RingBase
from dmi_connector.store.write.settings import WriteSettings

WRITER = "dmi_connector.store.write.writer"
_LEAST_END_S = 0.5
"""Minimum time for a process to end, even after the deadline."""
SPREAD_BYTES = 16 << 20
"""Minimum size of chunks that are spread over several writers. For smaller chunks the messages cost more than they
save.
"""
SEGMENT_BYTES = 16 << 20
"""Minimum size of segments that are distributed over writers, so that a long capture uses more than one core."""


@dataclass(eq=False)
class Assignment:
    """The arrays of a capture, or some segments of them, that one writer writes.

    writer: index of the writer in the pool. arrays: indexes in the layout. load: bytes per token. tokens: whether token
    arrays are among the arrays. samples: names of the per-sample arrays among them. leader: the assignment that writes
    the metadata of these arrays; None if this one does. segments: number of segments. bytes_raw: bytes of the written
    rows before encoding. open: False once it is finished or abandoned.
    """

    process: Child
    writer: int
    arrays: list[int]
    load: int
    tokens: bool
    samples: frozenset[str]
    leader: Assignment | None = None
    segments: int = 1
    bytes_raw: int = 0
    open: bool = True


def assign(arrays: Sequence[ArraySpec], loads: list[int], spread: bool) -> dict[int, list[int]]:
    """Assign `arrays`, the largest first, each to the least loaded writer. Returns {writer: indexes of its arrays}.

    loads: bytes per token of the open arrays of each writer. The new arrays are added to it. spread: whether to use
    several writers; False assigns all arrays to one.
    """
    parts: dict[int, list[int]] = {}
    for i in sorted(range(len(arrays)), key=lambda i: -arrays[i].token_bytes):
        writer = loads.index(min(loads)) if spread or not parts else next(iter(parts))
        loads[writer] += arrays[i].token_bytes
        parts.setdefault(writer, []).append(i)
    return {writer: sorted(part) for writer, part in parts.items()} or {loads.index(min(loads)): []}


class WriterPool:
    """A fixed number of writer processes. A process that has died is replaced when it is next needed.

    Not thread-safe: hold the owner's lock when calling. pass_fds: file descriptors that writers keep open until they
    exit. on_message, on_death: see `Child`. loads: bytes per token of the open arrays of each writer.
    """

    def __init__(
        self,
        count: int,
        ring: RingBase,
        settings: WriteSettings,
        pass_fds: Sequence[int],
        on_message: Callable[[Child, Message], None],
        on_death: Callable[[Child, str], None],
    ) -> None:
        if count < 1:
            raise ValueError(f"writers {count} is too few: use 1 or more")
        self._ring, self._settings, self._pass_fds = ring, settings, pass_fds
        self._on_message, self._on_death = on_message, on_death
        self._layouts: dict[int, PayloadLayout] = {}
        self._unread: dict[Child, dict[int, Extent]] = {}  # by process and message number
        self._sent = self._started = self._registered = 0
        self._pace = Pace()
        self.loads = [0] * count
        self.processes = [self._spawn() for _ in range(count)]

    def _spawn(self) -> Child:
        s, ring = self._settings, self._ring
        self._started += 1
        arguments = ["--ring-fd", str(ring.fd), "--ring-bytes", str(ring.nbytes), "--pace-fd", str(self._pace.fd)]
        arguments += ["--file-mode", s.file_mode, "--nice", str(s.nice), *(["--idle"] if s.idle else [])]
        fds = [ring.fd, self._pace.fd, *self._pass_fds]
        process = Child(f"writer process {self._started}", WRITER, arguments, fds, self._on_message, self._on_death)
        self._unread[process] = {}
        for number, layout in self._layouts.items():
            process.post({"type": "layout", "number": number, "layout": layout.to_json()})
        return process

    def register(self, layout: PayloadLayout) -> int:
        """Send a layout to all writers. Returns its number, for captures."""
        self._registered += 1
        number = self._registered
        self._layouts[number] = layout
        for process in self.processes:
            process.post({"type": "layout", "number": number, "layout": layout.to_json()})
        return number

    def forget(self, number: int) -> None:
        """Make all writers forget a layout. No later open message may name it. Open captures are not affected."""
        del self._layouts[number]
        for process in self.processes:
            process.post({"type": "forget", "number": number})

    def layout(self, number: int) -> PayloadLayout:
        """A registered layout. Raises KeyError for a number that is not known."""
        return self._layouts[number]

    def alive(self, process: Child) -> bool:
        """Whether the process counts as alive, because no death was reported."""
        return process in self._unread

    def process(self, writer: int) -> Child:
        """The process of a writer (`writer` modulo the number of writers). A dead process is replaced."""
        writer %= len(self.processes)
        if not self.alive(self.processes[writer]):
            self.processes[writer] = self._spawn()
        return self.processes[writer]

    def assign_writers(self, layout: PayloadLayout) -> list[Assignment]:
        """Choose writers for the arrays of a new capture."""
        spread = layout.header_base * layout.chunk_tokens >= SPREAD_BYTES
        return [
            self._assignment([layout.arrays[i] for i in part], part, writer)
            for writer, part in assign(layout.arrays, self.loads, spread).items()
        ]

    def _assignment(self, arrays: Sequence[ArraySpec], part: list[int], writer: int) -> Assignment:
        samples = frozenset(a.name for a in arrays if a.per_sample)
        load = sum(a.token_bytes for a in arrays)
        return Assignment(self.process(writer), writer, part, load, any(not a.per_sample for a in arrays), samples)

    def next_segment(self, layout: PayloadLayout, leader: Assignment, there: Sequence[Assignment]) -> Assignment:
        """The assignment for one more segment of the token arrays of `leader`: one of `there`, or a new one.

        there: all assignments of the capture, at most one per writer. The writer with the fewest segments is chosen,
        and among these the least loaded one.
        """
        arrays = [i for i in leader.arrays if not layout.arrays[i].per_sample]
        load = sum(layout.arrays[i].token_bytes for i in arrays)
        has = {a.writer: a for a in there}
        mine = [w for w in range(len(self.loads)) if w not in has or leader in (has[w], has[w].leader)]
        free = [w for w in mine if w not in has or has[w].open]
        if load * layout.segment_tokens < SEGMENT_BYTES or not free:
            return leader
        writer = min(free, key=lambda w: (has[w].segments if w in has else 0, self.loads[w]))
        if writer in has:
            has[writer].segments += 1
            return has[writer]
        self.loads[writer] += load
        return Assignment(self.process(writer), writer, arrays, load, True, frozenset(), leader)

    def leave(self, assignment: Assignment) -> None:
        """Close an assignment that is finished or abandoned."""
        assignment.open = False
        self.loads[assignment.writer] -= assignment.load

    def send(self, process: Child, extent: Extent, message: Message) -> None:
        """Send a message about a payload. The extent is held until the writer has read it."""
        self._sent += 1
        self._ring.add_users(extent)
        self._unread[process][self._sent] = extent
        process.post({**message, "seq": self._sent, "sent": time.monotonic()})

    def read(self, process: Child, seq: int) -> None:
        """Release the extent of message `seq`, which a writer has read."""
        self._ring.release(self._unread[process].pop(seq))

    def bury(self, process: Child) -> int:
        """Release the payloads that a dead process had not read. Returns their number."""
        extents = self._unread.pop(process, {})
        for extent in extents.values():
            self._ring.release(extent)
        return len(extents)

    def set_pace(self, to_come: int | None) -> None:
        """Set the duty cycle of writers, and from the fill of the ring whether they are behind.

        to_come: bytes that open captures may still send; None: no pauses.
        """
        self._pace.behind = not self._settings.always_compress and self._ring.used >= FULL * self._ring.nbytes
        if to_come is None:
            self._pace.shares = Shares(1.0, 1.0)
            return
        room = min(self._ring.nbytes, ROOM_BYTES)
        self._pace.shares = shares_for(self._settings.least_share, self._ring.used / room, to_come / room)

    def end(self, deadline: float) -> bool:
        """End all processes after their queued messages. Kill them at `deadline` (time.monotonic()).

        Call it without the owner's lock. Returns whether all ended by themselves.
        """
        for process in self.processes:
            process.finish()
        ended = [process.join(max(_LEAST_END_S, deadline - time.monotonic())) for process in self.processes]
        self._pace.close()
        return all(ended)
