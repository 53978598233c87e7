# SPDX-License-Identifier: Apache-2.0
"""Salvaged parts of captures of several ranks, of samples, and of captures that were closed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.journal import read_journal
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish import commit, repair
from dmi_connector.store.write.messages import pack_array
from tests import storekit as kit
from tests.repairkit import (
    CHUNK,
    EMBED,
    IDS,
    LOGITS,
    SPECS,
    START,
    Killed,
    Writing,
    check,
    close,
    facts,
    killed,
    make_values,
    notes_of,
    only,
)


def test_the_coordinator_records_the_facts_that_a_salvage_needs(tmp_path: Path) -> None:
    """They are the ones that the other tests of repairs write."""
    store, wanted = kit.Store(), facts(SPECS)
    record = store.open(tmp_path / "a.zarr", *SPECS, attrs=wanted["attrs"], request_id="r", key="k")
    assert {**record.about(), "created": wanted["created"]} == wanted
    store.shutdown()


# ---- several ranks -------------------------------------------


@pytest.mark.parametrize("part_layers", [0, 1])
def test_rows_that_only_one_rank_wrote_are_missing_after_a_repair(tmp_path: Path, part_layers: int) -> None:
    """Only rows of shared hooks need both ranks. Hooks that only rank 0 has stay complete."""
    wide = ArraySpec("z", "bfloat16", (0, 2), 20, shards=2, part_layers=part_layers)
    values, ranks = make_values([wide, EMBED]), [Writing(), Writing()]
    for rank, writing in enumerate(ranks):
        specs = [replace(wide, rank=rank)] + [EMBED] * (rank == 0)
        writing.open(tmp_path / "a.zarr", specs, "none", facts(specs, rank, 2))
        for n in range(3 if rank else 6):
            writing.chunk(specs, values, n * CHUNK, CHUNK)
        if rank:
            writing.kill()
            assert only(repair.repair(tmp_path)).state == "written", "rank 0 is still running"
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
    """Rank 0 has a record of them. other: whether rank 1 has begun."""
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
    assert read_attrs(tmp_path / "a.zarr")["created"].endswith(":32+00:00"), (
        "the time must be that of rank 0, which is in the index"
    )


def test_the_facts_of_a_rank_without_arrays_are_salvaged(tmp_path: Path) -> None:
    """Rank 0 writes nothing for the request, but the index has the time at which it began there."""
    values, ranks = make_values([EMBED]), [Writing(), Writing()]
    ranks[0].open(tmp_path / "a.zarr", [], "none", facts([EMBED], 0, 2))
    ranks[1].open(tmp_path / "a.zarr", [EMBED], "none", facts([EMBED], 1, 2))
    ranks[1].chunk([EMBED], values, 0, CHUNK)
    kit.until((tmp_path / "a.zarr.partial" / ".journal-rank0").exists)
    for writing in ranks:
        writing.kill()
    assert only(repair.repair(tmp_path)).hooks == ["embed"]
    check(tmp_path / "a.zarr", values, CHUNK)
    assert read_attrs(tmp_path / "a.zarr")["created"].endswith(":32+00:00"), (
        "the time must be that of rank 0, which is in the index"
    )


# ---- samples and closed captures -------------------------------------------


def test_all_rows_of_logits_but_a_damaged_one_are_salvaged(writer: Writing, tmp_path: Path) -> None:
    """More samples than fit into one shard, and only one chunk of token rows."""
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


@pytest.mark.parametrize("length", [7, 70])
def test_all_rows_are_salvaged_if_the_writer_dies_before_the_commit(
    writer: Writing, tmp_path: Path, length: int
) -> None:
    """The capture was closed, so its length is known, and the indexes of its shards are cut to it."""
    values, _ = close(writer, tmp_path / "a.zarr", length, 3)
    writer.kill()
    assert only(repair.repair(tmp_path)).notes == []
    check(tmp_path / "a.zarr", values, length)
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(capture.array("logits")[:]), values["logits"][:3])


def test_a_store_that_lacks_only_its_name_is_published(
    writer: Writing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store with a root document is complete."""
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
