# SPDX-License-Identifier: Apache-2.0
"""Every hook of every architecture, captured by an engine and compared with transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.unembedding import Unembedding, log_softmax
from dmi_connector.cli.tiny_models import ARCHS, make_model
from tests.engine import check_reduced
from tests.engine.check import attention_weights, check_store, hooks_of, reference, same
from tests.engine.conftest import LENGTHS
from tests.engine.harness import ALL_HOOKS, BLOCK, SMALL, Ask, Run, engine, generate, prompt
from tests.runner import ATOL

# `make soak` compiles all, and also tests mistral, which is like llama. For `make test`, see the last test here
# and test_compiled_tokens.py.
_LONG = [
    *((name, "compiled", "draft") for name in ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "gpt2")),
    ("mistral", "eager", "draft"),
    ("qwen3", "compiled", "target"),
    ("qwen3", "compiled", "pool"),
    ("gpt2", "compiled", "target"),
    ("gpt2", "eager", "target"),
    ("qwen3_moe", "compiled", "pool"),
    ("gpt2", "eager", "pool"),
]
CONFIGURATIONS: list[Any] = [
    ("qwen3", "eager", "draft"),
    ("qwen2", "eager", "draft"),
    ("llama", "eager", "target"),
    ("qwen3_moe", "eager", "draft"),
    ("gpt2", "eager", "draft"),
    *(pytest.param(one, marks=pytest.mark.soak) for one in _LONG),
]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids="-".join)
def configuration(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param


@pytest.fixture(scope="module")
def arch(configuration: tuple[str, str, str]) -> str:
    return configuration[0]


@pytest.fixture(scope="module")
def run(configuration: tuple[str, str, str], core_run: Callable[..., Run]) -> Run:
    return core_run(*configuration)


@pytest.fixture(scope="module")
def twin(arch: str, oracle: Callable[..., Oracle]) -> Oracle:
    return oracle(arch)


def check(run: Run, name: str, twin: Oracle, arch: str, **options: Any) -> None:
    tokens, prompt_len = run.tokens(name), len(run.replies[name].prompt_token_ids)
    check_store(run.store(name), twin, tokens, prompt_len, hooks_of(arch), **options)


@pytest.mark.parametrize("name", ARCHS)
def test_no_two_hooks_or_layers_have_nearly_the_same_values(name: str, oracle: Callable[..., Oracle]) -> None:
    values = oracle(name).run(prompt(40))
    rows = {
        f"{hook} layer {layer}": value
        for hook in hooks_of(name)
        for layer, value in enumerate(values[hook] if values[hook].ndim == 3 else values[hook][None])
        if hook not in ("topk_ids", "topk_weights")
    }
    if name != "gpt2":  # without position embeddings, the first layer reads the token embedding itself
        del rows["embed layer 0"]
    for (a, x), (b, y) in combinations(rows.items(), 2):
        if x.shape == y.shape:
            # Rotary does not change position 0.
            assert np.abs(x - y)[1:].max(-1).min() > 0.01, f"{a} is too close to {b}"


def test_prompts_that_end_near_chunk_and_block_edges_have_right_values(run: Run, twin: Oracle, arch: str) -> None:
    assert run.block_size == BLOCK, "no length is next to a block edge"
    for length in LENGTHS:
        check(run, f"len{length}", twin, arch)


def test_a_long_prompt_is_prefilled_in_several_steps(run: Run) -> None:
    request = run.replies["len300"].kv_transfer_params["dmi_request_id"]
    prefill = [step[request] for step in run.steps if step.get(request, 0) > 1]
    assert sum(prefill) == 300 and len(prefill) >= 3, prefill


@pytest.mark.parametrize("name", ["again", "shared"])
def test_prefix_cache_hits_export_the_shared_rows(run: Run, twin: Oracle, arch: str, name: str) -> None:
    """A pool borrows these rows from the capture that computed them."""
    assert run.replies[name].num_cached_tokens == 2 * BLOCK, "no prefix-cache hit"
    check(run, name, twin, arch)


@pytest.mark.parametrize(("name", "hit"), [("scored", 0), ("scored-hit", 2 * BLOCK)])
def test_prompt_logprobs_take_no_row_of_logits(run: Run, twin: Oracle, arch: str, name: str, hit: int) -> None:
    """vLLM computes the logits of prompt tokens in the same steps."""
    assert run.replies[name].num_cached_tokens == hit, "another hit than this test needs"
    check(run, name, twin, arch)


def test_logits_of_prompt_tokens_come_from_the_residual_stream(
    run: Run, arch: str, tiny_model: Callable[..., Path]
) -> None:
    """The logits equal vLLM's own prompt logprobs, as docs/CAPTURING.md says."""
    end, theirs = Unembedding.load(tiny_model(arch)), run.replies["scored"].prompt_logprobs
    rows = open_capture(run.store("scored"), timeout=300).numpy("resid_final", tokens=slice(0, 300))
    mine = log_softmax(end.logits(rows))
    assert theirs is not None and len(theirs) == len(mine) == 300
    for position, of_tokens in enumerate(theirs[1:], 1):
        assert of_tokens
        for token, logprob in of_tokens.items():
            assert abs(mine[position - 1, token] - logprob.logprob) <= ATOL, f"{position}: {token}"


def test_every_child_of_n_3_has_its_own_store(run: Run, twin: Oracle, arch: str) -> None:
    found = find_captures(run.store_dir, key="three")
    assert [c.state for c in found] == ["complete"] * 3, found
    by_child = {int(str(c.request_id).split("_")[0]): c.store for c in found}
    assert sorted(by_child) == [0, 1, 2], by_child
    texts = {tuple(run.replies["three"].outputs[child].token_ids) for child in by_child}
    assert len(texts) == 3, "equal children: the test cannot detect swapped stores"
    for child, store in by_child.items():
        check_store(store, twin, run.tokens("three", child), 129, hooks_of(arch), greedy=False)


@pytest.mark.parametrize(("name", "length"), [("only33", 33), ("only300", 300)])
def test_without_output_tokens_exactly_the_prompt_is_stored(
    run: Run, twin: Oracle, arch: str, name: str, length: int
) -> None:
    check(run, name, twin, arch, rows=(0, length))


def test_rows_end_at_an_early_stop(run: Run, twin: Oracle, arch: str) -> None:
    reply = run.replies["stop"]
    assert reply.outputs[0].finish_reason == "stop" and 1 <= len(reply.outputs[0].token_ids) <= 5, reply
    check(run, "stop", twin, arch)


def test_a_single_generated_token_has_no_row(run: Run, twin: Oracle, arch: str) -> None:
    assert len(run.replies["one"].outputs[0].token_ids) == 1
    check(run, "one", twin, arch, rows=(0, 40))


def test_each_request_gets_one_token_per_decode_step(run: Run) -> None:
    assert run.drafts == 0, f"{run.drafts} draft tokens were scheduled"
    for name, reply in run.replies.items():
        request = reply.kv_transfer_params["dmi_request_id"]
        if name == "three":  # its response names only one child, with the child's number as a prefix
            continue
        steps = [step[request] for step in run.steps if request in step]
        prefill = len(reply.prompt_token_ids) - reply.num_cached_tokens
        outputs = len(reply.outputs[0].token_ids)
        done = np.cumsum(steps)
        assert prefill in done, f"{name}: no step ends with the prompt: {steps}"
        decode = steps[int(np.flatnonzero(done == prefill)[0]) + 1 :]
        assert set(decode) <= {1}, f"{name}: decode steps scheduled {decode}"
        # Asynchronous scheduling may schedule one more token before it sees the end.
        assert outputs - 1 <= len(decode) <= outputs, f"{name}: {len(decode)} decode steps for {outputs} tokens"


def test_logit_bias_and_min_p_work_where_no_draft_owns_the_rows(
    configuration: tuple[str, str, str], run: Run, twin: Oracle, arch: str
) -> None:
    if configuration[2] == "draft":
        pytest.skip("vLLM refuses both with a speculative config")
    assert list(run.replies["limits"].outputs[0].token_ids) == [77] * 12
    check(run, "limits", twin, arch, greedy=False)


def test_a_model_compiled_as_a_whole_has_right_rows_in_a_pool(known_models: None, tmp_path: Path) -> None:
    """vLLM compiles so on a CPU by default. One layer compiles faster than three."""
    model, run = make_model("qwen3", tmp_path / "model", num_hidden_layers=1), Run(tmp_path / "stores")
    reduce = {"mlp_post": "topk(8)", "ln1": "int8", "pattern": "attn(4)"}
    args: dict[str, Any] = capture_args(f"{ALL_HOOKS},pattern", run.store_dir, "pool", reduce=reduce, **SMALL)
    with engine(model, enforce_eager=False, **args) as llm:
        generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (33, 300)})
    twin = Oracle(model)
    for name, length in (("len33", 33), ("len300", 300)):
        capture, tokens = open_capture(run.store(name), timeout=300), run.tokens(name)
        want = reference(twin, tuple(tokens))
        assert set(capture.attrs["hooks"]) == {*hooks_of("qwen3"), "pattern"}
        for hook in hooks_of("qwen3"):
            exact, got = check_reduced.whole_rows(want[hook], hook, length, tokens), capture.numpy(hook)
            if hook in reduce:
                check_reduced.check(capture, hook, got, exact)
            else:
                same(got, exact.reshape(got.shape), hook)
        check_reduced.check_summaries(capture, attention_weights(model, tokens[:-1]), 4)
