# SPDX-License-Identifier: Apache-2.0
"""`dmi tail`: finished captures from an index that other processes append to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.cli.main import main
from dmi_connector.cli.tail import RowTail, follow
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read.index import IndexTail, find_captures
from tests import storekit as kit

ROOT = Path(__file__).parents[2]
SPEC = ArraySpec("q", "float32", (0,), 8)


class Writer:
    """Writes captures of 6 rows to a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.owner = directory, kit.Store()

    def write(self, name: str, key: str | None = None, lost: bool = False) -> None:
        losses = [Loss.of(Cause.FELL_BEHIND, [[2, 3]])] if lost else []
        self.owner.write(self.directory / f"{name}.zarr", [SPEC], 6, losses=losses, key=key)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path)
    yield made
    assert made.owner.shutdown()


def names(found: list) -> list[str]:
    return [info.store.stem for info in found]


def test_each_read_gives_what_ended_since_the_one_before(writer: Writer, tmp_path: Path) -> None:
    tail = IndexTail(tmp_path)
    assert tail.read() == [], "there is no index yet"
    writer.write("a", "k")
    writer.write("b", lost=True)
    first = tail.read()
    assert first == find_captures(tmp_path) and names(first) == ["a", "b"]
    assert tail.read() == []
    writer.write("c")
    assert names(tail.read()) == ["c"]
    record = writer.owner.open(tmp_path / "d.zarr", SPEC)
    assert tail.read() == [], "the capture has not ended"
    writer.owner.abort(record)
    kit.until(lambda: '"aborted"' in (tmp_path / INDEX_NAME).read_text())
    assert tail.read() == [], "an aborted capture has no store"


def test_a_line_counts_when_it_is_whole_and_foreign_lines_are_skipped(writer: Writer, tmp_path: Path) -> None:
    writer.write("a")
    index, tail = tmp_path / INDEX_NAME, IndexTail(tmp_path)
    assert names(tail.read()) == ["a"]
    line = json.dumps({"event": "finish", "store": "b.zarr", "state": "complete"}).encode()
    for part, expected in ((b"not JSON\n" + line[:9], []), (line[9:], []), (b"\n", ["b"])):
        with open(index, "ab") as file:
            file.write(part)
        assert names(tail.read()) == expected, part


def test_an_index_that_was_cut_or_replaced_is_read_anew(writer: Writer, tmp_path: Path) -> None:
    writer.write("a")
    writer.write("b")
    tail, index = IndexTail(tmp_path), tmp_path / INDEX_NAME
    assert names(tail.read()) == ["a", "b"]
    whole = index.read_bytes()
    index.write_bytes(whole[: whole.index(b"\n", whole.index(b'"finish"')) + 1])
    assert names(tail.read()) == ["a"]
    other = tmp_path / "other"
    other.write_bytes(whole)
    os.replace(other, index)
    assert names(tail.read()) == ["a", "b"]


def test_a_table_begins_with_the_last_ones_and_grows(writer: Writer, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        writer.write(name, key=f"key-{name}")
    later = iter((("d", "key-d", False), ("e", None, True)))
    lines = follow(tmp_path, 2, wait=lambda: writer.write(*next(later)))
    shown = [next(lines) for _ in range(5)]
    assert shown[0].split() == ["finished", "(UTC)", "tokens", "bytes", "state", "key", "store"]
    assert [line.split()[-1] for line in shown[1:4]] == ["b.zarr", "c.zarr", "d.zarr"]
    assert " 6 " in shown[3] and " complete " in shown[3] and " key-d " in shown[3]
    assert " incomplete " in shown[4] and shown[4].endswith("e.zarr  (writing fell behind (policy drop))")
    assert {line.index(" key-") for line in shown[1:4]} == {shown[0].index("key") - 1}, "columns must be aligned"


def test_once_prints_and_ends(writer: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        writer.write(name, key="odd" if name != "b" else "even")
    assert main(["tail", str(tmp_path), "--once", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(one["store"]).stem for one in found] == ["a", "b", "c"]
    assert found[0]["state"] == "complete" and found[0]["num_tokens"] == 6 and Path(found[0]["store"]).is_dir()
    for options, expected in ((["-n", "0"], []), (["-n", "1"], ["c"]), (["--key", "odd"], ["a", "c"])):
        assert main(["tail", str(tmp_path), "--once", *options]) == 0
        header, *rows = capsys.readouterr().out.splitlines()
        assert header.startswith("finished") and [row.split()[-1] for row in rows] == [f"{n}.zarr" for n in expected]
    assert main(["tail", str(tmp_path), "-n", "-1"]) == 2
    assert "--last -1 is not valid; use 0 or more" in capsys.readouterr().err


def test_rows_of_a_capture_while_it_is_written(
    writer: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"q": kit.random_bits(SPEC, 140)}
    norms = np.linalg.norm(values["q"].view("f4")[0].astype("f8"), axis=-1)
    record = writer.owner.open(tmp_path / "a.zarr", SPEC, key="k")
    writer.owner.put(record, values, 0, 128)
    lines = iter(RowTail(tmp_path, "k", ["q@0"]))
    shown = [next(lines) for _ in range(129)]
    assert shown[0].split() == ["row", "position", "phase", "token", "id", "q@0"]
    assert shown[10].split() == ["9", "9", "prompt", "9", f"{norms[9]:.4g}"]
    assert shown[128].split()[:4] == ["127", "127", "generated", "127"]
    writer.owner.put(record, values, 128, 12)
    writer.owner.close(record, 140)
    rest = list(lines)
    assert rest[-1] == "a.zarr: complete, 140 rows" and rest[0].split()[-1] == f"{norms[128]:.4g}" and len(rest) == 13
    assert main(["tail", str(tmp_path), "--rows", "k", "--hook", "q@0", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[11] == {"row": 11, "position": 11, "phase": 1, "token_id": 11, "norms": {"q@0": float(norms[11])}}
    assert found[-1]["state"] == "complete" and len(found) == 141
    writer.write("b", "lost", lost=True)
    assert main(["tail", str(tmp_path), "--rows", "lost"]) == 1, "a capture with missing rows must give exit status 1"
    assert "b.zarr: incomplete, 6 rows (writing fell behind" in capsys.readouterr().out
    assert main(["tail", str(tmp_path), "--rows", "none", "--once"]) == 2
    assert "--rows none: no capture in" in capsys.readouterr().err
    assert main(["tail", str(tmp_path), "--hook", "q"]) == 2
    assert "--hook is for --rows" in capsys.readouterr().err


def test_a_process_that_follows_prints_at_once_and_ends_by_an_interrupt(writer: Writer, tmp_path: Path) -> None:
    writer.write("a")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dmi_connector.cli", "tail", str(tmp_path), "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT by default
    ) as process:
        assert process.stdout is not None
        assert Path(json.loads(process.stdout.readline())["store"]).stem == "a"
        writer.write("b")
        assert Path(json.loads(process.stdout.readline())["store"]).stem == "b"
        process.send_signal(signal.SIGINT)
        assert process.wait(kit.PATIENCE) == 130


def test_rows_of_large_values_have_a_finite_norm(tmp_path: Path) -> None:
    owner = kit.Store()
    values = {"q": np.full((1, 6, 8), 1e30, np.float32).view("u4")}
    owner.write(tmp_path / "a.zarr", [SPEC], 6, values=values, key="k")
    assert owner.shutdown()
    *rows, _ = map(json.loads, RowTail(tmp_path, "k", ["q@0"], once=True, as_json=True))
    assert [row["norms"]["q@0"] for row in rows] == pytest.approx([8**0.5 * 1e30] * 6)


def test_arrays_of_tokens_have_no_norm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--hook positions: it has one value per token, which has no norm"):
        RowTail(tmp_path, "k", ["q", "positions"])
