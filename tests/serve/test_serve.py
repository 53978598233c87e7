# SPDX-License-Identifier: Apache-2.0
"""A real server and the openai client: stores of every kind of request can be found and have the right values."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dmi_connector import find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.store.read.index import CaptureInfo
from tests.engine.check import check_store, hooks_of, reference, same
from tests.engine.faults import processes, stopped, until
from tests.serve.conftest import MODEL, Server

HOOKS = hooks_of("qwen3")
TEXT = "the model reads a prompt and answers with one token after another, and every layer adds something"


def body(key: str | None = None, **more: Any) -> dict[str, Any]:
    """The extra_body of a request that captures generated tokens and returns token ids."""
    params: dict[str, Any] = {"include_output_tokens": True}
    if key is not None:
        params["dmi"] = {"key": key}
    return {"kv_transfer_params": params, "return_token_ids": True, "ignore_eos": True, **more}


def finished(server: Server, key: str, count: int) -> list[CaptureInfo]:
    """Wait until `count` captures of `key` are finished, then return all of them."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        found = find_captures(server.store_dir, key=key)
        if sum(c.state != "started" for c in found) >= count:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{count} finished captures of {key!r} were expected: {found}")


@pytest.fixture(scope="module")
def twin(oracle: Callable[..., Oracle]) -> Oracle:
    return oracle("qwen3")


def test_a_completion_gives_a_correct_store_found_by_key_and_request_id(server: Server, twin: Oracle) -> None:
    reply = server.client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=40, temperature=0, extra_body=body("completion")
    )
    [choice] = reply.choices
    params = reply.model_extra["kv_transfer_params"]
    tokens = [*choice.model_extra["prompt_token_ids"], *choice.model_extra["token_ids"]]
    assert len(choice.model_extra["token_ids"]) == 40
    check_store(Path(params["dmi_store"]), twin, tokens, len(choice.model_extra["prompt_token_ids"]), HOOKS)
    [found] = finished(server, "completion", 1)
    assert (str(found.store), found.state) == (params["dmi_store"], "complete")
    assert find_captures(server.store_dir, request_id=reply.id) == [found]


def test_a_chat_gives_a_correct_store_found_by_request_id(server: Server, twin: Oracle) -> None:
    messages = [{"role": "user", "content": TEXT}]
    reply = server.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=20, temperature=0, extra_body=body()
    )
    params, prompt = reply.model_extra["kv_transfer_params"], reply.model_extra["prompt_token_ids"]
    tokens = [*prompt, *reply.choices[0].model_extra["token_ids"]]
    assert len(tokens) == len(prompt) + 20
    check_store(Path(params["dmi_store"]), twin, tokens, len(prompt), HOOKS)
    [found] = find_captures(server.store_dir, request_id=reply.id)
    assert str(found.store) == params["dmi_store"]


def test_the_store_of_a_streamed_completion_is_found_by_key(server: Server, twin: Oracle) -> None:
    prompt: list[int] = []
    generated: list[int] = []
    with server.client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=30, temperature=0, stream=True, extra_body=body("stream")
    ) as stream:
        for event in stream:
            for choice in event.choices:
                prompt += choice.model_extra.get("prompt_token_ids") or []
                generated += choice.model_extra.get("token_ids") or []
    assert len(generated) == 30
    [found] = finished(server, "stream", 1)
    check_store(found.store, twin, [*prompt, *generated], len(prompt), HOOKS)


def test_both_children_of_a_request_with_n_2_have_a_store_each(server: Server, twin: Oracle) -> None:
    reply = server.client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=16, temperature=0.9, n=2, extra_body=body("pair")
    )
    prompt = reply.choices[0].model_extra["prompt_token_ids"]
    wanted = {tuple([*prompt, *c.model_extra["token_ids"]]) for c in reply.choices}
    assert len(wanted) == 2, "equal children: the test cannot detect swapped stores"
    check_each(finished(server, "pair", 2), wanted, {tokens: len(prompt) for tokens in wanted}, twin)


def test_both_prompts_of_one_call_have_a_store_each(server: Server, twin: Oracle) -> None:
    reply = server.client.completions.create(
        model=MODEL,
        prompt=[TEXT, "hello world"],
        max_tokens=16,
        temperature=0.9,
        extra_body=body("list"),
    )
    lengths = {
        (*c.model_extra["prompt_token_ids"], *c.model_extra["token_ids"]): len(c.model_extra["prompt_token_ids"])
        for c in reply.choices
    }
    assert len(set(lengths.values())) == 2
    check_each(finished(server, "list", 2), set(lengths), lengths, twin)


def check_each(
    found: list[CaptureInfo], wanted: set[tuple[int, ...]], lengths: dict[tuple[int, ...], int], twin: Oracle
) -> None:
    """Check that each of `wanted` (prompt and generated tokens) has exactly one store with the right values."""
    assert [c.state for c in found] == ["complete"] * len(wanted), found
    by_rows = {tuple(open_capture(c.store).token_ids.tolist()): c.store for c in found}
    assert set(by_rows) == {tokens[:-1] for tokens in wanted}
    for tokens in wanted:
        check_store(by_rows[tokens[:-1]], twin, tokens, lengths[tokens], HOOKS, greedy=False)


def leave(server: Server, key: str) -> tuple[list[int], list[int]]:
    """Begin a long streamed completion, and disconnect. Returns the prompt and the generated tokens that arrived.

    The engines are stopped until the server has noticed the disconnect, at most for a minute. The request may already
    have ended.
    """
    prompt: list[int] = []
    seen: list[int] = []
    aborted = server.log.read_text().count(" aborted.")
    stream = server.client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=440, temperature=0, stream=True, extra_body=body(key)
    )
    for event in stream:
        for choice in event.choices:
            prompt += choice.model_extra.get("prompt_token_ids") or []
            seen += choice.model_extra.get("token_ids") or []
        if len(seen) >= 5:
            break
    with stopped(processes("EngineCore", server.pid)):
        stream.close()
        with suppress(AssertionError):
            until(
                lambda: server.log.read_text().count(" aborted.") > aborted,
                "the server has not noticed the disconnect",
                60,
            )
    return prompt, seen


def test_a_client_that_disconnects_leaves_a_store_that_lists_its_rows(server: Server, twin: Oracle) -> None:
    for attempt in range(10):
        prompt, seen = leave(server, f"gone-{attempt}")
        [found] = finished(server, f"gone-{attempt}", 1)
        capture = open_capture(found.store, allow_incomplete=True)
        if "length" not in capture.attrs["finish_reason"].lower():
            break  # otherwise the request ended before the client disconnected
    held = capture.token_ids.tolist()
    assert "abort" in capture.attrs["finish_reason"].lower(), capture.attrs
    assert capture.complete == (found.state == "complete") == (capture.reason is None) == (not capture.missing)
    known = [*prompt, *seen]
    assert len(prompt) < len(held) < len(prompt) + 439, f"{len(held)} rows: the request was not aborted"
    assert held[: len(known)] == known[: len(held)]
    assert capture.positions.tolist() == list(range(len(held)))
    want = reference(twin, held)
    for hook in HOOKS:
        if hook == "logits":
            expected = want[hook][capture.logits_positions]
        else:
            expected = want[hook] if len(want[hook]) > 1 else want[hook][0]
        same(capture.numpy(hook), expected, f"{found.store.name}: {hook}")


def test_a_bad_option_is_answered_and_the_server_continues(server: Server, twin: Oracle) -> None:
    before = set(server.store_dir.glob("*.zarr*"))
    reply = server.client.completions.create(
        model=MODEL,
        prompt="hello",
        max_tokens=4,
        extra_body={"kv_transfer_params": {"dmi": {"hooks": "resid_per"}}},
    )
    assert len(reply.choices) == 1 and reply.usage.completion_tokens >= 1
    assert "did you mean 'resid_pre'" in reply.model_extra["kv_transfer_params"]["dmi_error"]
    assert set(server.store_dir.glob("*.zarr*")) == before
    test_a_chat_gives_a_correct_store_found_by_request_id(server, twin)


def metrics(server: Server) -> list[Sample]:
    """The metrics of captures in GET /metrics."""
    with urllib.request.urlopen(str(server.client.base_url.copy_with(path="/metrics"))) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return [sample for family in families for sample in family.samples if sample.name.startswith("vllm:dmi_")]


def counters(server: Server) -> dict[str, float]:
    """The counters without labels."""
    samples = metrics(server)
    return {n: sum(s.value for s in samples if s.name == f"vllm:dmi_{n}_total") for n in COUNTED}


COUNTED = ("captures_started", "captures_complete", "captures_refused", "exported_bytes", "raw_bytes", "stored_bytes")


def test_metrics_count_captures(server: Server) -> None:
    def ask(key: str | None = None, **dmi: Any) -> None:
        kv = {"kv_transfer_params": {"dmi": dmi}} if key is None else body(key)
        server.client.completions.create(model=MODEL, prompt=TEXT, max_tokens=8, extra_body=kv)

    for _ in range(8):  # in these steps, each data-parallel engine reports the captures of earlier tests
        ask(enabled=False)
    time.sleep(1)
    before = counters(server)
    ask("counted")
    [found] = finished(server, "counted", 1)
    ask(hooks="resid_per")
    deadline = time.monotonic() + 600
    while (after := counters(server))["captures_complete"] == before["captures_complete"]:
        assert time.monotonic() < deadline, after
        ask(enabled=False)
    grown = {name: after[name] - before[name] for name in COUNTED}
    assert [grown[name] for name in COUNTED[:3]] == [1, 1, 1], grown
    capture = open_capture(found.store)
    raw = sum(capture.array(hook).nbytes for hook in HOOKS)
    assert grown["raw_bytes"] == raw <= grown["exported_bytes"] and 0 < grown["stored_bytes"] < raw
    backlog = [sample for sample in metrics(server) if sample.name == "vllm:dmi_backlog_bytes"]
    assert backlog and all(sample.value >= 0 and sample.labels["rank"] == "0" for sample in backlog)
