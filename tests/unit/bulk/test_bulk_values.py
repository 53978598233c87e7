# SPDX-License-Identifier: Apache-2.0
"""Full return values of functions of a bulk run: settings, messages, prompts, speeds, lines."""

from __future__ import annotations

import io
import json
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.bulk.budget import Budget
from dmi_connector.bulk.engines import Answer
from dmi_connector.bulk.flight import Flight
from dmi_connector.bulk.manifest import Positions
from dmi_connector.bulk.order import Placed
from dmi_connector.bulk.progress import Counts, Progress, Speed, Speedometer, _line, duration
from dmi_connector.bulk.prompts import BadRow, Columns, Prompt
from dmi_connector.bulk.recovery import is_sound, not_uploaded
from dmi_connector.bulk.run import Run
from dmi_connector.bulk.settings import RunSettings
from dmi_connector.cli.main import make_run_parser
from dmi_connector.cli.run import settings_of
from dmi_connector.store.write.finish.commit import append_index
from tests.bulkkit import PROMPT, ROWS, RUN, FakeEngines, Order, start_run, template, write_prompts, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "one.zarr")


def settings(*more: str) -> RunSettings:
    options = ["--model", "m", "--prompts", "p.jsonl", "--out", "o", "--hooks", "q , k", *more]
    return settings_of(*make_run_parser().parse_known_args(options))


# ---- settings -------------------------------------------------------------------------------------------------------


def test_a_fingerprint_has_all_settings_that_affect_stores() -> None:
    """Files of runs have these names and values, so they must not change."""
    more = ["--reduce", '{"q": "int8"}', "--shuffle", "3", "--shard", "1/4", "--limit", "9", "--chat"]
    more += ["--dtype", "half", "--seed", "1", "--max_num_seqs=9", "--sampling", '{"top_p": 0.5}', "--max-tokens", "4"]
    files = [{"name": "p.jsonl", "bytes": 3}]
    found = settings(*more, "--column", "prompt=text").fingerprint(files)
    names = {"messages": "messages", "prompt_token_ids": "prompt_token_ids", "id": "id", "loss_mask": "loss_mask"}
    assert json.loads(json.dumps(found)) == {
        "model": "m",
        "owner": "draft",
        "hooks": "q,k",
        "reduce": {"q": "int8"},
        "codec": "zstd",
        "chunk_tokens": 128,
        "segment_tokens": 1024,
        "check": "none",
        "flags": ["--dtype=half", "--seed=1"],
        "sampling": {"temperature": 0.0, "n": 1, "top_p": 0.5},
        "max_tokens": 4,
        "chat": True,
        "columns": {"prompt": "text", **names},
        "shuffle": 3,
        "shards": 4,
        "prompts": files,
    }
    assert found["prompts"][0] is not files[0], "it must be a copy"
    plain = settings("--owner", "target", "--codec", "lz4", "--check", "poison").fingerprint([])
    changed = {"owner": "target", "codec": "lz4", "check": "poison", "reduce": {}, "flags": [], "max_tokens": None}
    changed |= {"sampling": {"temperature": 0.0, "n": 1}, "chat": False, "shuffle": None, "shards": 1, "prompts": []}
    assert plain == found | changed | {"columns": {"prompt": "prompt", **names}}


@pytest.mark.parametrize("upload", [False, True])
def test_the_message_to_an_engine_has_its_model_and_its_capture(upload: bool) -> None:
    """The store of an upload must be complete, because incomplete ones are captured again."""
    more = ["--upload", "s3://bucket/x"] if upload else []
    given = settings(*more, "--dtype", "half", "--max-tokens", "4", "--sampling", '{"top_p": 0.5}')
    capture = {"hooks": "q , k", **({"upload": "s3://bucket/x", "upload_only_complete": True} if upload else {})}
    message = json.loads(json.dumps(given.engine_message(Path("/out"))))
    assert message == {
        "model": "m",
        "flags": ["--dtype", "half"],
        "sampling": {"top_p": 0.5},
        "max_tokens": 4,
        "capture": capture,
        "store_dir": "/out",
    }
    assert "upload_only_complete" not in given.capture, "the settings must not change"


# ---- prompts --------------------------------------------------------------------------------------------------------


COLUMNS = Columns.parse(["prompt=text", "id=name"])
MASKED = {"prompt_token_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1], "name": 3}


@pytest.mark.parametrize(
    ("row", "chat", "wanted", "sent"),
    [
        ({"text": "a", "name": "n"}, False, {"text": "a", "id": "n"}, {"text": "a"}),
        (
            {"text": "a"},
            True,
            {"messages": ({"role": "user", "content": "a"},)},
            {"messages": ({"role": "user", "content": "a"},)},
        ),
        (
            {"text": "a", "messages": [{"role": "user"}], "name": 4},
            True,
            {"messages": ({"role": "user"},), "id": "4"},
            {"messages": ({"role": "user"},)},
        ),
        (
            {**MASKED, "text": "a", "messages": [{"role": "user"}]},
            True,
            {"token_ids": (5, 6, 7, 8), "id": "3", "loss_spans": ((0, 1), (2, 4))},
            {"token_ids": (5, 6, 7, 8), "options": {"loss_spans": ((0, 1), (2, 4))}},
        ),
        (
            {"prompt_token_ids": [0, 2**31 - 1], "loss_mask": [0, False]},
            False,
            {"token_ids": (0, 2**31 - 1), "loss_spans": ()},
            {"token_ids": (0, 2**31 - 1), "options": {"loss_spans": ()}},
        ),
        ({"prompt_token_ids": [1], "loss_mask": None}, False, {"token_ids": (1,)}, {"token_ids": (1,)}),
    ],
)
def test_a_row_becomes_one_prompt(row: dict[str, Any], chat: bool, wanted: Any, sent: Any) -> None:
    prompt = Prompt.of(row, COLUMNS, chat)
    assert {f.name: v for f in fields(prompt) if (v := getattr(prompt, f.name)) is not None} == wanted
    assert prompt.to_json() == sent


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (["a"], "the row is not an object with columns"),
        ({}, "the row has none of the columns text, messages, prompt_token_ids; its columns: none"),
        (
            {"prompt": 1, "x": 2},
            "the row has none of the columns text, messages, prompt_token_ids; its columns: prompt, x",
        ),
        ({"text": ""}, "text: the text is empty"),
        ({"text": 1}, "text: 1 is not a string"),
        ({"text": "a", "name": True}, "name: True is not a string or an integer"),
        ({"text": "a", "name": 1.5}, "name: 1.5 is not a string or an integer"),
        ({"text": "a", "loss_mask": [1]}, "loss_mask: a mask needs token ids; give prompt_token_ids too"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids: '12' is not a list of token ids"),
        ({"prompt_token_ids": 12}, "prompt_token_ids: 12 is not a list of token ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids: the list is empty"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids: True is not a token id"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids: -1 is not a token id"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids: 2147483648 is not a token id"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids: 1.0 is not a token id"),
        ({"prompt_token_ids": [1], "loss_mask": [2]}, "loss_mask: [2] is not a list of 0 and 1"),
        ({"prompt_token_ids": [1], "loss_mask": "1"}, "loss_mask: '1' is not a list of 0 and 1"),
        ({"prompt_token_ids": [1], "loss_mask": 1}, "loss_mask: 1 is not a list of 0 and 1"),
        ({"prompt_token_ids": [1], "loss_mask": [1, 0]}, "loss_mask: 2 values for 1 token ids"),
        ({"messages": []}, "messages: [] is not a list of messages"),
        ({"messages": "hi"}, "messages: 'hi' is not a list of messages"),
        ({"messages": [1]}, "messages: 1 is not a message with a role and a content"),
        ({"messages": [{"role": 1}]}, "messages: {'role': 1} is not a message with a role and a content"),
    ],
)
def test_rows_without_a_valid_prompt_are_refused_with_the_reason(row: Any, why: str) -> None:
    with pytest.raises(BadRow) as error:
        Prompt.of(row, COLUMNS)
    assert str(error.value) == why


# ---- stores whose line is late --------------------------------------------------------------------------------------


def written(source: Path, final: Path, key: str, **changes: Any) -> Path:
    assert [None for _ in write_store(source, final, key, **changes)]
    return final


@pytest.mark.parametrize(
    ("change", "sound"),
    [
        ({}, True),
        ({"finish_reason": "stop"}, True),
        ({"finish_reason": "abort"}, False),
        ({"complete": False, "reason": "x"}, False),
        ("root", False),
        ("values", False),
    ],
)
def test_a_store_is_sound_if_it_is_complete_and_undamaged(
    change: Any, sound: bool, store: Path, tmp_path: Path
) -> None:
    path = written(store, tmp_path / "a.zarr", "a", **(change if isinstance(change, dict) else {}))
    if change == "root":
        (path / "zarr.json").write_text("{")
    if change == "values":
        largest = max((p for p in (path / "q").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)
    assert is_sound(path) is sound


LONG_AGO, FAR = -1e6, 1e6
"""Time of a response, in seconds from now. At LONG_AGO, the index line of its store is overdue. At FAR, it is not due
yet.
"""


@pytest.mark.parametrize(
    ("there", "came", "gone", "looks", "wanted"),
    [
        ("store", LONG_AGO, False, 1, "done"),
        ("store", FAR, False, 1, "flies"),
        ("store", FAR, True, 1, "done"),
        ("store", None, True, 1, "flies"),
        ("nothing", LONG_AGO, False, 1, "flies"),
        ("nothing", LONG_AGO, False, 2, "again"),
        ("nothing", -60.0, False, 2, "flies"),
        ("nothing", FAR, True, 1, "lost"),
        ("partial", LONG_AGO, False, 1, "flies"),
        ("partial", LONG_AGO, False, 2, "again"),
        ("partial", FAR, False, 2, "flies"),
        ("partial", FAR, True, 1, "lost"),
    ],
)
def test_a_store_without_an_index_line_is_looked_up_by_path(
    there: str, came: float | None, gone: bool, looks: int, wanted: str, store: Path, tmp_path: Path
) -> None:
    """A partial store that has no writer in two checks has failed. So has a capture that has no store long after its
    answer. Without an engine, its prompt is lost.
    """
    out = tmp_path / "out"
    out.mkdir()
    run: Run = start_run(write_prompts(tmp_path / "p.jsonl", 3), out, FakeEngines(store, out))
    final = out / f"{RUN}-000000001--1-000000000001.zarr"
    if there == "store":
        written(store, final, f"{RUN}-000000001")
    if there == "partial":
        (out / f"{final.name}.partial/q").mkdir(parents=True)
    answer = None if came is None else Answer(1, PROMPT, ROWS - PROMPT + 1, "length", str(final))
    flight = Flight(Placed(1, 1, b""), Prompt("a"), answer, time.monotonic() + (came or 0))
    run._flights[1] = flight
    for _ in range(looks):
        run._look_at_paths(gone)
    states = {"flies": bool(run._flights), "lost": run.outcome.lost == 1, "again": bool(run._again)}
    assert {**states, "done": run.outcome.counts.done == 1} == {
        name: name == wanted for name in ("flies", "lost", "again", "done")
    }
    if wanted == "again":
        (again,) = run._again
        assert again == Flight(flight.placed, flight.prompt, tries=2)
        assert flight.captured is not None
        assert (flight.captured.state, flight.captured.store) == ("failed", final)
        lacks = "it has no store and no line in the index, as after a full disk"
        wanted = lacks if there == "nothing" else "its writers ended before it was finished"
        assert flight.captured.reason == wanted


def test_stores_that_wait_for_their_upload_are_counted(tmp_path: Path) -> None:
    """Only the latest line of each store counts, and only stores of this share that still exist. The reason is that of
    the latest failure.
    """

    def line(position: int, upload: str, run: str = RUN, **more: str) -> str:
        name = f"{run}-{position:09d}--{position}-000000000001.zarr"
        (tmp_path / name).mkdir(exist_ok=True)
        append_index(str(tmp_path), {"event": "upload", "store": name, "upload": upload, **more})
        return name

    line(0, "failed", upload_reason="first")
    line(2, "failed", upload_reason="second")
    line(4, "pending")
    line(6, "pending")
    line(6, "done", url="s3://b/x")
    line(1, "failed", upload_reason="of another share")
    line(8, "failed", "ffffffff", upload_reason="of another run")
    shutil.rmtree(tmp_path / line(10, "failed", upload_reason="of a store that was removed"))
    even, whole = Order(share=0, shares=2), Order()
    assert not_uploaded(tmp_path, RUN, even) == (3, "second")
    assert not_uploaded(tmp_path, RUN, whole) == (4, "of another share")
    line(0, "failed", upload_reason="again")
    assert not_uploaded(tmp_path, RUN, even) == (3, "again")
    assert not_uploaded(tmp_path, "00000000", whole) == (0, None)


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_speeds_are_means_of_the_last_half_minute() -> None:
    now = [100.0]
    meter = Speedometer(lambda: now[0])
    counts = Counts(total=100, done=12, before=10, rejected=1, failed=1, tokens=50, bytes=1000)
    assert meter.look(counts) == Speed(0.0, 0.0, None)
    for seconds, done in ((10, 14), (30, 16), (40, 18)):
        now[0], counts.done = 100.0 + seconds, done
        counts.tokens, counts.bytes = 50 + 10 * seconds, 1000 + 100 * seconds
        found = meter.look(counts)
        then, before = (10, 14) if seconds > 30 else (0, 12)
        left = (100 - done - 2) * (seconds - then) / (done - before)
        assert found == Speed(pytest.approx(10), pytest.approx(100), pytest.approx(left)), seconds
    counts.total = None
    assert meter.look(counts).seconds_left is None
    counts.total, counts.done = 3, 30
    assert meter.look(counts).seconds_left == 0


def test_rejected_and_failed_prompts_count_for_the_time_that_is_left() -> None:
    now = [0.0]
    meter = Speedometer(lambda: now[0])
    meter.look(Counts(total=100))
    now[0] = 10.0
    assert meter.look(Counts(total=100, done=4, rejected=3, failed=2)).seconds_left == pytest.approx(91 * 10 / 9)


def test_counts_are_shown_as_text() -> None:
    counts = Counts(total=50, done=7, backlog=3, rejected=2, failed=1, waiting="room")
    speed = Speed(1234.6, 5e6, 61.4)
    assert _line(counts, speed) == (
        "7/50 stored, 1235 tokens/s, 5.0 MB/s, backlog 3, 1:01 left, 2 bad rows, 1 failed, waiting: room"
    )
    assert _line(Counts(done=1, estimated=True, total=9), Speed(0, 0, None)) == (
        "1/about 9 stored, 0 tokens/s, 0 B/s, backlog 0, ? left"
    )
    assert _line(Counts(), Speed(0, 0, 3600)) == "0/? stored, 0 tokens/s, 0 B/s, backlog 0, 1:00:00 left"
    short = Counts(total=50, done=7, backlog=3)
    texts = ["7/50 stored, 1235 tokens/s, 5.0 MB/s, backlog 3, 1:01 left"]
    texts += ["7/50 stored, 1235 tokens/s, backlog 3, 1:01 left", "7/50 stored, backlog 3, 1:01 left"]
    for text, next_one in zip(texts, [*texts[1:], "backlog 3, 1:01 left"], strict=True):
        assert _line(short, speed, len(text)) == text and _line(short, speed, len(text) - 1) == next_one
    one, two = Counts(starting=("a.log",)), Counts(total=5, done=2, starting=("a.log", "b.log"))
    assert _line(one, speed) == "starting the engine (its log: a.log)"
    assert _line(two, speed) == "2/5 stored, starting 2 engines (first log: a.log)"
    assert [duration(s) for s in (0, 59.6, 3599.4, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_json_progress_has_one_object_per_line() -> None:
    out = io.StringIO()
    progress = Progress(True, out)
    progress.show(Counts(total=4, done=1, tokens=9))
    progress.show(Counts(), force=False)  # too early to be shown
    progress.show(Counts(), force=True)
    progress.say({"event": "x"}, "not shown")
    progress.close()
    first, second, third = map(json.loads, out.getvalue().splitlines())
    rest = {"before": 0, "rejected": 0, "failed": 0, "bytes": 0, "engine": 0, "backlog": 0, "waiting": ""}
    rest |= {"estimated": False, "starting": [], "tokens_per_s": 0.0, "bytes_per_s": 0.0, "seconds_left": None}
    assert first == {"event": "progress", "total": 4, "done": 1, "tokens": 9, **rest}
    assert (second["event"], second["total"]) == ("progress", None) and third == {"event": "x"}
    people = io.StringIO()
    Progress(False, people).say({"event": "x"}, "shown")
    Progress(False, people).say({"event": "x"})
    assert people.getvalue() == "shown\n"


def test_a_budget_without_limits_always_has_room_and_one_with_them_counts_the_largest(tmp_path: Path) -> None:
    assert Budget(tmp_path).allows(1000)
    now = [0.0]
    budget = Budget(tmp_path, max_bytes=3 * 5096, clock=lambda: now[0])
    assert budget.allows(0) and not budget.allows(1), "only one prompt until the first store"
    budget.stored(1000)  # plus 4,096 bytes for the document
    assert budget.allows(0) and budget.allows(1) and not budget.allows(2)
    budget.stored(904)
    assert budget.allows(0) and not budget.allows(1), "each prompt must count as the largest store"
    now[0] = 1.0
    assert budget.allows(1), "the measurement must find no stores"


def test_positions_are_a_set_of_numbers() -> None:
    found = Positions()
    numbers = [0, 7, 8, 31, 1000]
    assert [found.add(n) for n in numbers] == [True] * 5 and [found.add(n) for n in numbers] == [False] * 5
    assert list(found) == numbers and len(found) == 5
    assert [found.below(n) for n in (None, 0, 1, 7, 8, 9, 31, 32, 1000, 1001, 9999)] == [
        5,
        0,
        1,
        1,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
    ]
    for gone in (8, 8, 30, 5000):
        found.discard(gone)
    assert list(found) == [0, 7, 31, 1000] and len(found) == 4
    assert [n in found for n in (0, 1, 8, 31, 1000, 1001, 10**6)] == [True, False, False, True, True, False, False]


def test_positions_one_after_another_are_all_kept() -> None:
    found = Positions()
    assert all(found.add(position) for position in range(300))
    assert not any(found.add(position) for position in range(300)) and len(found) == 300 and 300 not in found
