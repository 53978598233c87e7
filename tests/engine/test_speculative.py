# SPDX-License-Identifier: Apache-2.0
"""Captures with speculative decoding have only the rows of accepted tokens, and their values equal transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.check import check_store, hooks_of, reference, same
from tests.engine.drafts import RANDOM, K, Pair, drafting, make_pair
from tests.engine.harness import (
    ALL_HOOKS,
    SMALL,
    Ask,
    Run,
    finish,
    generate,
    prompt,
    step,
    submit,
    watch_scheduler,
)
from tests.runner import GPU, V2

if TYPE_CHECKING:
    from vllm import LLM

REPEATED = prompt(12) * 6
ASKS = {
    "repeated": Ask(REPEATED, sampling={"max_tokens": 100}),
    "plain": Ask(prompt(40), sampling={"max_tokens": 80}),
    "narrow": Ask(
        REPEATED + prompt(3), {"include_output_tokens": True, "dmi": {"tokens": [70, 110]}}, {"max_tokens": 60}
    ),
    "prompt": Ask(REPEATED, {"include_output_tokens": False}, {"max_tokens": 40}),
    **{f"len{n}": Ask(prompt(n)) for n in (1, 32, 127, 129, 300)},
    "one": Ask(prompt(40, seed=4), sampling={"max_tokens": 1}),
}
THREE = Ask(
    prompt(129, seed=2),
    {"include_output_tokens": True, "dmi": {"key": "three"}},
    {"n": 3, "temperature": 0.8, "max_tokens": 40},
)
PROMPT_ONLY = ("prompt",)
SAMPLED = ("three", "grammar", "seeded", "seeded-again")
"""Requests whose tokens are not the argmax of the model's logits."""
CACHE_BYTES = 128 << 20
"""Bytes of the KV cache: enough for all requests here. It is small, because watched rows are compared as a whole."""
WATCHED = 8
"""Number of steps in which the rows before and after the draft's forward are compared."""
KEYED = {"include_output_tokens": True, "dmi": {"key": "keyed"}}
CASES = ["ngram", "draft_model", "eagle3"]
LONG = [
    "ngram-compiled",
    "draft_model-compiled",
    "eagle3-compiled",
    "eagle",
    "mtp",
    "mtp-compiled",
    "dflash",
    "dflash-compiled",
]
LONG += ["ngram-pool", "eagle3-compiled-pool", "suffix", "suffix-compiled"]
if V2:
    # vLLM's V1 runner supports ngram_gpu only on a GPU. Compiled models are tested on V1.
    CASES, LONG = ["ngram_gpu", "draft_model", "eagle3", "eagle", "mtp", "dflash"], ["eagle3-pool"]
if GPU:
    LONG += [f"{case}-compiled" for case in CASES] + ["mtp-compiled-pool"]


def watch_samples(llm: LLM, run: Run) -> None:
    """Record the tokens that the worker returned for each request in each step."""
    scheduler, steps = llm.llm_engine.engine_core.engine_core.scheduler, run.facts.setdefault("samples", {})
    update = scheduler.update_from_output

    def recorded(scheduled: Any, output: Any) -> Any:
        for request_id, index in output.req_id_to_index.items():
            if tokens := output.sampled_token_ids[index]:
                steps.setdefault(request_id, []).append(list(tokens))
        return update(scheduled, output)

    scheduler.update_from_output = recorded


def watch_draft(llm: LLM, run: Run) -> None:
    """Record for some steps whether the draft's forward changed any row."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter = worker.model_runner.speculator if V2 else worker.model_runner.drafter
    connector: Any = get_kv_transfer_group()
    propose, changed = drafter.propose, run.facts.setdefault("changed", [])
    rows = connector.exporter.rows.view(torch.int64)  # compared in units of eight bytes

    def watched(*args: Any, **kwargs: Any) -> Any:
        if len(changed) >= WATCHED:
            return propose(*args, **kwargs)
        before = rows.clone()
        proposed = propose(*args, **kwargs)
        changed.append(not rows.equal(before))
        return proposed

    drafter.propose = watched


def lives(llm: LLM, run: Run) -> None:
    """Run requests that are aborted, have a grammar or a seed, or belong to a session, next to other requests."""
    from vllm.sampling_params import StructuredOutputsParams

    regex = StructuredOutputsParams(regex="(the model|reads a prompt| and )+")
    seeded = {"temperature": 0.8, "seed": 3, "max_tokens": 40}
    asks = {
        "aborted": Ask(REPEATED, KEYED, {"max_tokens": 300}),
        "bystander": Ask(REPEATED, sampling={"max_tokens": 90}),
    }
    grammar = {"structured_outputs": regex, "max_tokens": 60, "ignore_eos": False}
    if not V2:  # vLLM's V2 kernel for grammars does not run in Triton's interpreter
        asks["grammar"] = Ask(prompt(30), sampling=grammar)
    else:  # vLLM's V1 runner on a CPU fails on seeded requests with drafts
        asks |= {"seeded": Ask(prompt(50), sampling=seeded), "seeded-again": Ask(prompt(50), sampling=seeded)}
    submit(llm, asks)
    while "aborted" not in run.replies or len(run.replies["aborted"].outputs[0].token_ids) < 20:
        step(llm, run)
    llm.llm_engine.abort_request(["aborted"])
    finish((llm, run))
    talk(llm, run)


def talk(llm: LLM, run: Run) -> None:
    """Run a session of two turns. The second prompt has arrived before the first turn ends, after one step."""
    core = llm.llm_engine.engine_core.engine_core
    extra = {"kv_transfer_params": {"include_output_tokens": True, "dmi": {"key": "session"}}}

    def ask(tokens: list[int], most: int, resumable: bool = True) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, extra_args=extra)
        more: Any = {"block_hasher": core.request_block_hasher, "resumable": resumable}
        return Request("session", tokens, sampling, None, **more)

    session = ask(prompt(30, seed=7), 1)
    for request in (session, ask(REPEATED, 40), ask([0], 1, resumable=False)):
        core.add_request(request)
    while core.scheduler.has_requests():
        llm.llm_engine.step()
    run.facts["session"] = list(session.all_token_ids), session.num_prompt_tokens


@pytest.fixture(scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in LONG)])
def run(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    method, *more = request.param.split("-")
    compiled, owner = "compiled" in more, "pool" if "pool" in more else "target"
    run = Run(tmp_path_factory.mktemp("speculative"))
    pair = make_pair(method, tiny_model, tmp_path_factory.mktemp("draft"))
    run.facts |= {"pair": pair, "method": method, "compiled": compiled, "threads": [torch.get_num_threads()]}
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, **SMALL)
    with drafting(pair, enforce_eager=not compiled, kv_cache_memory_bytes=CACHE_BYTES, **args) as llm:
        watch_scheduler(llm, run)
        watch_samples(llm, run)
        watch_draft(llm, run)
        generate(llm, run, ASKS)
        # In a batch of its own: on a CPU, vLLM 0.32 samples greedy requests at random if the batch has sampled requests
        # and drafts.
        generate(llm, run, {"three": THREE})
        stop = run.replies["repeated"].outputs[0].token_ids[20]
        again = run.tokens("repeated")
        generate(
            llm,
            run,
            {
                "stopped": Ask(REPEATED, sampling={"max_tokens": 60, "stop_token_ids": [stop]}),
                "hit": Ask(again, sampling={"max_tokens": 40}),
                "short": Ask(REPEATED, sampling={"max_tokens": 6}),
                "scored": Ask(prompt(300), sampling={"prompt_logprobs": 1}),
            },
        )
        if request.param == CASES[0]:
            lives(llm, run)
    run.facts["threads"].append(torch.get_num_threads())
    return run


def test_every_store_is_complete_and_correct(run: Run, oracle: Callable[..., Oracle]) -> None:
    assert run.drafts, "nothing was drafted: this test shows nothing"
    pair: Pair = run.facts["pair"]
    arch = pair.arch
    for name, reply in run.replies.items():
        prompt_len = len(reply.prompt_token_ids)
        rows = {"narrow": (70, 110)}.get(name, (0, prompt_len) if name in PROMPT_ONLY else None)
        greedy = not pair.synthetic and name not in SAMPLED
        keyed = {"three": "three", "aborted": "keyed"}.get(name)
        stores = [c.store for c in find_captures(run.store_dir, key=keyed)] if keyed else [run.store(name)]
        outputs = {tuple(one.token_ids[:-1]): [*reply.prompt_token_ids, *one.token_ids] for one in reply.outputs}
        for store in stores:
            generated = tuple(open_capture(store).token_ids.tolist()[prompt_len:])
            tokens = outputs[generated] if name == "three" else run.tokens(name)
            options = {"rows": rows, "greedy": greedy, "by_number": arch == "glm4_moe"}
            check_store(store, oracle(arch), tokens, prompt_len, hooks_of(arch), **options)


def test_draft_index_tells_which_tokens_were_drafted(run: Run) -> None:
    most = 0
    for name, reply in run.replies.items():
        if name in ("three", "aborted", *PROMPT_ONLY):
            continue
        capture = open_capture(run.store(name))
        steps = run.facts["samples"][reply.kv_transfer_params["dmi_request_id"]]
        # all tokens of a step except the last were drafts
        numbers = [number for tokens in steps for number in (*range(1, len(tokens)), 0)]
        start, prompt_len = int(capture.attrs["start"]), capture.prompt_len
        end = start + int(capture.attrs["num_tokens"])
        assert capture.draft_index.tolist() == [*[0] * prompt_len, *numbers][start:end], name
        assert capture.attrs["speculative"] == {"method": run.facts["method"], "num_speculative_tokens": K}, name
        most = max(most, int(capture.draft_index.max(initial=0)))
        counts = capture.attrs["draft_tokens"]
        assert 0 <= counts["accepted"] <= counts["scheduled"] and counts["accepted"] >= np.count_nonzero(
            capture.draft_index
        )
    unlikely = run.facts["method"] in RANDOM and not run.facts["pair"].synthetic
    assert unlikely or most == K, "no step accepted all drafts"


def test_the_forward_of_a_draft_writes_no_row(run: Run) -> None:
    """This holds for any weights, such as those that a trainer loads while the engine serves."""
    assert run.facts["changed"] == [False] * WATCHED


@pytest.mark.parametrize("run", CASES[:1], indirect=True)
def test_the_process_has_no_more_threads_after_an_engine(run: Run) -> None:
    """Idle threads would spin during all later tests: see `NUMBA_NUM_THREADS` in conftest.py."""
    before, after = run.facts["threads"]
    assert before == after


@pytest.mark.parametrize("run", CASES[:1], indirect=True)
def test_aborts_grammars_and_seeds_act_as_without_drafts(run: Run) -> None:
    [aborted] = find_captures(run.store_dir, key="keyed")
    assert aborted.state == "complete" and open_capture(aborted.store).attrs["finish_reason"] == "abort"
    if V2:
        assert run.tokens("seeded") == run.tokens("seeded-again")
    else:
        assert len(run.replies["grammar"].outputs[0].token_ids) > 3, "with less to generate nothing is drafted"


@pytest.mark.parametrize("run", CASES[:1], indirect=True)
def test_each_turn_of_a_session_has_its_logits(run: Run, oracle: Callable[..., Oracle]) -> None:
    tokens, second = run.facts["session"]
    assert second == 30 + len(REPEATED)
    [found] = find_captures(run.store_dir, key="session")
    capture = open_capture(found.store)
    positions = [29, *range(second - 1, second + 39)]
    assert found.state == "complete" and capture.logits_positions.tolist() == positions
    want = reference(oracle(run.facts["pair"].arch), tokens)["logits"][positions]
    same(capture.numpy("logits"), want, "logits")
    assert capture.token_ids.tolist() == tokens[:-1] and capture.draft_index.any()


@pytest.mark.soak
@pytest.mark.parametrize("run", CASES[:2], indirect=True)
def test_tokens_are_those_of_a_stock_engine_with_the_same_draft(run: Run) -> None:
    stock = Run(run.store_dir / "none")
    pair: Pair = run.facts["pair"]
    with drafting(pair, enforce_eager=not run.facts["compiled"]) as llm:
        generate(llm, stock, {name: replace(ask, kv=None) for name, ask in ASKS.items()})
    for name in ASKS:
        assert stock.tokens(name) == run.tokens(name), name
    assert all(reply.kv_transfer_params is None for reply in stock.replies.values())
