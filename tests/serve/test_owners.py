# SPDX-License-Identifier: Apache-2.0
"""Differences between the owners of rows over HTTP, and requests that reach every engine of a server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from openai import BadRequestError

from dmi_connector import open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.check import check_store
from tests.engine.harness import prompt as tokens
from tests.serve.conftest import MODEL, Server
from tests.serve.test_serve import HOOKS, TEXT, body, finished


@pytest.fixture(scope="module")
def twin(oracle: Callable[..., Oracle]) -> Oracle:
    return oracle("qwen3")


def test_a_stop_string_at_the_first_token_keeps_the_rows_of_the_prompt(server: Server, twin: Oracle) -> None:
    """The API server aborts such a request, so its response does not name the store."""
    first = server.client.completions.create(model=MODEL, prompt=TEXT, max_tokens=1, temperature=0).choices[0].text
    assert first, "no text to stop at"
    reply = server.client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=400, temperature=0, stop=[first], extra_body=body("stop")
    )
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    assert reply.model_extra.get("kv_transfer_params") is None
    prompt, generated = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    [found] = finished(server, "stop", 1)
    capture = open_capture(found.store)
    held = capture.token_ids.tolist()
    # The engine may have computed a few more tokens before the abort reached it. The store has their rows.
    assert held[: len(prompt)] == prompt and len(prompt) <= len(held) < len(prompt) + 400, len(held)
    assert [*held, *generated][: len(prompt) + 1] == [*prompt, *generated]
    check_store(found.store, twin, [*held, *twin.greedy(held, 1)], len(prompt), HOOKS)


def test_requests_that_vllm_refuses_with_a_draft_work_with_the_target(server: Server, twin: Oracle) -> None:
    asks = {
        "logit-bias": ({"logit_bias": {"77": 100.0}, "temperature": 0}, {}),
        "min-p": ({"temperature": 1.0}, {"min_p": 1.0}),
        "force": ({"temperature": 0}, {"vllm_xargs": {"force": 99}}),
    }
    for key, (fields, more) in asks.items():
        call = partial(
            server.client.completions.create,
            model=MODEL,
            prompt=TEXT,
            max_tokens=12,
            **fields,
            extra_body=body(key, **more),
        )
        if server.owner == "draft":
            if key != "force":  # vLLM refuses to start with a processor, so there is none
                with pytest.raises(BadRequestError, match="speculative decoding"):
                    call()
            continue
        [choice] = call().choices
        prompt, generated = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
        wanted = {"logit-bias": [77] * 12, "force": [99] * 12, "min-p": twin.greedy(prompt, 12)}[key]
        assert generated == wanted, key
        [found] = finished(server, key, 1)
        check_store(found.store, twin, [*prompt, *generated], len(prompt), HOOKS, greedy=key == "min-p")


def test_parallel_requests_have_a_store_each(server: Server, twin: Oracle) -> None:
    """With owner target, two data-parallel engines share the directory."""

    def ask(index: int) -> Any:
        prompt = tokens(20 + index, index)
        return server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=30, temperature=0, extra_body=body(f"parallel-{index}")
        )

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, range(16)))
    for index, reply in enumerate(replies):
        [found] = finished(server, f"parallel-{index}", 1)
        assert str(found.store) == reply.model_extra["kv_transfer_params"]["dmi_store"]
        whole = [*tokens(20 + index, index), *reply.choices[0].model_extra["token_ids"]]
        check_store(found.store, twin, whole, 20 + index, HOOKS)
