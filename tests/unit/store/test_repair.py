# SPDX-License-Identifier: Apache-2.0
"""Captures whose writer or engine was killed: every chunk that a writer answered must be salvaged, as it was sent."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format import schema
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.reader import CaptureIncomplete
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.array_writer import ArrayWriter
from dmi_connector.store.write.arrays.journal import read_journal
from dmi_connector.store.write.arrays.shard_writer import FileCache
from dmi_connector.store.write.finish import commit, repair, salvage
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


class Writing:
    """A real writer process, and the messages that make it write captures."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, 1 << 20)
        self.ring = np.frombuffer(mmap.mmap(self.fd, 1 << 20), np.uint8)
        self.pace = Pace()
        command = [sys.executable, "-m", "dmi_connector.store.write.writer", "--ring-fd", str(self.fd)]
        command += ["--ring-bytes", str(1 << 20), "--pace-fd", str(self.pace.fd)]
        fds = [self.fd, self.pace.fd]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, bufsize=0, pass_fds=fds)
        self._answers = self._read()
        assert next(self._answers) == {"ready": self.process.pid}

    def _read(self) -> Iterator[Message]:
        decoder = Decoder()
        while data := os.read(self.process.stdout.fileno(), 1 << 16):  # type: ignore[union-attr]
            yield from decoder.feed(data)

    def send(self, type: str, **message: Any) -> None:
        write_all(self.process.stdin.fileno(), pack({"type": type, "id": 1, **message}))  # type: ignore[union-attr]

    def ask(self, type: str, **message: Any) -> Message:
        self.send(type, **message)
        answer = next(self._answers)
        assert not answer.get("error") and not answer.get("losses"), answer
        return answer

    def open(self, final: Path, specs: Sequence[ArraySpec], codec: str = "zstd", about: Message | None = None) -> None:
        """Begin a capture whose chunk payloads hold these arrays one after another."""
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
        self.process.kill()
        self.process.communicate()
        self.pace.close()


@pytest.fixture
def writer() -> Iterator[Writing]:
    writing = Writing()
    yield writing
    writing.kill()


def facts(specs: Sequence[ArraySpec], rank: int = 0, ranks: int = 1) -> Message:
    attrs = {"prompt_len": START + 20, "start": START, "model": "tiny", "dtype": "float32", "num_layers": 4}
    created = f"2025-11-21T04:28:3{2 + rank}+00:00"
    about = {"request_id": "r", "key": "k", "created": created, "rank": rank, "ranks": ranks}
    return {**about, "arrays": [s.to_json() for s in specs], "attrs": attrs}


def make_values(specs: Sequence[ArraySpec], rows: int = 160, samples: int = 100) -> kit.Values:
    return {s.name: kit.random_bits(s, samples if s.per_sample else rows) for s in specs}


def write(writer: Writing, final: Path, chunks: int, codec: str = "zstd", tail: int = 0) -> kit.Values:
    """A capture of SPECS with some chunks, the last one of `tail` rows, whose writer is then killed."""
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
    """Its notes, but for the one that all captures get that were killed before they were closed."""
    return [note for note in outcome.notes if not note.startswith("how many rows the request had is not known")]


def check(
    final: Path, values: kit.Values, length: int, missing: Sequence[Sequence[int]] = (), ids: bool = True
) -> None:
    """The salvaged store is sound, says what is missing, and holds the rest as it was sent."""
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


# ---- killed writers -------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize(("chunks", "tail"), [(1, 0), (2, 0), (3, 0), (8, 0), (0, 7), (1, 7), (5, 1)])
def test_every_chunk_of_a_killed_writer_is_salvaged(
    writer: Writing, tmp_path: Path, codec: str, chunks: int, tail: int
) -> None:
    """It is killed within a segment, at its end or in a later one, after whole chunks or after a shorter last one."""
    values = write(writer, tmp_path / "a.zarr", chunks, codec, tail)
    outcome = only(repair.repair(tmp_path))
    length = chunks * CHUNK + tail
    assert (outcome.state, outcome.num_tokens, outcome.hooks) == ("salvaged", length, ["q", "embed"])
    unknown = Loss.of(Cause.LENGTH_UNKNOWN, length=length).words
    assert (outcome.missing, outcome.notes) == ([], [unknown])
    assert unknown in str(find_captures(tmp_path)[0].reason)
    check(tmp_path / "a.zarr", values, length)


def test_a_partial_store_without_rows_is_empty_and_can_be_removed(writer: Writing, tmp_path: Path) -> None:
    final = tmp_path / "a.zarr"
    commit.append_index(str(tmp_path), {"event": "start", "store": "a.zarr", "state": "started", "created": ""})
    writer.open(final, SPECS, "zstd", facts(SPECS))
    kit.until(lambda: list(tmp_path.glob("a.zarr.partial/.journal-0-q")))
    writer.kill()
    assert only(repair.repair(tmp_path)).state == "empty" and (tmp_path / "a.zarr.partial").exists()
    outcome = only(repair.repair(tmp_path / "a.zarr.partial", remove_empty=True))
    assert outcome.state == "removed" and outcome.store is None
    assert [p.name for p in tmp_path.iterdir()] == ["index.jsonl"] and find_captures(tmp_path) == []


def test_a_capture_without_recorded_facts_cannot_be_salvaged(writer: Writing, tmp_path: Path) -> None:
    writer.open(tmp_path / "a.zarr", SPECS)
    writer.chunk(SPECS, make_values(SPECS), 0, CHUNK)
    writer.kill()
    outcome = only(repair.repair(tmp_path))
    assert (outcome.state, outcome.notes) == ("empty", ["what it captures is not recorded"])


def test_rows_without_token_ids_are_salvaged_with_ids_of_0(writer: Writing, tmp_path: Path) -> None:
    values = make_values(SPECS)
    writer.open(tmp_path / "a.zarr", SPECS, "zstd", facts(SPECS))
    writer.chunk(SPECS, values, 0, CHUNK, ids=False)
    writer.kill()
    assert notes_of(only(repair.repair(tmp_path))) == ["token ids are not known for all rows: those are 0"]
    check(tmp_path / "a.zarr", values, CHUNK, ids=False)


def engine(final: str) -> None:
    """Stands for an engine: two writers with an array each, chunk after chunk until it is killed."""
    writers, values = [Writing(), Writing()], make_values(SPECS, 4096)
    for i, spec in enumerate(SPECS):
        writers[i].open(Path(final), [spec], "lz4", None if i else facts(SPECS))
    for first in range(0, 4096, CHUNK):
        for i, spec in enumerate(SPECS):
            writers[i].chunk([spec], values, first, CHUNK, ids=not i)
        os.write(1, b"%d\n" % (first + CHUNK))
    time.sleep(60)


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011, 0.02, 0.05])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_every_chunk_a_writer_answered_survives_the_death_of_the_engine(
    tmp_path: Path, delay: float, all_of_them: bool
) -> None:
    """All processes are killed, or the engine alone: then its writers find the end of their input."""
    final, root = tmp_path / "a.zarr", Path(__file__).resolve().parents[3]
    script = "import sys; from tests.unit.store.test_repair import engine; engine(sys.argv[1])"
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", script, str(final)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, start_new_session=True) as process:
        assert process.stdout is not None
        answered = int(process.stdout.readline())
        time.sleep(delay)
        if all_of_them:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        answered = int((process.stdout.read().split() or [answered])[-1])  # ends with the last process of the group
    outcome = only(repair.repair(tmp_path))
    while outcome.state == "written":  # killed, but not gone yet
        outcome = only(repair.repair(tmp_path))
    # One writer may be a chunk ahead of the other.
    missing = outcome.missing
    assert answered <= outcome.num_tokens - CHUNK * len(missing) and len(missing) <= 1, outcome
    assert all(outcome.num_tokens - start == CHUNK for start, _ in missing)
    check(final, make_values(SPECS, 4096), outcome.num_tokens, missing)


@pytest.mark.parametrize("part_layers", [0, 1])
def test_rows_that_only_one_rank_wrote_are_missing_after_a_repair(tmp_path: Path, part_layers: int) -> None:
    """Only rows of shared hooks need both ranks: hooks that rank 0 alone holds stay whole."""
    wide = ArraySpec("z", "bfloat16", (0, 2), 20, shards=2, part_layers=part_layers)
    values, ranks = make_values([wide, EMBED]), [Writing(), Writing()]
    for rank, writing in enumerate(ranks):
        specs = [replace(wide, rank=rank)] + [EMBED] * (rank == 0)
        writing.open(tmp_path / "a.zarr", specs, "none", facts(specs, rank, 2))
        for n in range(3 if rank else 6):
            writing.chunk(specs, values, n * CHUNK, CHUNK)
        if rank:
            writing.kill()
            assert only(repair.repair(tmp_path)).state == "written", "rank 0 lives"
    ranks[0].kill()
    outcome = only(repair.repair(tmp_path))
    assert (outcome.state, outcome.missing) == ("salvaged", [[48, 96]])
    check(tmp_path / "a.zarr", values, 96, [[48, 96]])
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert capture.attrs["tp"] == 2
    np.testing.assert_array_equal(kit.bits(capture.array("embed")[:]), values["embed"][:, :96])


@pytest.mark.parametrize("part_layers", [0, 1])
def test_shared_hooks_are_left_out_if_a_rank_wrote_nothing(tmp_path: Path, writer: Writing, part_layers: int) -> None:
    wide = ArraySpec("z", "bfloat16", (0, 2), 20, shards=2, part_layers=part_layers)
    values = make_values([wide, EMBED])
    writer.open(tmp_path / "a.zarr", [wide, EMBED], "zstd", facts([wide, EMBED], 0, 2))
    writer.chunk([wide, EMBED], values, 0, CHUNK)
    writer.kill()
    outcome = only(repair.repair(tmp_path))
    assert (outcome.hooks, notes_of(outcome)) == (["embed"], ["hooks without rows: z"])
    check(tmp_path / "a.zarr", values, CHUNK)


@pytest.mark.parametrize("other", [False, True])
def test_hooks_that_another_rank_writes_whole_are_salvaged_or_named(tmp_path: Path, other: bool) -> None:
    """Rank 0 knows of them. other: whether rank 1 has begun."""
    wide = ArraySpec("z", "bfloat16", (0, 2), 20)
    values, ranks = make_values([wide, EMBED]), [Writing(), Writing()]
    ranks[0].open(tmp_path / "a.zarr", [wide], "none", facts([wide, EMBED], 0, 2))
    ranks[0].chunk([wide], values, 0, CHUNK)
    if other:
        ranks[1].open(tmp_path / "a.zarr", [EMBED], "none", facts([EMBED], 1, 2))
        ranks[1].chunk([EMBED], values, 0, CHUNK)
    for writing in ranks:
        writing.kill()
    outcome = only(repair.repair(tmp_path))
    assert sorted(outcome.hooks) == (["embed", "z"] if other else ["z"])
    assert notes_of(outcome) == ([] if other else ["hooks without rows: embed"])
    check(tmp_path / "a.zarr", values, CHUNK)
    assert read_attrs(tmp_path / "a.zarr")["created"].endswith(":32+00:00"), "as rank 0 has told the index"


def test_the_facts_of_a_rank_without_arrays_are_salvaged(tmp_path: Path) -> None:
    """Rank 0 writes nothing of a request, but the index has the time at which it began there."""
    values, ranks = make_values([EMBED]), [Writing(), Writing()]
    ranks[0].open(tmp_path / "a.zarr", [], "none", facts([EMBED], 0, 2))
    ranks[1].open(tmp_path / "a.zarr", [EMBED], "none", facts([EMBED], 1, 2))
    ranks[1].chunk([EMBED], values, 0, CHUNK)
    kit.until((tmp_path / "a.zarr.partial" / ".journal-rank0").exists)
    for writing in ranks:
        writing.kill()
    assert only(repair.repair(tmp_path)).hooks == ["embed"]
    check(tmp_path / "a.zarr", values, CHUNK)
    assert read_attrs(tmp_path / "a.zarr")["created"].endswith(":32+00:00"), "as rank 0 has told the index"


# ---- samples and closed captures -------------------------------------------


def test_all_rows_of_logits_but_a_damaged_one_are_salvaged(writer: Writing, tmp_path: Path) -> None:
    """There are more samples than one shard holds, and only one chunk of token rows."""
    values = make_values((*SPECS, LOGITS))
    writer.open(tmp_path / "a.zarr", (*SPECS, LOGITS), "zstd", facts((*SPECS, LOGITS)))
    writer.chunk(SPECS, values, 0, CHUNK)
    for first in range(70):
        writer.rows(LOGITS, values, first, 1)
    writer.rows(LOGITS, values, 70, 5)
    writer.kill()
    shard = tmp_path / "a.zarr.partial/logits/c/0/0"
    data = bytearray(shard.read_bytes())
    place = read_journal(tmp_path / "a.zarr.partial/.journal-0-q").arrays[2].places[7][0]
    data[int(place[0])] ^= 4
    shard.write_bytes(data)
    outcome = only(repair.repair(tmp_path))
    assert "logits: 1 of 75 samples are lost, their position is -1" in outcome.notes
    check(tmp_path / "a.zarr", values, CHUNK)
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    kept = np.setdiff1d(np.arange(75), [7])
    np.testing.assert_array_equal(kit.bits(capture.array("logits")[:])[kept], values["logits"][:75][kept])
    np.testing.assert_array_equal(
        capture.logits_positions, np.where(np.arange(75) == 7, -1, START + 20 + np.arange(75))
    )


def test_samples_are_salvaged_where_no_chunk_was_written(writer: Writing, tmp_path: Path) -> None:
    values = make_values((*SPECS, LOGITS))
    writer.open(tmp_path / "a.zarr", (*SPECS, LOGITS), "zstd", facts((*SPECS, LOGITS)))
    writer.rows(LOGITS, values, 0, 2)
    writer.kill()
    assert only(repair.repair(tmp_path)).hooks == ["logits"]
    check(tmp_path / "a.zarr", values, 0)


def close(writer: Writing, final: Path, length: int, samples: int) -> tuple[kit.Values, Message]:
    values = make_values((*SPECS, LOGITS))
    writer.open(final, (*SPECS, LOGITS), "zstd", facts((*SPECS, LOGITS)))
    for first in range(0, length, CHUNK):
        writer.chunk(SPECS, values, first, min(CHUNK, length - first))
    writer.rows(LOGITS, values, 0, samples + 1)  # one more than the request turns out to have
    return values, writer.ask("close", length=length, samples={"logits": samples})


@pytest.mark.parametrize("length", [7, 70])
def test_all_rows_are_salvaged_if_the_writer_dies_before_the_commit(
    writer: Writing, tmp_path: Path, length: int
) -> None:
    """The capture was closed, so its true length is known, and the indexes of its shards are cut to it."""
    values, _ = close(writer, tmp_path / "a.zarr", length, 3)
    writer.kill()
    assert only(repair.repair(tmp_path)).notes == []
    check(tmp_path / "a.zarr", values, length)
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(capture.array("logits")[:]), values["logits"][:3])


def test_a_store_that_lacks_only_its_name_is_published(
    writer: Writing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that has its root document is whole."""
    final = tmp_path / "a.zarr"
    values, closed = close(writer, final, 70, 3)
    writer.kill()
    length = np.arange(70)
    arrays = {"token_ids": IDS[:70], "positions": (START + length).astype("<i4"), "phase": (length >= 20).astype("u1")}
    hooks = {s.name: {"array": s.name, "layers": [*s.layers], "width": s.width, "dtype": s.dtype, "shards": 1}
             for s in (*SPECS, LOGITS)}  # fmt: skip
    about = facts(SPECS)
    attrs = {**about["attrs"], **{k: about[k] for k in ("request_id", "key", "created")}, "hooks": hooks, "tp": 1}
    attrs |= {
        "format_version": schema.FORMAT_VERSION,
        "num_tokens": 70,
        "chunk_tokens": 16,
        "segment_tokens": 32,
        "codec": "zstd",
    }
    message = {"partial": f"{final}.partial", "final": str(final), "files": closed["files"], "attrs": attrs, "ranks": 1}
    message |= {"arrays": {k: pack_array(a) for k, a in arrays.items()}, "losses": []}
    message |= {"bytes_raw": 1, "rank_timeout": 0}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "remove_notes", killed)
        with pytest.raises(Killed):
            commit.Commit.start({**message, "fsync": False}).run()
    assert only(repair.repair(tmp_path)).state == "published"
    assert verify_store(final) == [] and open_capture(final, timeout=0).complete
    np.testing.assert_array_equal(kit.bits(open_capture(final).array("q")[:]), values["q"][:, :70])
    assert [(c.state, c.num_tokens) for c in find_captures(tmp_path, key="k")] == [("complete", 70)]


# ---- damage -------------------------------------------


def test_a_torn_journal_keeps_the_chunks_before_the_tear(writer: Writing, tmp_path: Path) -> None:
    """It is cut at every byte of the last record."""
    values = write(writer, tmp_path / "from/a.zarr", 3)
    partial = tmp_path / "from/a.zarr.partial"
    name = next(partial.glob(".journal-*")).name
    data = (partial / name).read_bytes()
    last = len(read_journal(partial / name).token_ids[32].tobytes()) + 4 * 16 + 13 + 8  # ids, 4 places, head, frame
    for cut in [*range(1, last + 1), last + 5]:
        to = tmp_path / f"{cut}"
        shutil.copytree(partial, to / "a.zarr.partial")
        os.truncate(to / "a.zarr.partial" / name, len(data) - cut)
        outcome = only(repair.repair(to))
        kept = 2 if cut <= last else 1
        assert (outcome.num_tokens, len(notes_of(outcome))) == (kept * CHUNK, cut != last), cut
        check(to / "a.zarr", values, kept * CHUNK)
    tail = b"\0" * 100  # what a file system may leave of a write it had not finished
    (partial / name).write_bytes(data + tail)
    outcome = only(repair.repair(tmp_path / "from"))
    assert (outcome.num_tokens, notes_of(outcome)) == (48, ["a journal ends in 100 bytes of a torn record"])


def test_a_flipped_bit_in_a_journal_costs_only_the_chunks_after_it(writer: Writing, tmp_path: Path) -> None:
    """Without the header of its journal nothing is salvaged."""
    values = write(writer, tmp_path / "from/a.zarr", 3)
    partial = tmp_path / "from/a.zarr.partial"
    name = next(partial.glob(".journal-*")).name
    data = (partial / name).read_bytes()
    for at, rows in ((len(data) - 1, 32), (len(data) // 5 * 4, 16), (100, 0), (0, 0)):
        to = tmp_path / str(at)
        shutil.copytree(partial, to / "a.zarr.partial")
        damaged = bytearray(data)
        damaged[at] ^= 1
        (to / "a.zarr.partial" / name).write_bytes(damaged)
        outcome = only(repair.repair(to))
        assert (outcome.num_tokens, outcome.state) == (rows, "salvaged" if rows else "empty"), at
        if rows:
            check(to / "a.zarr", values, rows)


@pytest.mark.parametrize("left", [0, 1, 500, -1])
def test_a_torn_shard_costs_only_the_chunks_that_are_cut(writer: Writing, tmp_path: Path, left: int) -> None:
    values = write(writer, tmp_path / "a.zarr", 5, "none")
    shard = tmp_path / "a.zarr.partial/q/c/0/1/0"
    with open(shard, "r+b") as f:
        f.truncate(left if left >= 0 else shard.stat().st_size // 2 + left)  # the index takes 100 bytes
    outcome = only(repair.repair(tmp_path))
    damaged = [32, 64] if left >= 0 else [48, 64]
    assert outcome.missing == [damaged] and "q: " in outcome.notes[0] and "are left out" in outcome.notes[0]
    check(tmp_path / "a.zarr", values, 80, [damaged])


def test_a_hook_whose_shards_are_missing_is_left_out(writer: Writing, tmp_path: Path) -> None:
    values = write(writer, tmp_path / "a.zarr", 5)
    for name in ("q/c/0/0/0", "q/c/0/1/0", "q/c/0/2/0"):
        (tmp_path / "a.zarr.partial" / name).unlink()
    outcome = only(repair.repair(tmp_path))
    assert (outcome.hooks, outcome.missing) == (["embed"], []) and "hooks without rows: q" in outcome.notes
    check(tmp_path / "a.zarr", values, 80)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_flipped_bit_costs_only_its_own_chunk(writer: Writing, tmp_path: Path, codec: str) -> None:
    values = write(writer, tmp_path / "a.zarr", 5, codec)
    partial = tmp_path / "a.zarr.partial"
    place = read_journal(partial / ".journal-0-q").arrays[0].places[48][1]
    shard = partial / "q/c/0/1/0"
    data = bytearray(shard.read_bytes())
    data[int(place[0]) + 9] ^= 8
    shard.write_bytes(data)
    outcome = only(repair.repair(tmp_path))
    damage = "the chunk does not match its crc32c (q/c/0/1/0, layer 1 rows 48 to 63)"
    assert notes_of(outcome) == [f"q: 1 damaged chunks are left out, the first: {damage}"]
    check(tmp_path / "a.zarr", values, 80, [[48, 64]])
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(capture.numpy("q", layer=3)), values["q"][2, :80])  # only layer 1 is lost


def test_rows_that_writers_disagree_about_are_missing(tmp_path: Path) -> None:
    """One writer has a short last chunk, the other has rows after it: padding must not count as rows."""
    values, partial = make_values(SPECS), tmp_path / "a.zarr.partial"
    for spec, rows in ((Q, 20), (EMBED, 32)):
        layout = PayloadLayout((spec,), CHUNK, SEGMENT, "none")
        arrays = ArrayWriter(str(partial), layout, [0], FileCache(10), facts(SPECS))
        for first in (0, 16):
            chunk = np.ascontiguousarray(values[spec.name][:, first : min(rows, first + CHUNK)])
            arrays.chunk(chunk.view("u1").ravel(), first, chunk.shape[1], IDS[first : first + chunk.shape[1]].tobytes())
        arrays.release()
    assert only(repair.repair(tmp_path)).missing == [[16, 32]]
    check(tmp_path / "a.zarr", values, 32, [[16, 32]])


def test_a_journal_that_cannot_be_written_costs_no_chunk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that nothing could be salvaged."""
    (tmp_path / ".journal-0-q").mkdir()
    arrays = ArrayWriter(str(tmp_path), PayloadLayout((Q,), CHUNK, SEGMENT, "none"), [0], FileCache(10))
    for first in (0, 16):
        arrays.chunk(np.zeros(Q.token_bytes * CHUNK, "u1"), first, CHUNK, IDS[:CHUNK].tobytes())
    assert sorted(arrays.close(32, {})) == ["q/c/0/0/0", "q/zarr.json"] and not arrays.losses
    assert len(caplog.records) == 1 and "cannot be salvaged" in caplog.text
    with pytest.raises(ValueError, match="3 bytes of token ids came with 16 rows"):
        arrays.chunk(np.zeros(Q.token_bytes * CHUNK, "u1"), 32, CHUNK, b"abc")


# ---- what must be left alone -------------------------------------------


def test_a_repair_does_not_touch_a_capture_that_is_being_written(writer: Writing, tmp_path: Path) -> None:
    """It is being written until its directory is renamed, also after its arrays are closed."""
    values = make_values(SPECS)
    writer.open(tmp_path / "a.zarr", SPECS, "zstd", facts(SPECS))
    for first in (0, 16):
        writer.chunk(SPECS, values, first, CHUNK)
        assert only(repair.repair(tmp_path, remove_empty=True)).state == "written"
    writer.ask("close", length=32, samples={})
    time.sleep(1.2)  # longer than the writer waits for messages between looks at what it holds
    assert only(repair.repair(tmp_path)).state == "written"
    writer.kill()
    assert only(repair.repair(tmp_path)).state == "salvaged"
    check(tmp_path / "a.zarr", values, 32)


def test_a_writer_closes_all_files_of_a_capture_that_has_ended(writer: Writing, tmp_path: Path) -> None:
    """A capture ends with its final name, or with an abort."""

    def held() -> list[str]:
        links = []
        for path in Path(f"/proc/{writer.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was just closed
                links.append(os.readlink(path))
        return [link for link in links if link.startswith(str(tmp_path))]

    for name, end in (("a", "rename"), ("b", "abort")):
        writer.open(tmp_path / f"{name}.zarr", SPECS, "zstd", facts(SPECS))
        writer.chunk(SPECS, make_values(SPECS), 0, CHUNK)
        assert len(held()) == 4, "the directory, its journal and two shards"
        if end == "rename":
            writer.ask("close", length=CHUNK, samples={})
            (tmp_path / "a.zarr.partial").rename(tmp_path / "a.zarr")
        else:
            writer.ask("drop")
            writer.ask("remove", partial=str(tmp_path / "b.zarr.partial"))
        kit.until(lambda: not held())


def test_a_repair_refuses_a_name_that_is_taken(writer: Writing, tmp_path: Path) -> None:
    write(writer, tmp_path / "a.zarr", 2)
    (tmp_path / "a.zarr").mkdir()
    outcome = only(repair.repair(tmp_path, remove_empty=True))
    assert outcome.state == "refused" and "exists already" in outcome.notes[0]
    assert (tmp_path / "a.zarr.partial/q").exists() and not list((tmp_path / "a.zarr").iterdir())


class Killed(BaseException):
    """Ends a repair the way a signal would: nothing catches it."""


def killed(*args: Any, **options: Any) -> None:
    raise Killed


STEPS = [(salvage, "_seal"), (salvage, "write_file"), (commit, "plain_array"), (commit, "sweep"),
         (commit, "publish"), (commit, "remove_notes"), (commit.os, "rename")]  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "name"), STEPS)
def test_a_repair_that_is_killed_can_be_run_again(
    writer: Writing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: bool
) -> None:
    values = write(writer, tmp_path / "a.zarr", 3)
    step: Callable[..., Any] = getattr(module, name)

    def run_and_die(*args: Any) -> None:
        step(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, run_and_die if after else killed)
        with pytest.raises(Killed):
            repair.repair(tmp_path)
    renamed = after and name in ("publish", "rename")
    outcomes = repair.repair(tmp_path)
    assert [o.state for o in outcomes] in ([["salvaged"], ["published"]] if not renamed else [[]])
    if renamed:  # all but the line of the index
        assert verify_store(tmp_path / "a.zarr") == []
    else:
        check(tmp_path / "a.zarr", values, 48)


def test_a_repair_of_many_stores_goes_on_after_a_failure(tmp_path: Path) -> None:
    """One cannot be repaired, the others are. What is no partial store is not touched."""
    values = {}
    for name in ("a", "b"):
        values[name] = write(Writing(), tmp_path / f"{name}.zarr", 2)
    (tmp_path / "c.zarr.partial").write_text("not a directory")
    (tmp_path / "d.txt.partial").mkdir()
    outcomes = repair.repair(tmp_path)
    assert [(Path(o.partial).name[0], o.state) for o in outcomes] == [
        ("a", "salvaged"),
        ("b", "salvaged"),
        ("c", "failed"),
    ]
    assert "NotADirectoryError" in outcomes[2].notes[0] and (tmp_path / "d.txt.partial").is_dir()
    assert all(verify_store(tmp_path / f"{name}.zarr") == [] for name in values)


def test_a_whole_store_damaged_since_is_neither_published_nor_removed(
    writer: Writing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journals are removed already."""
    write(writer, tmp_path / "a.zarr", 3)
    with monkeypatch.context() as patch:
        patch.setattr(commit.os, "rename", killed)
        with pytest.raises(Killed):
            repair.repair(tmp_path)
    (tmp_path / "a.zarr.partial/token_ids/c/0").write_bytes(b"")
    outcome = only(repair.repair(tmp_path, remove_empty=True))
    assert outcome.state == "failed" and "token_ids/c/0 is not what" in outcome.notes[0]
    assert (tmp_path / "a.zarr.partial/q/zarr.json").exists()


# ---- the command -------------------------------------------


def test_dmi_repair_prints_outcomes_and_exits_with_1_if_something_is_left(
    writer: Writing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(writer, tmp_path / "a.zarr", 3)
    (tmp_path / "b.zarr.partial").mkdir()
    assert main(["repair", str(tmp_path), "--json"]) == 1
    a, b = json.loads(capsys.readouterr().out)
    assert (a["state"], a["store"], a["num_tokens"]) == ("salvaged", str(tmp_path / "a.zarr"), 48)
    assert (b["state"], b["notes"]) == ("empty", ["what it captures is not recorded"])
    assert main(["repair", str(tmp_path / "b.zarr.partial"), "--remove-empty"]) == 0
    assert "b.zarr.partial: removed" in capsys.readouterr().out
    assert main(["repair", str(tmp_path)]) == 0 and "no partial stores" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 0 and main(["info", str(tmp_path / "a.zarr")]) == 0
    assert SALVAGED in capsys.readouterr().out
    assert main(["repair", str(tmp_path / "a.zarr")]) == 2 and "finished store" in capsys.readouterr().err


def test_dmi_repair_prints_a_line_for_each_store_and_each_damage(
    writer: Writing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(writer, tmp_path / "a.zarr", 3)
    os.truncate(tmp_path / "a.zarr.partial/embed/c/0/1/0", 3)
    assert main(["repair", str(tmp_path)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'a.zarr'}: salvaged, 32 of 48 rows of q, embed"
    assert second.startswith("  embed: 1 damaged chunks are left out, the first: the chunk at byte 0 with ")
    assert third == "  how many rows the request had is not known: rows from 48 on may be lost"
