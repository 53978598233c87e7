# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile in bf16, capturing every hook changes neither a token nor the last bit of a probability.

Inductor keeps fused intermediates in float32. A tap that made it round one of them would change what follows, so this
compares the log-probabilities of all generated tokens with plain vLLM's, exactly. Nor does capturing the residual
stream alone, whose layers one op then writes together; its rows are those of the capture of everything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmi_connector import capture_args, open_capture
from tests.engine.harness import ALL_HOOKS, Ask, Run, engine, generate, prompt

STREAM = "resid_pre,resid_mid,q,k"
LAYERS = 8
SAMPLING = {"max_tokens": 32, "logprobs": 1}
ASKS = {f"{n} tokens": Ask(prompt(n), sampling=SAMPLING) for n in (6, 33, 100, 150)} | {
    "seeded": Ask(prompt(9), sampling={**SAMPLING, "temperature": 0.8, "seed": 3})
}


@pytest.fixture(scope="module", params=["qwen3", pytest.param("llama", marks=pytest.mark.soak)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, known_models: None) -> Path:
    """Qwen3 norms q and k, Llama's are slices of one tensor."""
    from dmi_connector.tiny import make_model

    return make_model(request.param, tmp_path_factory.mktemp("compiled"), "bfloat16", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("plain-compiled"))
    with engine(model, dtype="bfloat16", enforce_eager=False) as llm:
        generate(llm, run, ASKS)
    return run


@pytest.fixture(scope="module")
def captured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """selection -> run; among its facts the layers from whose place in the rows on something was written."""
    from dmi_connector.engine import tap_op

    runs = {}
    for selection, owner in ((ALL_HOOKS, "draft"), (STREAM, "target")):
        runs[selection] = run = Run(tmp_path_factory.mktemp("captured-compiled"))
        before = list(tap_op._PLACES.values())
        args = capture_args(selection, run.store_dir, owner=owner)
        with engine(model, dtype="bfloat16", enforce_eager=False, **args) as llm:
            generate(llm, run, ASKS)
            places = [p for p in tap_op._PLACES.values() if not any(p is b for b in before)]
            run.facts["first layers"] = sorted({p.layer for p in places if p.taps})
    return runs


def test_several_layers_are_written_together(captured: dict[str, Run]) -> None:
    """12 of 13 values at a time: what is written counts from the first of three layers on."""
    assert captured[ALL_HOOKS].facts["first layers"] == list(range(LAYERS))
    assert captured[STREAM].facts["first layers"] == [0, 3, 6]


@pytest.mark.parametrize("selection", [ALL_HOOKS, STREAM], ids=["everything", "stream"])
@pytest.mark.parametrize("name", ASKS)
def test_tokens_and_probabilities_are_those_of_plain_vllm(
    plain: Run, captured: dict[str, Run], name: str, selection: str
) -> None:
    run = captured[selection]
    assert run.tokens(name) == plain.tokens(name)
    mine, theirs = (r.replies[name].outputs[0].cumulative_logprob for r in (run, plain))
    assert mine is not None and mine == theirs, f"{name}: cumulative log-probability {mine}, plain vLLM {theirs}"


@pytest.mark.parametrize("name", ASKS)
def test_layers_written_together_have_the_rows_they_have_apart(captured: dict[str, Run], name: str) -> None:
    apart, together = (open_capture(run.replies[name].kv_transfer_params["dmi_store"]) for run in captured.values())
    for hook in STREAM.split(","):
        for layer in range(LAYERS):
            one, other = (capture.numpy(hook, layer=layer) for capture in (apart, together))
            assert one.any(axis=1).all(), f"{hook} of layer {layer} has rows of zeros"
            assert np.array_equal(one, other), f"{hook} of layer {layer}: {np.abs(one - other).max():.3g} apart"
