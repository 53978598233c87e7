# SPDX-License-Identifier: Apache-2.0
"""`dmi run` as a process: texts, chats and token ids, bad rows, the values in stores, prompts alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dmi_connector import open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.bulk.settings import RUN_NAME, settle
from dmi_connector.store.read.run_manifest import read_manifest
from tests import bulkprocess, programs
from tests.bulkprocess import TOKENS, check_whole, told, why
from tests.engine.faults import check_rows
from tests.engine.harness import prompt
from tests.forking.fork_workers import environment

MASK = [0, 0, 1, 1, 0, 0, 0, 1, 1]
CHOICES = ["what", "no"]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "what is it"}]


@dataclass
class Done:
    """A run: where its stores are, the token ids of its good rows, what it printed."""

    out: Path
    prompts: dict[int, list[int]]
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def done(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One run over rows of all kinds."""
    model, folder = tiny_model("qwen3"), tmp_path_factory.mktemp("bulk")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def chat(messages: Any, asks: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    rows: list[tuple[str, list[int] | None]] = [
        (
            json.dumps({"text": "what is the capital of france?", "id": "f"}),
            tokenizer.encode("what is the capital of france?"),
        ),
        (json.dumps({"prompt_token_ids": prompt(300)}), prompt(300)),
        ("{ no json", None),
        (json.dumps({"messages": CHAT}), chat(CHAT, False)),
        (json.dumps({"messages": CHAT[:1]}), chat(CHAT[:1], True)),
        (json.dumps({"prompt_token_ids": prompt(600)}), None),
        (json.dumps({"prompt_token_ids": [100_000]}), None),
        (json.dumps({"messages": [{"role": "user"}]}), chat([{"role": "user"}], True)),
        (json.dumps({"text": ["no", "text"]}), None),
    ]
    rows += [(json.dumps({"prompt_token_ids": prompt(20 + i, 1)}), prompt(20 + i, 1)) for i in range(40)]
    rows += [(json.dumps({"prompt_token_ids": prompt(9), "loss_mask": MASK}), prompt(9))]
    path = folder / "p.jsonl"
    path.write_text("\n".join(line for line, _ in rows) + "\n")
    more = ["--column", "prompt=text", "--json", "--sampling", json.dumps({"structured_outputs": {"choice": CHOICES}})]
    result = bulkprocess.run(model, path, folder / "out", *more)
    assert result.returncode == 0, why(folder / "out", result.stdout, result.stderr)
    prompts = {i: ids for i, (_, ids) in enumerate(rows) if ids is not None}
    return Done(folder / "out", prompts, told(result.stdout))


def test_every_good_row_is_in_one_store_and_one_line(done: Done) -> None:
    check_whole(done.out, done.prompts)
    ids = {entry["row"]: entry["id"] for entry in read_manifest(done.out / "manifest.jsonl")}
    assert ids == {row: "f" if row == 0 else None for row in done.prompts}


def test_a_mask_is_kept_as_spans(done: Done) -> None:
    spans = {}
    for entry in read_manifest(done.out / "manifest.jsonl"):
        with open_capture(done.out / entry["store"], 0) as capture:
            spans[entry["row"]] = capture.attrs.get("loss_spans")
    assert {row: found for row, found in spans.items() if found is not None} == {max(done.prompts): [[2, 4], [7, 9]]}


def test_bad_rows_are_listed_with_line_and_reason(done: Done) -> None:
    rejects = [json.loads(line) for line in (done.out / "rejects.jsonl").read_text().splitlines()]
    reasons = {entry["line"]: entry["reason"] for entry in rejects}
    assert sorted(reasons) == [3, 6, 7, 9]
    assert "not JSON" in reasons[3] and "512" in reasons[6] and "vocabulary" in reasons[7]
    assert "is not a string" in reasons[9]


def test_the_summary_and_progress_tell_what_was_done(done: Done) -> None:
    summary = done.events[-1]
    entries = list(read_manifest(done.out / "manifest.jsonl"))
    assert (summary["event"], summary["stored"], summary["rejected"]) == ("summary", len(done.prompts), 4)
    assert summary["tokens"] == sum(entry["prompt_tokens"] + entry["generated_tokens"] for entry in entries)
    assert summary["bytes"] == sum(entry["bytes"] for entry in entries) > 0
    last = [event for event in done.events if event["event"] == "progress"][-1]
    assert (last["done"], last["total"], last["backlog"]) == (len(done.prompts), 50, 0)


def test_stores_hold_the_values_of_the_model(done: Done, oracle: Callable[..., Oracle]) -> None:
    entries = {entry["row"]: entry for entry in read_manifest(done.out / "manifest.jsonl")}
    for row in (0, 1, 3, 4, 20):
        with open_capture(done.out / entries[row]["store"], timeout=0) as capture:
            assert set(capture.attrs["hooks"]) == {"resid_pre", "q", "logits"}
            assert check_rows(capture, oracle("qwen3")) == len(done.prompts[row]) + entries[row]["generated_tokens"] - 1
            assert entries[row]["generated_tokens"] <= TOKENS


def test_answers_follow_the_sampling_of_the_run(done: Done, tiny_model: Callable[..., Path]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model("qwen3"))
    for entry in read_manifest(done.out / "manifest.jsonl"):
        assert entry["generated_tokens"] > 0 and entry["finish_reason"] == "stop", entry
        answer = bulkprocess.tokens_of(done.out / entry["store"])[entry["prompt_tokens"] :]
        assert any(choice.startswith(tokenizer.decode(answer).strip()) for choice in CHOICES)


def test_other_settings_are_refused_before_an_engine_starts(
    done: Done, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = done.out.parent / "p.jsonl"
    result = bulkprocess.run(tiny_model("qwen3"), path, done.out, "--column", "prompt=text", "--codec", "lz4")
    assert result.returncode == 2 and "was begun with" in result.stderr and "'lz4'" in result.stderr, result.stderr


def test_flags_of_vllm_that_are_wrong(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """They end the run with vLLM's message."""
    bulkprocess.write_ids(tmp_path / "p.jsonl", 12)
    wrong = bulkprocess.run(tiny_model("qwen3"), tmp_path / "p.jsonl", tmp_path / "out", "--max-modle-len", "9")
    assert wrong.returncode == 2 and "unrecognized arguments: --max-modle-len" in wrong.stderr, wrong.stderr


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["forked", "started"])
def test_prompts_alone(tiny_model: Callable[..., Path], tmp_path: Path, fork: bool) -> None:
    """Without --max-tokens there are rows of the prompt only. `make soak` starts the run as a user does."""
    prompts, out = bulkprocess.write_ids(tmp_path / "p.jsonl", 12), tmp_path / "out"
    asked = bulkprocess.command(tiny_model("qwen3"), tmp_path / "p.jsonl", out, "--shuffle", "3")
    del asked[asked.index("--max-tokens") : asked.index("--max-tokens") + 2]
    if fork:
        result = programs.run(asked, bulkprocess.ROOT)
    else:  # as a user, but for the processes of the engine, which the run forks
        env = {**os.environ, **environment()}
        result = subprocess.run(asked, cwd=bulkprocess.ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, why(out, result.stderr)
    entries = list(read_manifest(out / "manifest.jsonl"))
    assert sorted(entry["row"] for entry in entries) == list(range(12))
    for entry in entries:
        assert (entry["generated_tokens"], entry["finish_reason"]) == (0, None)
        assert bulkprocess.tokens_of(out / entry["store"]) == prompts[entry["row"]]


def test_a_start_that_failed_says_why_and_binds_nothing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A layer that the model lacks is found by a worker of the engine. The mended command may take the same --out."""
    model, out = tiny_model("qwen3"), tmp_path / "out"
    bulkprocess.write_ids(tmp_path / "p.jsonl", 3)
    wrong = bulkprocess.run(model, tmp_path / "p.jsonl", out, "--hooks", "resid_pre@99")
    error = wrong.stderr
    assert wrong.returncode == 2, why(out, error)
    assert "engine 0 did not start: SelectionError: hooks: 'resid_pre@99' names layer 99, but" in error, error
    assert error.endswith("no engine could start: correct the error above and start again\n"), error
    assert "start the same command again" not in error and "root cause" not in error, error
    begun = json.loads((out / RUN_NAME).read_text())
    with settle(out, begun["settings"] | {"hooks": "resid_pre"}) as name:
        assert name != begun["run"]


def test_sampling_that_the_engine_refuses_ends_the_run_before_a_prompt_is_taken(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = tiny_model("qwen3"), tmp_path / "out"
    bulkprocess.write_ids(tmp_path / "p.jsonl", 3)
    wrong = bulkprocess.run(model, tmp_path / "p.jsonl", out, "--sampling", '{"allowed_token_ids": [100000]}')
    assert wrong.returncode == 2, why(out, wrong.stderr)
    assert "--sampling allowed_token_ids: vLLM refuses [100000]: " in wrong.stderr, wrong.stderr
    assert not (out / "rejects.jsonl").read_text()
