# SPDX-License-Identifier: Apache-2.0
"""Readers of prompts: all formats give the same rows, in any order. Memory does not grow with the number of rows."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmi_connector.bulk import sources
from dmi_connector.bulk.order import Order, parse_share, permuted
from dmi_connector.bulk.prompts import BadRow, Columns, Prompt
from dmi_connector.bulk.sources import Source, identity, open_source

MIB = 1 << 20


def rows_of(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield {"prompt": f"the text of row {i}, " * (i % 3 + 1), "id": f"id-{i}"}


def as_lines(path: Path, count: int) -> Path:
    with open(path, "w") as file:
        for row in rows_of(count):
            file.write(json.dumps(row) + "\n")
    return path


def batches(count: int, size: int) -> Iterator[pa.RecordBatch]:
    rows = rows_of(count)
    for first in range(0, count, size):
        some = [next(rows) for _ in range(min(size, count - first))]
        yield pa.RecordBatch.from_pylist([{**row, "other": first} for row in some])


def as_parquet(path: Path, count: int, size: int = 1000) -> Path:
    found = batches(count, size)
    first = next(found)
    with pq.ParquetWriter(path, first.schema) as writer:
        for batch in [first]:
            writer.write_batch(batch)
        for batch in found:
            writer.write_batch(batch)
    return path


def as_parquet_files(path: Path, count: int) -> Path:
    """Write a directory of two Parquet files."""
    path.mkdir()
    table = pa.Table.from_batches(batches(count, 10))
    pq.write_table(table.slice(0, count // 3), path / "a.parquet", row_group_size=7)
    pq.write_table(table.slice(count // 3), path / "b.parquet")
    return path


def as_dataset(path: Path, count: int, size: int = 1000) -> Path:
    """Write two files as `Dataset.save_to_disk` of Hugging Face's library does."""
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    found = list(batches(count, size))
    for name, some in zip(names, (found[:2], found[2:]), strict=True):
        with pa.ipc.new_stream(str(path / name), found[0].schema) as stream:
            for batch in some:
                stream.write_batch(batch)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


FORMATS = {
    "lines": lambda path, count: as_lines(path.with_suffix(".jsonl"), count),
    "parquet": lambda path, count: as_parquet(path.with_suffix(".parquet"), count, 10),
    "parquet files": as_parquet_files,
    "dataset": lambda path, count: as_dataset(path, count, 10),
}


def loaded(source: Source, order: Order, scratch: Path) -> list[tuple[int, int, object]]:
    rows = order.rows(source, scratch)
    return [(placed.position, placed.number, rows.load(placed.raw)) for placed in rows]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_rows_in_any_order(form: str, tmp_path: Path) -> None:
    source = open_source(FORMATS[form](tmp_path / "p", 45), Columns())
    want = list(rows_of(45))
    assert loaded(source, Order(), tmp_path) == [(i, i, row) for i, row in enumerate(want)]
    assert source.fraction() == 1.0 and source.count() in (45, None)
    shuffled = loaded(source, Order(shuffle=3), tmp_path)
    assert [position for position, _, _ in shuffled] == list(range(45))
    assert sorted(number for _, number, _ in shuffled) == list(range(45))
    assert all(row == want[number] for _, number, row in shuffled)
    assert [n for _, n, _ in shuffled] != [n for _, n, _ in loaded(source, Order(shuffle=4), tmp_path)]
    assert loaded(source, Order(shuffle=3, limit=21, share=1, shares=4), tmp_path) == shuffled[1:21:4]
    assert loaded(source, Order(limit=21, share=1, shares=4), tmp_path) == [(i, i, want[i]) for i in range(1, 21, 4)]
    assert list(tmp_path.iterdir()) == [next(tmp_path.iterdir())], "files of the shuffle have no name"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("order", [Order(), Order(shuffle=1), Order(limit=20, share=2, shares=3)])
def test_the_number_of_rows_is_known_after_the_last_row(form: str, order: Order, tmp_path: Path) -> None:
    rows = order.rows(open_source(FORMATS[form](tmp_path / "p", 45), Columns()), tmp_path)
    assert len(list(rows)) == rows.total()


@pytest.mark.parametrize("limit", [None, 300])
def test_the_number_of_rows_is_estimated_after_a_hundred(tmp_path: Path, limit: int | None) -> None:
    """All lines have the same length, and every third one is read. The exact number of lines is known only after the
    last one.
    """
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' * 100_000)
    rows = Order(limit=limit, share=2, shares=3).rows(open_source(path, Columns()), tmp_path)
    found: list[int | None] = []
    each = iter(rows)
    for _ in range(100):
        found.append(rows.total() if next(each) else None)
    assert found[:99] == [None] * 99 and rows.estimates()
    assert found[99] == len(range(2, 300, 3)) if limit else 25_000 < (found[99] or 0) < 40_000


def test_lines_that_are_not_rows_are_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 100)
    path = tmp_path / "p.jsonl"
    long = b'{"prompt": "' + b"x" * 500 + b'"}'
    path.write_bytes(b"\n".join([b'{"prompt": "a"}', b"", long, b"[", b"\xff\xfe", b"[" * 90, b'{"prompt": "no end"}']))
    source = open_source(path, Columns())
    for order in (Order(), Order(shuffle=2)):
        found = {}
        rows = order.rows(source, tmp_path)
        for placed in rows:
            try:
                found[placed.number] = rows.load(placed.raw)
            except BadRow as error:
                found[placed.number] = str(error).split(":")[0]
        assert found == {
            0: {"prompt": "a"},
            1: None,
            2: "the line is longer than 100 bytes",
            3: "the line is not JSON",
            4: "the line is not JSON",
            5: "the line is not JSON",
            6: {"prompt": "no end"},
        }


@pytest.mark.parametrize("count", [0, 1])
def test_small_inputs(count: int, tmp_path: Path) -> None:
    source = open_source(as_lines(tmp_path / "p.jsonl", count), Columns())
    assert len(loaded(source, Order(), tmp_path)) == len(loaded(source, Order(shuffle=1), tmp_path)) == count


def test_only_wanted_columns_are_read(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "p.parquet", 3)
    assert set(loaded(open_source(path, Columns(prompt="id", id="other")), Order(), tmp_path)[0][2]) == {"id", "other"}


@pytest.mark.parametrize("form", ["parquet", "parquet files", "dataset"])
def test_an_input_without_a_prompt_column_is_refused_at_the_start(form: str, tmp_path: Path) -> None:
    """With only ids, every row would be refused."""
    path = FORMATS[form](tmp_path / "p", 45)
    with pytest.raises(ValueError, match=r"has none of the columns text, messages, prompt_t.*columns: prompt, id, oth"):
        open_source(path, Columns(prompt="text"))


def test_chats_and_token_ids_in_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    table = pa.table({"messages": [chat, None], "prompt_token_ids": [None, [1, 2]], "id": [7, 8]})
    pq.write_table(table, tmp_path / "p.parquet")
    source = open_source(tmp_path / "p.parquet", Columns())
    for order in (Order(), Order(shuffle=0)):
        found = {n: Prompt.of(row, Columns()) for _, n, row in loaded(source, order, tmp_path)}
        assert found == {0: Prompt(messages=tuple(chat), id="7"), 1: Prompt(token_ids=(1, 2), id="8")}


def test_values_that_json_cannot_hold_are_bad_rows_in_any_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [b"bytes"]}), tmp_path / "p.parquet")
    source = open_source(tmp_path / "p.parquet", Columns())
    for order in (Order(), Order(shuffle=0)):
        with pytest.raises(BadRow, match=r"prompt: .* is not a string"):
            Prompt.of(loaded(source, order, tmp_path)[0][2], Columns())


def test_a_row_that_arrow_cannot_convert_has_its_reason_in_any_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([b"\xff"]).view(pa.string())}), tmp_path / "p.parquet")
    source = open_source(tmp_path / "p.parquet", Columns())
    for order in (Order(), Order(shuffle=0)):
        with pytest.raises(BadRow, match=r"the row cannot be read: .*utf-8"):
            loaded(source, order, tmp_path)


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_two_columns_of_one_name_are_refused(form: str, tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    path = tmp_path / "p.parquet"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        path = as_dataset(tmp_path / "d", 5)
        with pa.ipc.new_stream(str(path / "data-00001-of-00002.arrow"), table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(ValueError, match=r"several columns named 'prompt'; rename all but one"):
        open_source(path, Columns())


def test_a_growing_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "p.jsonl", 5)
    source = open_source(path, Columns())
    with open(path, "a") as file:
        file.write('{"prompt": "more"}\n')
    assert len(list(source)) == 6 and source.fraction() == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "does not exist"),
        (lambda p: (p / "notes.txt").write_text(""), r"holds no state.json .* and no \*.parquet"),
        (lambda p: (p / "dataset_dict.json").write_text('{"splits": ["train", "test"]}'), "one of them: train, test"),
        (lambda p: (p / "state.json").write_text('{"_indices_files": [1]}'), "flatten_indices"),
    ],
)
def test_unreadable_inputs_are_refused_with_the_fix(make: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d"
    if message != "does not exist":
        path.mkdir()
    make(path)
    with pytest.raises(ValueError, match=message):
        open_source(path, Columns())


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("")
    with pytest.raises(ValueError, match=r"p.csv ends in .csv; give a file of JSON lines"):
        open_source(tmp_path / "p.csv", Columns())
    as_dataset(tmp_path / "d", 3)
    (tmp_path / "d" / "data-00000-of-00002.arrow").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not an Arrow stream"):
        open_source(tmp_path / "d", Columns())


def test_the_identity_of_an_input_is_its_content(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "p.jsonl", 5)
    before = identity(path)
    (tmp_path / "elsewhere").mkdir()
    path.rename(tmp_path / "elsewhere" / "p.jsonl")
    assert identity(tmp_path / "elsewhere" / "p.jsonl") == before
    text = (tmp_path / "elsewhere" / "p.jsonl").read_text()
    path.write_text(text.replace("row 4", "row 5"))
    assert identity(path) != before


@pytest.mark.parametrize("total", [1, 2, 3, 5, 64, 65, 1000])
def test_a_permutation_has_every_number_once(total: int) -> None:
    for seed in (0, 1, 2**70):
        assert sorted(permuted(i, total, seed) for i in range(total)) == list(range(total))


ORDERS = [
    # total, seed, {position: number}
    (4, 0, {0: 1, 1: 3, 2: 0, 3: 2}),
    (16, 1, {0: 3, 1: 14, 2: 10, 3: 0, 8: 8, 14: 13, 15: 12}),
    (64, 0, {0: 42, 1: 32, 2: 51, 3: 10, 32: 24, 62: 8, 63: 11}),
    (65, 7, {0: 45, 1: 0, 2: 26, 3: 4, 32: 44, 63: 7, 64: 60}),
    (1000, 1180591620717411303424, {0: 768, 1: 68, 2: 620, 3: 26, 500: 259, 998: 596, 999: 303}),
    (1048576, 3, {0: 1009391, 1: 44462, 2: 535596, 3: 922136, 524288: 912511, 1048574: 751530, 1048575: 738452}),
    (1048577, 3, {0: 781922, 1: 240683, 2: 814140, 3: 320433, 524288: 70571, 1048575: 313463, 1048576: 621844}),
]
"""Expected permutations. Later versions must give the same order, because a continued run relies on it."""


@pytest.mark.parametrize(("total", "seed", "numbers"), ORDERS)
def test_the_permutation_of_a_seed_never_changes(total: int, seed: int, numbers: dict[int, int]) -> None:
    """Some totals are powers of 4, which the cipher permutes without cycle walking."""
    assert {position: permuted(position, total, seed) for position in numbers} == numbers


def test_a_permutation_moves_rows_across_the_whole_range() -> None:
    """About half of the first 500 of 1,000 rows must move to the second half."""
    total = 1000
    moved = [sum(permuted(i, total, seed) >= total // 2 for i in range(total // 2)) for seed in range(50)]
    assert 235 < sum(moved) / len(moved) < 265 and len(set(moved)) > 10
    assert len({tuple(permuted(i, 8, seed) for i in range(8)) for seed in range(200)}) > 180


@pytest.mark.parametrize("text", ["3/3", "1", "-1/4", "a/b", "1/2/3", "0/0", ""])
def test_bad_shares_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write I/N"):
        parse_share(text)


# ---- many rows ------------------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Bytes of anonymous memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.fixture(scope="module", params=[50_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Path]]:
    """(number of prompts, {format: file with this number of prompts})."""
    folder, count = tmp_path_factory.mktemp("many"), request.param
    return count, {
        "lines": as_lines(folder / "p.jsonl", count),
        "parquet": as_parquet(folder / "p.parquet", count, count // 4),
        "dataset": as_dataset(folder / "d", count),
    }


@pytest.mark.parametrize("form", ["lines", "parquet", "dataset"])
@pytest.mark.parametrize("shuffle", [None, 1])
def test_many_prompts_take_no_more_memory_than_a_few(
    form: str, shuffle: int | None, many: tuple[int, dict[str, Path]], tmp_path: Path
) -> None:
    (count, files), columns = many, Columns()
    rows = Order(shuffle).rows(open_source(files[form], columns), tmp_path)
    found, total, ids = [], 0, 0
    for placed in rows:
        prompt = Prompt.of(rows.load(placed.raw), columns)
        assert prompt.id is not None
        ids += int(prompt.id[3:])
        total += 1
        if total % (count // 4) == 0:
            found.append((anonymous_bytes(), pa.total_allocated_bytes(), sys.getallocatedblocks()))
    assert total == count and ids == count * (count - 1) // 2
    memory, of_arrow, objects = (max(amounts) - amounts[0] for amounts in zip(*found, strict=True))
    # Memory that other tests have freed may hide a few MiB. The number of objects is exact.
    assert memory < 16 * MIB, f"{memory / MIB:.0f} MiB more"
    assert of_arrow < 10 * count and objects < count // 10, f"Arrow has {of_arrow} bytes more, Python {objects} objects"
    assert os.path.getsize(files["lines"]) > 50 * count


@pytest.mark.parametrize("damage", ["cut", "footer", "page"])
def test_a_damaged_parquet_file_is_named(damage: str, tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "p.parquet", 900)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        first = len(data) - 40 if damage == "footer" else 4
        data[first : first + 30] = b"\xff" * 30
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"--prompts {re.escape(str(path))} cannot be read as Parquet .*; write it"):
        list(open_source(path, Columns()))


@pytest.mark.parametrize(("damage", "says"), [("cut", "is not an Arrow stream: "), ("gone", "does not exist; ")])
def test_a_damaged_arrow_file_is_named(damage: str, says: str, tmp_path: Path) -> None:
    file = as_dataset(tmp_path / "set", 3000) / "data-00000-of-00002.arrow"
    os.truncate(file, file.stat().st_size // 2)
    if damage == "gone":
        file.unlink()
    with pytest.raises(ValueError, match=rf"--prompts {re.escape(str(file))} {says}.*save the data set again"):
        list(open_source(tmp_path / "set", Columns()))


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[]", "[" * 100_000),
        '{"_data_files": [1], "splits": 3}',
        '{"_data_files": [{"filename": 1}], "splits": 3}',
    ],
)
def test_a_damaged_file_of_a_data_set_is_named(name: str, text: str, tmp_path: Path) -> None:
    path = as_dataset(tmp_path / "set", 5)
    (path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"--prompts \S*{re.escape(name)} is damaged \(.*; save the data set again"):
        open_source(path, Columns())


def test_a_line_that_ends_just_beyond_the_limit_does_not_swallow_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 8)
    written = [b"1234567\n", b"12345678\n", b"123456789\n", b"1" * 27 + b"\n", b"5\n", b"1" * 30]
    (tmp_path / "a.jsonl").write_bytes(b"".join(written))
    with open(tmp_path / "a.jsonl", "rb") as file:
        lines = sources.Lines(file)
        found, passed = [], []
        for number, line in lines:
            found.append((number, line))
            passed.append(round(lines.fraction() * sum(map(len, written))))
    assert found == [(number, line[:9]) for number, line in enumerate(written)]
    assert passed == [sum(map(len, written[: i + 1])) for i in range(len(written))]


def test_the_fraction_of_an_empty_file_is_1(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with open(tmp_path / "a.jsonl", "rb") as file:
        lines = sources.Lines(file)
        assert list(lines) == [] and lines.fraction() == 1.0 and lines.count() is None


def test_a_file_that_is_not_an_arrow_stream_is_refused_with_arrows_message(tmp_path: Path) -> None:
    as_dataset(tmp_path / "d", 3)
    (tmp_path / "d" / "data-00000-of-00002.arrow").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not an Arrow stream: ") as caught:
        open_source(tmp_path / "d", Columns())
    assert " ".join(str(caught.value.__cause__).split()) in str(caught.value) and str(caught.value.__cause__)
