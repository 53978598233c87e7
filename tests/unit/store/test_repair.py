# SPDX-License-Identifier: Apache-2.0
"""Captures whose writer or engine was killed: every chunk that a writer has acknowledged must be salvaged unchanged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.cli.main import main
from dmi_connector.codecs import CODECS
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish import commit, repair, salvage
from tests import storekit as kit
from tests.repairkit import (
    CHUNK,
    SALVAGED,
    SPECS,
    Killed,
    Writing,
    check,
    facts,
    killed,
    make_values,
    notes_of,
    only,
    write,
)

# ---- killed writers -------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("chunks", "tail"), [(1, 0), (2, 0), (3, 0), (8, 0), (0, 7), (1, 7), (5, 1)])
def test_every_chunk_of_a_killed_writer_is_salvaged(
    writer: Writing, tmp_path: Path, codec: str, chunks: int, tail: int
) -> None:
    """It is killed within a shard, at its end or in a later one, after whole chunks or after a shorter last one."""
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
    assert (outcome.state, outcome.notes) == ("empty", ["no journal describes the capture"])


def test_rows_without_token_ids_are_salvaged_with_ids_of_0(writer: Writing, tmp_path: Path) -> None:
    values = make_values(SPECS)
    writer.open(tmp_path / "a.zarr", SPECS, "zstd", facts(SPECS))
    writer.chunk(SPECS, values, 0, CHUNK, ids=False)
    writer.kill()
    assert notes_of(only(repair.repair(tmp_path))) == ["token ids are not known for all rows: unknown ones are 0"]
    check(tmp_path / "a.zarr", values, CHUNK, ids=False)


SOAK = pytest.mark.soak
KILLS = [
    pytest.param(delay, all_of_them, marks=() if (delay, all_of_them) in ((0.0, True), (0.011, False)) else SOAK)
    for delay in (0.0, 0.003, 0.011, 0.02, 0.05)
    for all_of_them in (True, False)
]


@pytest.mark.parametrize(("delay", "all_of_them"), KILLS)
def test_every_chunk_a_writer_answered_survives_the_death_of_the_engine(
    tmp_path: Path, delay: float, all_of_them: bool
) -> None:
    """Either all processes are killed, or only the engine. In that case, writers read the end of their input."""
    final = tmp_path / "a.zarr"
    script = "import sys; from tests.repairkit import engine; engine(sys.argv[1])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", script, str(final)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, start_new_session=True) as process:
        assert process.stdout is not None
        answered = int(process.stdout.readline())
        time.sleep(delay)
        if all_of_them:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        # the output ends when the last process of the group has ended
        answered = int((process.stdout.read().split() or [answered])[-1])
    outcome = only(repair.repair(tmp_path))
    while outcome.state == "written":  # the processes are killed, but have not ended yet
        outcome = only(repair.repair(tmp_path))
    # One writer may be one chunk ahead of the other.
    missing = outcome.missing
    assert answered <= outcome.num_tokens - CHUNK * len(missing) and len(missing) <= 1, outcome
    assert all(outcome.num_tokens - start == CHUNK for start, _ in missing)
    check(final, make_values(SPECS, 4096), outcome.num_tokens, missing)


# ---- what must be left alone -------------------------------------------


def test_a_repair_does_not_touch_a_capture_that_is_being_written(writer: Writing, tmp_path: Path) -> None:
    """Until its directory is renamed, it counts as being written, even after its arrays are closed."""
    values = make_values(SPECS)
    writer.open(tmp_path / "a.zarr", SPECS, "zstd", facts(SPECS))
    for first in (0, 16):
        writer.chunk(SPECS, values, first, CHUNK)
        assert only(repair.repair(tmp_path, remove_empty=True)).state == "written"
    writer.ask("close", length=32, samples={})
    writer.ask("drop", id=2)  # between messages, the writer checks which captures were renamed
    assert only(repair.repair(tmp_path)).state == "written"
    writer.kill()
    assert only(repair.repair(tmp_path)).state == "salvaged"
    check(tmp_path / "a.zarr", values, 32)


def test_a_writer_closes_all_files_of_a_capture_that_has_ended(writer: Writing, tmp_path: Path) -> None:
    """A capture ends with the rename or with an abort."""

    def held() -> list[str]:
        links = []
        for path in Path(f"/proc/{writer.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the file was just closed
                links.append(os.readlink(path))
        return [link for link in links if link.startswith(str(tmp_path))]

    for name, end in (("a", "rename"), ("b", "abort")):
        writer.open(tmp_path / f"{name}.zarr", SPECS, "zstd", facts(SPECS))
        writer.chunk(SPECS, make_values(SPECS), 0, CHUNK)
        assert len(held()) == 4, "the writer must have four files open: the directory, its journal and two shards"
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
    if renamed:  # only the line of the index is missing
        assert verify_store(tmp_path / "a.zarr") == []
    else:
        check(tmp_path / "a.zarr", values, 48)


def test_a_repair_of_many_stores_continues_after_a_failure(tmp_path: Path) -> None:
    """One store cannot be repaired, the others are. Other files and directories are not changed."""
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


def test_a_damaged_store_does_not_keep_others_out_of_the_index(tmp_path: Path) -> None:
    """Their writers were killed before the last line of each store."""
    stores = kit.Store(1 << 20)
    for name in ("a", "b", "c"):
        stores.write(tmp_path / f"{name}.zarr", [kit.Q], 10)
    assert stores.shutdown(kit.PATIENCE)
    index = tmp_path / "index.jsonl"
    index.write_text("".join(line for line in index.read_text().splitlines(True) if '"start"' in line))
    (tmp_path / "a.zarr/q/zarr.json").unlink()
    (tmp_path / "b.zarr/q/zarr.json").write_text("{}")
    outcomes = repair.repair(tmp_path)
    assert [(Path(o.store or o.partial).name, o.state) for o in outcomes] == [
        ("a.zarr", "failed"),
        ("b.zarr", "failed"),
        ("c.zarr", "recorded"),
    ]
    assert "FileNotFoundError" in outcomes[0].notes[0] and "KeyError" in outcomes[1].notes[0]


def test_a_whole_store_damaged_since_is_neither_published_nor_removed(
    writer: Writing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journals are already removed."""
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
    assert (b["state"], b["notes"]) == ("empty", ["no journal describes the capture"])
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
