# SPDX-License-Identifier: Apache-2.0
"""A commit that is killed at any step can be repeated, or finished by a repair, without a loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss, losses_to_json
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.source import SourceStore
from dmi_connector.store.write.finish import commit as commit_module
from dmi_connector.store.write.finish.commit import Commit, append_index, rank_file, written_attrs
from dmi_connector.store.write.finish.repair import repair
from dmi_connector.store.write.messages import Message
from tests import storekit as kit
from tests.bulkkit import Killed, Kills

Q = ArraySpec("q", "float32", (0, 1), 8)
ROWS = 40
Post = Callable[[Message], None]
VALUES = {"q": kit.random_bits(Q, ROWS)}


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Message]:
    """The message for a commit of two ranks with one layer each. Both have written all files."""
    stores, messages = [kit.Store(), kit.Store()], []
    final = tmp_path / "from/a.zarr"
    for rank, store in enumerate(stores):
        spec = replace(Q, shards=2, rank=rank, part_layers=1)
        record = store.open(final, spec, rank=rank, ranks=2, request_id="r", key="k")
        process = record.assignments[0].process
        if not rank:
            monkeypatch.setattr(process, "post", diverted(process.post, messages))
        store.feed(record, VALUES, ROWS)
        store.close(record, ROWS)
    kit.until(lambda: messages and Path(rank_file(f"{final}.partial", 1)).exists())
    yield messages[0]
    stores[0].shutdown(0)
    stores[1].shutdown()


def diverted(post: Post, messages: list[Message]) -> Post:
    """Append commit messages to `messages`, and post other messages."""
    return lambda message: (messages.append if message["type"] == "commit" else post)(message)


def killed(commit: Message, to: Path, at: int, torn: bool = False) -> Message | None:
    """Commit a copy of the store in `to`, and die at one step. Returns its message; None if there is no such step.

    torn: whether to truncate the root document afterwards, if it exists.
    """
    final = to / "a.zarr"
    message = {**commit, "final": str(final), "partial": f"{final}.partial"}
    shutil.copytree(commit["partial"], message["partial"])
    with Kills(at).watching():
        try:
            Commit.start(message).run()
        except Killed:
            document = Path(message["partial"], "zarr.json")
            if torn and document.exists():
                document.write_bytes(document.read_bytes()[:-9])
            return message
    return None


def check(store: Path, complete: bool) -> None:
    assert verify_store(store) == [] and not list(store.glob(".*"))
    with open_capture(store, timeout=0, allow_incomplete=not complete) as capture:
        np.testing.assert_array_equal(kit.bits(capture.numpy("q")), VALUES["q"])
        assert capture.complete == complete


@pytest.mark.parametrize("lost", [False, True], ids=["complete", "incomplete"])
def test_a_killed_commit_of_two_ranks_is_done_again(commit: Message, tmp_path: Path, lost: bool) -> None:
    """The new commit does not wait for files of the other rank again, and removes none of them."""
    losses = losses_to_json([Loss.of(Cause.FELL_BEHIND, [[0, 1]])] if lost else [])
    commit |= {"losses": losses, "fsync": True}
    steps = 0
    while message := killed(commit, to := tmp_path / str(steps), steps + 1):
        steps += 1
        if (to / "a.zarr").exists():
            continue  # it died while writing the line of the index
        again = Commit.start({**message, "again": True})
        assert again.ready() and again.run()["complete"] is not lost, f"step {steps}"
        check(to / "a.zarr", not lost)
        [info] = find_captures(to)
        assert info.state == ("incomplete" if lost else "complete") and info.num_tokens == ROWS
    assert steps > 20, "flushes and removals must be among the steps"


def test_a_store_is_whole_without_its_line_in_the_index(commit: Message, tmp_path: Path) -> None:
    """The disk may have been full. A repair adds the line, but leaves stores alone that another process has open."""
    final = tmp_path / "to/a.zarr"
    message = {**commit, "final": str(final), "partial": f"{final}.partial"}
    shutil.copytree(commit["partial"], message["partial"])
    (final.parent / "index.jsonl").mkdir()
    answer = Commit.start(message).run()
    assert answer["complete"] and answer["index_error"].startswith("[Errno 21] Is a directory")
    (final.parent / "index.jsonl").rmdir()
    check(final, complete=True)
    append_index(str(final.parent), {"event": "start", "store": "a.zarr", "state": "started"})
    with open_capture(final, timeout=0):
        assert repair(final.parent) == []
    [outcome] = repair(final.parent)
    assert (outcome.state, outcome.num_tokens, outcome.hooks) == ("recorded", ROWS, ["q"])
    assert repair(final.parent) == []
    line = list(read_index(final.parent))[-1]
    raw = VALUES["q"].nbytes
    assert (line["event"], line["state"], line["key"], line["bytes_raw"]) == ("finish", "complete", "k", raw)


@pytest.mark.parametrize("repaired", [False, True])
def test_every_file_and_directory_is_flushed(
    commit: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: bool
) -> None:
    """A commit flushes them, and so does a repair that only renames the store."""
    flushed: list[str] = []
    monkeypatch.setattr(commit_module, "fsync_path", flushed.append)
    partial = Path(shutil.copytree(commit["partial"], tmp_path / "a.zarr.partial"))
    message = {**commit, "final": str(tmp_path / "a.zarr"), "partial": str(partial), "fsync": not repaired}
    if repaired:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(commit_module, "remove_notes", dies)
            Commit.start(message).run()
        assert [outcome.state for outcome in repair(tmp_path)] == ["published"]
    else:
        Commit.start(message).run()
    there = {partial / path.relative_to(tmp_path / "a.zarr") for path in (tmp_path / "a.zarr").rglob("*")}
    assert there | {partial, tmp_path} == set(map(Path, flushed))


def dies(_partial: str) -> None:
    raise Killed


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_rows_are_borrowed_at_any_step_of_a_commit(commit: Message, tmp_path: Path, torn: bool) -> None:
    steps = 0
    while killed(commit, to := tmp_path / str(steps), steps + 1, torn):
        steps += 1
        if torn and len([*to.glob("a.zarr.partial/.*")]) < 3:
            break  # journals are only removed after the document was written in full
        with SourceStore(str(to / "a.zarr"), ROWS, ROWS) as source:
            for rank in (0, 1):
                [chunk] = source.chunk(replace(Q, shards=2, rank=rank, part_layers=1), 0)
                assert np.array_equal(np.frombuffer(bytes(chunk.body), "u4"), VALUES["q"][rank].ravel())
    assert steps > 5


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_killed_commit_of_two_ranks_is_repaired(commit: Message, tmp_path: Path, torn: bool) -> None:
    commit["fsync"] = True
    outcomes: list[str] = []
    while killed(commit, to := tmp_path / str(len(outcomes)), len(outcomes) + 1, torn):
        if (to / "a.zarr").exists():
            break
        notes = list((to / "a.zarr.partial").glob(".*"))
        if torn and len(notes) < 3:
            break  # journals are only removed after the document was flushed
        outcomes += [outcome.state for outcome in repair(to)]
        check(to / "a.zarr", outcomes[-1] == "published")
    assert {*outcomes} == ({"salvaged"} if torn else {"salvaged", "published"})


@pytest.mark.parametrize("attrs", [{}, {"hooks": {}}])
def test_a_store_without_hooks_has_none_that_cannot_be_opened(attrs: dict[str, Any]) -> None:
    commit, files = object.__new__(Commit), {"token_ids/zarr.json": [3, 5]}
    commit.losses = []
    commit._drop_unreadable(attrs, files)  # type: ignore[arg-type]
    assert (attrs, commit.losses, files) == ({"hooks": {}}, [], {"token_ids/zarr.json": [3, 5]})


def test_a_hook_without_metadata_is_left_out_with_its_files() -> None:
    commit = object.__new__(Commit)
    commit.losses = []
    hooks = {"q": {"array": "q"}, "k": {"array": "k2"}, "v": {"array": "v"}}
    files: Any = {"q/zarr.json": [1, 2], "q/c/0": [1, 2], "k2/c/0": [1, 2], "v/zarr.json": [1, 2]}
    attrs: dict[str, Any] = {"hooks": hooks}
    commit._drop_unreadable(attrs, files)
    assert attrs == {"hooks": {"q": hooks["q"], "v": hooks["v"]}} and "k2/c/0" not in files and len(files) == 3
    assert commit.losses == [Loss.of(Cause.HOOKS_WITHOUT_DATA, hooks="k")]


def test_attributes_with_a_wrong_checksum_are_not_trusted(commit: Message) -> None:
    """A commit or a repair then writes the root document again."""
    Commit.start(commit).run()
    attrs = written_attrs(commit["final"])
    assert attrs is not None and attrs["num_tokens"] == ROWS
    document = Path(commit["final"], "zarr.json")
    changed = json.loads(document.read_bytes())
    changed["attributes"]["dmi"]["num_tokens"] = ROWS - 1
    document.write_text(json.dumps(changed))
    assert written_attrs(commit["final"]) is None
