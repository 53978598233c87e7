# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed, and the expected results of a repair of their stores."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.reader import CaptureIncomplete
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write import child_process
from dmi_connector.store.write.coordinator.writer_pool import WRITER
from dmi_connector.store.write.finish import repair
from dmi_connector.store.write.finish.repair import Outcome
from dmi_connector.store.write.messages import Decoder, Message, pack, pack_array, write_all
from dmi_connector.store.write.pace import Pace
from tests import storekit as kit

CHUNK, SEGMENT, START = 16, 32, 5
Q = ArraySpec("q", "float32", (0, 1, 3), 8)
EMBED = ArraySpec("embed", "bfloat16", (), 24)
LOGITS = ArraySpec("logits", "float32", (), 33)
SPECS = (Q, EMBED)
SALVAGED = Loss(Cause.SALVAGED).words
IDS = np.random.default_rng(0).integers(1, 1000, 4096).astype("<i4")
_RING_BYTES = 1 << 20


class Writing:
    """A writer process, and methods that send it the messages of captures. pid: its process id."""

    def __init__(self) -> None:
        fd, self.pace = os.memfd_create("ring"), Pace()
        os.ftruncate(fd, _RING_BYTES)
        self.ring = np.frombuffer(mmap.mmap(fd, _RING_BYTES), np.uint8)
        command = [sys.executable, "-P", "-m", WRITER, "--ring-fd", str(fd)]
        command += ["--ring-bytes", str(_RING_BYTES), "--pace-fd", str(self.pace.fd)]
        start = child_process.subprocess.Popen  # in tests/unit, this is the replacement of forks.py
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "process_group": None}
        self._process = start(command, pass_fds=[fd, self.pace.fd], env=child_process.with_package(os.environ), **pipes)
        os.close(fd)
        self.pid, self._answers = self._process.pid, self._read()
        assert next(self._answers) == {"ready": self.pid}

    def _read(self) -> Iterator[Message]:
        decoder = Decoder()
        while data := os.read(self._process.stdout.fileno(), 1 << 16):  # type: ignore[union-attr]
            yield from decoder.feed(data)

    def send(self, type: str, **message: Any) -> None:
        write_all(self._process.stdin.fileno(), pack({"type": type, "id": 1, **message}))  # type: ignore[union-attr]

    def ask(self, type: str, **message: Any) -> Message:
        self.send(type, **message)
        answer = next(self._answers)
        assert not answer.get("error") and not answer.get("losses"), answer
        return answer

    def open(self, final: Path, specs: Sequence[ArraySpec], codec: str = "zstd", about: Message | None = None) -> None:
        """Open a capture whose chunk payloads hold these arrays in order."""
        self.send("layout", number=0, layout=PayloadLayout(tuple(specs), CHUNK, SEGMENT, codec).to_json())
        self.send("open", partial=f"{final}.partial", layout=0, arrays=list(range(len(specs))), about=about, leads=True)

    def chunk(self, specs: Sequence[ArraySpec], values: kit.Values, first: int, count: int, ids: bool = True) -> None:
        parts = [np.ascontiguousarray(kit.local(s, values[s.name])[:, first : first + count]) for s in specs]
        payload = np.concatenate([p.view("u1").ravel() for p in parts])
        self.ring[: len(payload)] = payload
        extra = {"token_ids": pack_array(IDS[first : first + count])} if ids else {}
        extra |= {"generated": False, "sent": 0.0}
        assert self.ask("chunk", seq=first, offset=0, first=first, count=count, **extra) == {"ack": first}

    def rows(self, spec: ArraySpec, values: kit.Values, first: int, count: int) -> None:
        payload = values[spec.name][first : first + count].view("u1").ravel()
        self.ring[: len(payload)] = payload
        positions = list(range(START + 20 + first, START + 20 + first + count))
        where = {"seq": 0, "offset": 0, "first": first, "positions": positions}
        self.ask("rows", name=spec.name, generated=False, sent=0.0, **where)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pace.close()


def facts(specs: Sequence[ArraySpec], rank: int = 0, ranks: int = 1) -> Message:
    attrs = {"prompt_len": START + 20, "start": START, "model": "tiny", "dtype": "float32", "num_layers": 4}
    created = f"2025-11-21T04:28:3{2 + rank}+00:00"
    about = {"request_id": "r", "key": "k", "created": created, "rank": rank, "ranks": ranks}
    return {**about, "arrays": [s.to_json() for s in specs], "attrs": attrs}


def make_values(specs: Sequence[ArraySpec], rows: int = 160, samples: int = 100) -> kit.Values:
    return {s.name: kit.random_bits(s, samples if s.per_sample else rows) for s in specs}


def write(writer: Writing, final: Path, chunks: int, codec: str = "zstd", tail: int = 0) -> kit.Values:
    """Write a capture of SPECS with `chunks` full chunks and one of `tail` rows, then kill the writer."""
    values = make_values(SPECS)
    writer.open(final, SPECS, codec, facts(SPECS))
    for n in range(chunks):
        writer.chunk(SPECS, values, n * CHUNK, CHUNK)
    if tail:
        writer.chunk(SPECS, values, chunks * CHUNK, tail)
    writer.kill()
    return values


def only(outcomes: list[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome


def notes_of(outcome: Outcome) -> list[str]:
    """The notes of an outcome, except the note of all captures that were killed before they were closed."""
    return [note for note in outcome.notes if not note.startswith("how many rows the request had is not known")]


def check(
    final: Path, values: kit.Values, length: int, missing: Sequence[Sequence[int]] = (), ids: bool = True
) -> None:
    """Check that the salvaged store is valid, lists its missing rows, and holds all other rows as they were sent."""
    assert verify_store(final) == []
    assert not final.with_name(final.name + ".partial").exists()
    with pytest.raises(CaptureIncomplete, match=SALVAGED):
        open_capture(final, timeout=0)
    capture = open_capture(final, timeout=0, allow_incomplete=True)
    assert (capture.attrs["num_tokens"], capture.missing) == (length, [list(m) for m in missing])
    rows = np.setdiff1d(np.arange(length), [i for start, stop in missing for i in range(start, stop)])
    for name in set(capture.hooks) & set(values):
        if name != "logits":
            np.testing.assert_array_equal(kit.bits(capture.array(name)[:])[:, rows], values[name][:, rows])
    np.testing.assert_array_equal(capture.token_ids[rows], IDS[rows] if ids else 0 * rows)
    np.testing.assert_array_equal(capture.positions, START + np.arange(length))
    np.testing.assert_array_equal(capture.phase, np.arange(length) >= 20)
    known = find_captures(final.parent, key="k")
    assert [(c.state, c.num_tokens, c.request_id) for c in known if c.store == final] == [("incomplete", length, "r")]
    before = {p: p.read_bytes() for p in final.parent.rglob("*") if p.is_file()}
    assert repair.repair(final.parent) == []
    assert before == {p: p.read_bytes() for p in final.parent.rglob("*") if p.is_file()}


class Killed(BaseException):
    """Ends a repair like a signal: no code catches it."""


def killed(*args: Any, **options: Any) -> None:
    raise Killed


def close(writer: Writing, final: Path, length: int, samples: int) -> tuple[kit.Values, Message]:
    values = make_values((*SPECS, LOGITS))
    writer.open(final, (*SPECS, LOGITS), "zstd", facts((*SPECS, LOGITS)))
    for first in range(0, length, CHUNK):
        writer.chunk(SPECS, values, first, min(CHUNK, length - first))
    writer.rows(LOGITS, values, 0, samples + 1)  # one row more than the request will have
    return values, writer.ask("close", length=length, samples={"logits": samples})


def engine(final: str) -> None:
    """Simulates an engine: two writers with an array each, which write chunks until the process is killed."""
    writers, values = [Writing(), Writing()], make_values(SPECS, 4096)
    for i, spec in enumerate(SPECS):
        writers[i].open(Path(final), [spec], "lz4", None if i else facts(SPECS))
    for first in range(0, 4096, CHUNK):
        for i, spec in enumerate(SPECS):
            writers[i].chunk([spec], values, first, CHUNK, ids=not i)
        os.write(1, b"%d\n" % (first + CHUNK))
    time.sleep(60)
