# SPDX-License-Identifier: Apache-2.0
"""Repairs of damaged data: torn and changed journals and shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import PayloadLayout
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.journal import CHUNK_HEAD, FRAME, ROWS_HEAD, JournalContent, read_journal
from dmi_connector.store.write.arrays.array_writer import ArrayWriter
from dmi_connector.store.write.arrays.shard_writer import FileCache
from dmi_connector.store.write.finish import repair
from tests import storekit as kit
from tests.repairkit import (
    CHUNK,
    EMBED,
    IDS,
    LOGITS,
    SEGMENT,
    SPECS,
    START,
    Q,
    Writing,
    check,
    facts,
    make_values,
    notes_of,
    only,
    write,
)

# ---- journals -------------------------------------------

ALL = (*SPECS, LOGITS)


class Record(NamedTuple):
    """One record of a journal: its kind, its start and end in the file, and the starts of its fields."""

    kind: str
    start: int
    stop: int
    edges: list[int]


def records(data: bytes) -> list[Record]:
    """The records of a journal of ALL, in the format of docs/FORMAT.md (section 10)."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        kind, body, stop = chr(data[at + 8]), at + 8, at + 8 + size
        edges = [at, at + 4, body]
        if kind == "C":
            edges += [body + 1, body + 9, *range(body + 13, body + 13 + 16 * 4, 8), body + 13 + 16 * 4, stop - 4]
        elif kind == "R":
            count = int.from_bytes(data[body + 13 : body + 17], "little")
            edges += [body + 1, body + 5, body + 13, *range(body + 17, body + 17 + 4 * count, 4)]
            edges += [*range(body + 17 + 4 * count, stop, 8)]
        else:  # JSON
            edges += [body + 1, body + 2, body + size // 2, stop - 1]
        found.append(Record(kind, at, stop, edges))
        at = stop
    assert at == len(data)
    return found


class Journal(NamedTuple):
    """A journal with records of each kind, the values of its capture, and the partial store that contains it."""

    values: kit.Values
    partial: Path
    name: str
    data: bytes

    def damaged(self, data: bytes, to: Path) -> Path:
        """Copy the partial store, with `data` as its journal. Returns the directory."""
        shutil.copytree(self.partial, to / "a.zarr.partial")
        (to / "a.zarr.partial" / self.name).write_bytes(data)
        return to


@pytest.mark.parametrize("again", [3, 63])
def test_samples_of_dropped_steps_are_not_salvaged(again: int, tmp_path: Path) -> None:
    """The engine dropped its last four steps, and sampled one of them again. 64 samples fill a shard."""
    writer, values, newer = Writing(), make_values(ALL), make_values(ALL)
    newer["logits"] = newer["logits"][::-1].copy()
    writer.open(tmp_path / "a.zarr", ALL, "zstd", facts(ALL))
    writer.chunk(SPECS, values, 0, CHUNK)
    writer.rows(LOGITS, values, 0, again + 4)
    writer.rows(LOGITS, newer, again, 1)
    writer.kill()
    assert notes_of(only(repair.repair(tmp_path))) == []
    with open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True) as capture:
        assert capture.logits_positions.tolist() == [START + 20 + i for i in range(again + 1)]
        found = kit.bits(capture.array("logits")[:])
    np.testing.assert_array_equal(found[:-1], values["logits"][:again])
    np.testing.assert_array_equal(found[-1], newer["logits"][again])


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """A journal of two chunks, two samples, a last chunk of 8 rows, one more sample, and an end that does not count
    this sample.
    """
    writer, values, root = Writing(), make_values(ALL), tmp_path_factory.mktemp("journal")
    writer.open(root / "a.zarr", ALL, "zstd", facts(ALL))
    writer.chunk(SPECS, values, 0, CHUNK)
    writer.chunk(SPECS, values, CHUNK, CHUNK)
    writer.rows(LOGITS, values, 0, 2)
    writer.chunk(SPECS, values, 2 * CHUNK, 8)
    writer.rows(LOGITS, values, 2, 1)
    writer.ask("close", length=40, samples={"logits": 2})
    writer.kill()
    [path] = (root / "a.zarr.partial").glob(".journal-*")
    found = Journal(values, root / "a.zarr.partial", path.name, path.read_bytes())
    assert [record.kind for record in records(found.data)] == ["H", "C", "C", "R", "C", "R", "E"]
    return found


ROWS, SAMPLES = [0, 0, 16, 32, 32, 40, 40, 40], [0, 0, 0, 0, 2, 2, 3, 2]
"""Numbers of token rows and of samples after the first 0 to 7 records of `journal`."""


def expect(journal: Journal, directory: Path, whole: int, torn: int) -> None:
    """Check that a repair makes a store from the first `whole` records. torn: number of bytes after them."""
    outcome = only(repair.repair(directory))
    if whole < 2:
        assert outcome.state == "empty"
        return
    notes = ([Loss.of(Cause.JOURNAL_TORN, nbytes=torn).words] if torn else []) + (
        [Loss.of(Cause.HOOKS_WITHOUT_ROWS, hooks="logits").words] if whole < 4 else []
    )
    assert (outcome.state, outcome.num_tokens, notes_of(outcome)) == ("salvaged", ROWS[whole], notes)
    assert (len(outcome.notes) == len(notes)) == (whole == 7), (
        "without an end record, a note must say that the number of rows is unknown"
    )
    check(directory / "a.zarr", journal.values, ROWS[whole])
    if whole >= 4:
        capture = open_capture(directory / "a.zarr", timeout=0, allow_incomplete=True)
        logits = journal.values["logits"][: SAMPLES[whole]]
        np.testing.assert_array_equal(kit.bits(capture.array("logits")[:]), logits)
        assert capture.logits_positions.tolist() == [START + 20 + i for i in range(SAMPLES[whole])]


def cut(journal: Journal, at: int, directory: Path) -> None:
    """Cut the journal at a byte, repair, and check the store."""
    before = [record for record in records(journal.data) if record.stop <= at]
    expect(journal, journal.damaged(journal.data[:at], directory), len(before), at - before[-1].stop if before else at)


@pytest.mark.parametrize("number", range(7))
def test_a_torn_journal_keeps_what_lies_before_the_tear(journal: Journal, tmp_path: Path, number: int) -> None:
    """It is cut at the edge of each field of each record."""
    for at in records(journal.data)[number].edges:
        cut(journal, at, tmp_path / f"{at}")


@pytest.mark.soak
def test_a_torn_journal_keeps_what_lies_before_any_tear(journal: Journal, tmp_path: Path) -> None:
    """It is cut at every byte."""
    for at in range(len(journal.data)):
        cut(journal, at, tmp_path / f"{at}")
        shutil.rmtree(tmp_path / f"{at}")


def known(content: JournalContent) -> tuple[int, int, int | None, int]:
    """(token rows, samples, length, torn bytes) of a journal."""
    q, embed, logits = content.arrays
    assert q.counts == embed.counts and set(q.counts) == set(content.token_ids) == set(q.places)
    assert logits.counts.keys() == logits.positions.keys() == logits.places.keys()
    return sum(q.counts.values()), len(logits.counts), content.length, content.torn


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_a_journal_is_read_up_to_any_damage(journal: Journal, tmp_path: Path, damage: str) -> None:
    """It is cut at every byte, or one bit of every byte is flipped."""
    data, path, whole = journal.data, tmp_path / "journal", records(journal.data)
    for at in range(len(data)):
        changed = data[:at] + (bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] if damage == "bit" else b"")
        path.write_bytes(changed)
        before = [record for record in whole if record.stop <= at]
        if not before:
            with pytest.raises(ValueError, match="no sound header"):
                read_journal(path)
            continue
        samples = max(SAMPLES[: len(before) + 1])  # samples after the end record are excluded by its `samples`
        told = known(read_journal(path))
        assert told == (ROWS[len(before)], samples, None, len(changed) - before[-1].stop), at
    path.write_bytes(data)
    assert known(read_journal(path)) == (40, 3, 40, 0) and read_journal(path).samples == {"logits": 2}


HEADER = (
    b"H"
    + json.dumps(
        {"arrays": [Q.to_json()], "chunk_tokens": 16, "segment_tokens": 32, "codec": "none", "about": None}
    ).encode()
)
FORGED = {
    "header of text": [b'H{"arrays": 5}'],
    "unknown field": [HEADER[:-1] + b', "more": 1}'],
    "chunks of no rows": [HEADER.replace(b'"chunk_tokens": 16', b'"chunk_tokens": 0')],
    "short chunk": [HEADER, b"C"],
    "chunk without rows": [HEADER, CHUNK_HEAD.pack(b"C", 0, 0) + bytes(100)],
    "short samples": [HEADER, b"R"],
    "samples of no array": [HEADER, ROWS_HEAD.pack(b"R", 7, 0, 0)],
    "end without a length": [HEADER, b"E{}"],
}


@pytest.mark.parametrize("kind", FORGED)
def test_records_of_another_format_are_a_value_error(kind: str, tmp_path: Path) -> None:
    """Their checksums are valid."""
    frames = [FRAME.pack(len(record), crc32c(record)) + record for record in FORGED[kind]]
    (tmp_path / "journal").write_bytes(b"".join(frames))
    with pytest.raises(ValueError, match=r"^it has a (record|chunk)|^its header"):
        read_journal(tmp_path / "journal")


def test_zeros_after_the_records_of_a_journal_are_torn_bytes(journal: Journal, tmp_path: Path) -> None:
    """A file system may leave zeros after an unfinished write."""
    expect(journal, journal.damaged(journal.data + bytes(100), tmp_path), 7, 100)


@pytest.mark.parametrize("number", range(7))
def test_a_flipped_bit_in_a_journal_costs_only_what_lies_after_it(
    journal: Journal, tmp_path: Path, number: int
) -> None:
    """If the header of its journal is damaged, nothing is salvaged."""
    start, stop = records(journal.data)[number][1:3]
    for at in (start, (start + stop) // 2, stop - 1):
        damaged = bytearray(journal.data)
        damaged[at] ^= 1
        expect(journal, journal.damaged(damaged, tmp_path / f"{at}"), number, len(damaged) - start)


# ---- shards -------------------------------------------


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
    """One writer has a short last chunk, the other one has rows after it. Padding must not count as rows."""
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
