# SPDX-License-Identifier: Apache-2.0
"""Request lifecycles with each owner: every store has exactly the rows of its own request.

An engine of each owner gets the same requests: prompts in uneven pieces, prefix hits, all ways to end, aborts at every
stage, and a crowd of mixed requests. During the crowd, two engines of one program run in turn. Preemption is in
test_preemption.py, tensor parallelism in test_tp2.py, HTTP and data parallelism in tests/serve. test_v2_runner.py runs
these tests again on vLLM's V2 runner.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.store.read.index import CaptureInfo
from tests.engine.check import check_store, hooks_of
from tests.engine.harness import (
    ALL_HOOKS,
    BLOCK,
    CHUNK,
    SMALL,
    Ask,
    Run,
    engine,
    finish,
    generate,
    prompt,
    step,
    submit,
    watch_scheduler,
)
from tests.runner import ASYNC, V2

if TYPE_CHECKING:
    from vllm import LLM

OWNERS = ("draft", "target", "pool")
HOOKS = hooks_of("qwen3")
BUDGET = 80
"""Tokens per step. Pieces of prompts do not end at the edges of chunks (32) and blocks (128)."""
LIMITS = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 64, "num_gpu_blocks_override": 200, "enforce_eager": True}
POOL_BYTES = 64 << 20
"""Bytes of the pool. Some requests of the crowd wait for free pages."""
PROCESSOR = f"tests.engine.force_token{'_v2' if V2 else ''}:ForceToken"
CROWD = int(os.environ.get("TEST_CROWD", 40))


def asked(name: str, ids: Sequence[int], include: bool = True, sampling: Any = None, **dmi: Any) -> dict[str, Ask]:
    """One request whose key is its name."""
    kv = {"include_output_tokens": include, "dmi": {"key": name, **dmi}}
    return {name: Ask(ids, kv, sampling or {})}


def prefixes(llm: LLM, run: Run) -> None:
    """Prompts that share a prefix with earlier ones, whose blocks are in the cache."""
    generate(llm, run, asked("first", prompt(250)) | asked("aligned", prompt(256, 1)))
    generate(llm, run, asked("hidden", prompt(256, 2), enabled=False) | asked("narrow", prompt(256, 3), hooks="q@1"))
    generate(
        llm,
        run,
        asked("whole-blocks", prompt(256, 1) + prompt(20))
        | asked("part-of-a-block", prompt(256, 1)[:200] + prompt(50))
        | asked("equal", prompt(250))
        | asked("equal-aligned", prompt(256, 1))
        | asked("next-turn", run.tokens("first") + prompt(30, 2))
        | asked("after-hidden", prompt(256, 2) + prompt(20, 3))
        | asked("after-narrow", prompt(256, 3) + prompt(20, 4)),
    )


def printable(llm: LLM, tokens: Sequence[int], first: int) -> str:
    """The text of the first printable token of tokens[first:] that does not occur in the text before it."""
    decode = llm.get_tokenizer().decode
    pieces = [decode([token]) for token in tokens]
    for index, piece in enumerate(pieces[first:], first):
        if piece.isascii() and piece.isprintable() and piece.strip() and piece not in decode(tokens[:index]):
            return piece
    raise AssertionError(f"no token of {pieces} makes a stop string: choose another prompt")


def ends(llm: LLM, run: Run) -> None:
    """Requests that end in every way except an abort."""
    generate(llm, run, asked("probe", prompt(33), sampling={"max_tokens": 24}))
    tokens = list(run.replies["probe"].outputs[0].token_ids)
    generate(
        llm,
        run,
        asked("stop-string", prompt(33), sampling={"max_tokens": 24, "stop": [printable(llm, tokens, 5)]})
        | asked("stop-token", prompt(33), sampling={"stop_token_ids": [tokens[4]]})
        | asked("stop-at-first", prompt(33), sampling={"stop_token_ids": [tokens[0]]})
        | asked("empty-text", prompt(33), sampling={"max_tokens": 24, "stop": [printable(llm, tokens[:1], 0)]})
        | asked("model-len", prompt(505), sampling={"max_tokens": 100})
        | asked("model-len-prompt", prompt(511), sampling={"max_tokens": 100})
        | asked("one", prompt(40), sampling={"max_tokens": 1})
        | asked("three", prompt(270, 5), sampling={"n": 3, "temperature": 0.8})
        | asked("logprobs", prompt(150, 5), sampling={"prompt_logprobs": 1, "logprobs": 2}),
    )


def aborts(llm: LLM, run: Run) -> None:
    """Abort requests before their first step, in prefill and in decode, while another request continues."""
    submit(llm, asked("bystander", prompt(90, 6), sampling={"max_tokens": 40}))
    submit(llm, asked("in-prefill", prompt(400, 6)))
    for _ in range(3):
        step(llm, run)
    submit(llm, asked("never", prompt(50, 6)))
    llm.llm_engine.abort_request(["in-prefill", "never"])
    submit(llm, asked("in-decode", prompt(45, 6), sampling={"max_tokens": 400}))
    while "in-decode" not in run.replies or len(run.replies["in-decode"].outputs[0].token_ids) < 10:
        step(llm, run)
    llm.llm_engine.abort_request(["in-decode"])
    finish((llm, run))


def crowd() -> dict[str, Ask]:
    """`CROWD` requests of all kinds: full captures, prompts only, without capture, selections of each kind, sampled."""
    rng = np.random.default_rng(7)
    asks: dict[str, Ask] = {}
    for index in range(CROWD):
        name, tokens = f"crowd-{index}", prompt(int(rng.integers(10, 40)), 100 + index)
        sampling = {"max_tokens": int(rng.integers(20, 50))}
        asks |= [
            asked(name, tokens, sampling=sampling),
            asked(name, tokens, include=False, sampling=sampling),
            asked(name, tokens, sampling=sampling, enabled=False),
            asked(name, tokens, sampling=sampling, hooks="q,mlp_out@0-1"),
            asked(name, tokens, sampling=sampling, tokens=[5, 30]),
            asked(name, tokens, sampling=sampling, layers=[-1]),
            asked(name, tokens, sampling={**sampling, "temperature": 0.8}),
            asked(name, prompt(200 + index, index), sampling=sampling),
        ][index % 8]
    return asks


def processors(llm: LLM, run: Run) -> None:
    """Requests with processors that change logits between compute_logits and the sampler."""
    generate(
        llm,
        run,
        asked("unbiased", prompt(70, 8))
        | asked("logit-bias", prompt(70, 8), sampling={"logit_bias": {77: 100.0}})
        | asked("min-p", prompt(70, 8), sampling={"temperature": 1.0, "min_p": 1.0})
        | asked("custom", prompt(70, 8), sampling={"extra_args": {"force": 99}}),
    )


def refusals(llm: LLM, run: Run) -> None:
    """The refusals of these processors with a speculative config. Only the V1 runner refuses custom processors."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor import build_logitsprocs

    def reason(call: Callable[[], Any]) -> str:
        with pytest.raises((ValueError, VLLMValidationError)) as caught:
            call()
        return str(caught.value)

    def refused(**sampling: Any) -> str:
        return reason(lambda: generate(llm, run, asked("refused", prompt(9), sampling=sampling)))

    config = llm.llm_engine.vllm_config
    run.facts["refused"] = {
        "min_p": refused(min_p=0.5, temperature=1.0),
        "logit_bias": refused(logit_bias={7: 1.0}),
        "trace_decode_token_ids": refused(trace_decode_token_ids=[7, 8]),
    }
    if V2:
        generate(llm, run, asked("custom", prompt(70, 8), sampling={"extra_args": {"force": 99}}))
    else:
        run.facts["refused"]["custom"] = reason(
            lambda: build_logitsprocs(config, config.device_config.device, False, False, [PROCESSOR])
        )


@pytest.fixture(scope="module")
def runs(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """An engine in this process for each owner. Beside the first one, another one runs in its own processes."""
    runs = {name: Run(tmp_path_factory.mktemp(f"lives-{name}")) for name in (*OWNERS, "beside")}

    def start(name: str, owner: str, in_process: bool = True) -> LLM:
        store_dir = runs[name].store_dir
        pool = {"pool_bytes": POOL_BYTES} if owner == "pool" else {}
        args: dict[str, Any] = capture_args(ALL_HOOKS, store_dir, owner, **SMALL, **pool)
        if owner != "draft" or V2:
            args["logits_processors"] = [PROCESSOR]
        return stack.enter_context(engine(tiny_model("qwen3"), in_process, fork=True, **args, **LIMITS))

    for owner in OWNERS:
        run = runs[owner]
        with ExitStack() as stack:
            beside = [(start("beside", "target", in_process=False), runs["beside"])] if owner == "draft" else []
            llm = start(owner, owner)
            watch_scheduler(llm, run)
            config = llm.llm_engine.vllm_config
            run.facts["runner"] = (config.use_v2_model_runner, config.scheduler_config.async_scheduling)
            prefixes(llm, run)
            ends(llm, run)
            aborts(llm, run)
            (refusals if owner == "draft" else processors)(llm, run)
            run.facts["alone"] = len(run.steps)
            for each, _ in (engines := [(llm, run), *beside]):
                submit(each, crowd())
            finish(*engines)
    return runs


@pytest.fixture(params=OWNERS)
def owner(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(runs: dict[str, Run], owner: str) -> Run:
    return runs[owner]


@pytest.fixture(scope="module")
def twin(oracle: Callable[..., Oracle]) -> Oracle:
    return oracle("qwen3")


def found(run: Run, name: str) -> CaptureInfo:
    [capture] = find_captures(run.store_dir, key=name)
    return capture


def check(run: Run, name: str, twin: Oracle, **options: Any) -> None:
    """Check that the only store with key `name` has the right rows of this request."""
    options.setdefault("hooks", HOOKS)
    check_store(found(run, name).store, twin, run.tokens(name), len(run.replies[name].prompt_token_ids), **options)


def pieces(run: Run, name: str) -> list[int]:
    """The number of tokens of this request in each of its steps."""
    request = found(run, name).request_id
    return [step[request] for step in run.steps if request in step]


def test_the_runner_is_the_one_asked_for(run: Run) -> None:
    assert run.facts["runner"] == (V2, ASYNC)


def test_prompts_computed_in_uneven_pieces_have_right_values(run: Run, twin: Oracle) -> None:
    assert pieces(run, "model-len-prompt") != [BUDGET] * 6 + [31], "the request was alone in its steps"
    for name, length in {"first": 250, "aligned": 256, "model-len-prompt": 511}.items():
        prefill = [count for count in pieces(run, name) if count > 1]
        assert sum(prefill) in (length, length - 1) and len(prefill) >= 4, f"{name}: {prefill}"
        check(run, name, twin)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("whole-blocks", 2),
        ("part-of-a-block", 1),
        ("equal", 1),
        ("equal-aligned", 1),  # the whole prompt is cached, and vLLM computes its last block again
        ("next-turn", 2),
        ("after-hidden", 2),
        ("after-narrow", 2),
    ],
)
def test_rows_of_cached_blocks_are_exported_again(run: Run, owner: str, twin: Oracle, name: str, blocks: int) -> None:
    """The pool keeps no rows of cached blocks. They are borrowed from an earlier store, or computed again."""
    hit = blocks * BLOCK
    computed = owner == "pool" and name in ("after-hidden", "after-narrow")
    assert run.replies[name].num_cached_tokens == (0 if computed else hit), "another hit than this test needs"
    attributes = open_capture(found(run, name).store).attrs
    told = {key: attributes[key] for key in ("recomputed_tokens", "borrowed_tokens") if key in attributes}
    assert told == ({} if owner != "pool" else {"recomputed_tokens" if computed else "borrowed_tokens": hit})
    check(run, name, twin)


@pytest.mark.parametrize("name", ["equal", "equal-aligned", "next-turn"])
def test_borrowed_rows_equal_those_of_their_source(runs: dict[str, Run], name: str) -> None:
    run = runs["pool"]
    mine = open_capture(found(run, name).store)
    source = mine.attrs["borrowed_from"]
    other, rows = open_capture(run.store_dir / source["store"]), slice(0, mine.attrs["borrowed_tokens"])
    assert (other.attrs["key"], other.attrs["request_id"]) == (source["key"], source["request_id"])
    assert np.array_equal(mine.token_ids[rows], other.token_ids[rows])
    for hook in sorted(set(mine) - {"logits"}):
        assert mine.numpy(hook, tokens=rows).tobytes() == other.numpy(hook, tokens=rows).tobytes(), hook


def test_a_store_of_a_pool_equals_that_of_the_target(runs: dict[str, Run]) -> None:
    """This request is alone in each of its steps, so both engines compute bit-equal values."""
    target, pool = (open_capture(found(runs[owner], "probe").store) for owner in ("target", "pool"))
    assert set(target) == set(pool) and set(HOOKS) <= set(target)
    for name in target:
        assert np.array_equal(target[name], pool[name], equal_nan=target[name].dtype.kind == "f"), name


def test_a_narrowed_capture_stays_narrow_and_a_disabled_one_has_no_store(run: Run, twin: Oracle) -> None:
    check(run, "narrow", twin, hooks=["q"], layers={"q": [1]})
    assert find_captures(run.store_dir, key="hidden") == []
    assert run.replies["hidden"].kv_transfer_params is None


@pytest.mark.parametrize(
    ("name", "reason", "generated"),
    [
        ("stop-string", "stop", range(5, 24)),
        ("stop-token", "stop", range(1, 6)),
        ("stop-at-first", "stop", [1]),
        ("empty-text", "stop", [1]),
        ("model-len", "length", [7]),
        ("model-len-prompt", "length", [1]),
        ("one", "length", [1]),
        ("logprobs", "length", [12]),
    ],
)
def test_rows_end_where_the_request_ends(
    run: Run, twin: Oracle, name: str, reason: str, generated: Sequence[int]
) -> None:
    [output] = run.replies[name].outputs
    assert output.finish_reason == reason and len(output.token_ids) in generated, output
    assert (output.text == "") == (name in ("stop-at-first", "empty-text")), output
    check(run, name, twin)


def test_each_child_has_its_own_store(run: Run, owner: str, twin: Oracle) -> None:
    stores = find_captures(run.store_dir, key="three")
    children = {int(str(c.request_id).split("_")[0]): c.store for c in stores}
    assert len(stores) == 3 and sorted(children) == [0, 1, 2], stores
    assert len({tuple(run.tokens("three", child)) for child in children}) == 3, (
        "equal children: the test cannot detect swapped stores"
    )
    for child, store in children.items():
        check_store(store, twin, run.tokens("three", child), 270, HOOKS, greedy=False)
    borrowed = sorted(open_capture(store).attrs.get("borrowed_tokens", 0) for store in children.values())
    assert borrowed == ([0, 2 * BLOCK, 2 * BLOCK] if owner == "pool" else [0, 0, 0])


def test_an_abort_before_the_first_step_leaves_nothing(run: Run) -> None:
    assert find_captures(run.store_dir, key="never") == []
    assert list(run.store_dir.glob("never*")) == []


def test_an_abort_in_prefill_keeps_the_rows_that_were_computed(run: Run, twin: Oracle) -> None:
    store = found(run, "in-prefill").store
    computed = sum(pieces(run, "in-prefill"))
    assert CHUNK < computed < 400 and computed % CHUNK, f"{computed} rows: the abort was not in the middle of a chunk"
    check_store(store, twin, prompt(400, 6), 400, HOOKS, rows=(0, computed), missing=[[computed, 400]])


def test_an_abort_in_decode_gives_a_whole_store(run: Run, twin: Oracle) -> None:
    assert not run.replies["in-decode"].finished and len(run.tokens("in-decode")) == 55
    check(run, "in-decode", twin)
    check(run, "bystander", twin)


@pytest.mark.parametrize("name", [*OWNERS, "beside"])
def test_each_of_many_mixed_requests_has_exactly_its_own_rows(runs: dict[str, Run], twin: Oracle, name: str) -> None:
    run = runs[name]
    if name in OWNERS:
        at_once = max(len(step) for step in run.steps[run.facts["alone"] :])
        assert at_once >= CROWD // 2, f"at most {at_once} requests in a step"
    for index in range(CROWD):
        name = f"crowd-{index}"
        length, rows = len(run.replies[name].prompt_token_ids), len(run.tokens(name)) - 1
        kind = index % 8
        if kind == 2:
            assert find_captures(run.store_dir, key=name) == []
            continue
        options: dict[int, dict[str, Any]] = {
            1: {"rows": (0, length)},
            3: {"hooks": ["q", "mlp_out"], "layers": {"mlp_out": [0, 1]}},
            4: {"rows": (5, min(30, rows))},
            5: {"layers": {hook: [2] for hook in HOOKS}},
            6: {"greedy": False},
        }
        check(run, name, twin, **options.get(kind, {}))


def test_all_engines_give_the_same_tokens(runs: dict[str, Run]) -> None:
    sampled = {"three", *(f"crowd-{index}" for index in range(6, CROWD, 8))}
    crowd = sum(index % 8 != 6 for index in range(CROWD))
    pairs = (("draft", "target", crowd + 14), ("draft", "beside", crowd), ("target", "pool", crowd + 14))
    for a, b, least in pairs:
        shared = set(runs[a].replies) & set(runs[b].replies) - sampled
        assert len(shared) >= least
        assert {n: runs[a].tokens(n) for n in shared} == {n: runs[b].tokens(n) for n in shared}


def test_every_request_has_one_store_and_no_other_exists(run: Run) -> None:
    silent = {"hidden", "never", *(f"crowd-{index}" for index in range(2, CROWD, 8))}
    expected = Counter({name: 1 for name in {*run.replies, "in-prefill"} - silent}) + Counter({"three": 2})
    captures = find_captures(run.store_dir)
    assert Counter(c.key for c in captures) == expected
    assert {c.key for c in captures if c.state != "complete"} == {"in-prefill"}
    assert {path.name for path in run.store_dir.glob("*.zarr*")} == {c.store.name for c in captures}


def test_logits_are_captured_before_processors_change_them(runs: dict[str, Run], twin: Oracle) -> None:
    run = runs["target"]
    wanted = {"logit-bias": [77] * 12, "custom": [99] * 12, "min-p": run.tokens("unbiased")[70:]}
    for name, tokens in wanted.items():
        assert run.tokens(name)[70:] == tokens
        check(run, name, twin, greedy=name == "min-p")
    check(run, "unbiased", twin)
    if V2:
        assert runs["draft"].tokens("custom") == run.tokens("custom")
        check(runs["draft"], "custom", twin, greedy=False)


def test_vllm_refuses_processors_where_the_draft_owns_the_rows(runs: dict[str, Run]) -> None:
    for name, reason in runs["draft"].facts["refused"].items():
        assert "speculative decoding" in reason, f"{name}: {reason}"
