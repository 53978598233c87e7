# SPDX-License-Identifier: Apache-2.0
"""Attention patterns rebuilt from stored queries and keys, against those of transformers' eager attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import Capture, open_capture
from tests.engine.check import attention_weights
from tests.engine.harness import Run

RUNS = [("qwen3", "eager", "draft"), ("llama", "eager", "target"), ("gpt2", "eager", "draft")]
"""Runs of test_hooks_vs_transformers.py."""


@pytest.fixture(params=RUNS, ids="-".join)
def captured(
    request: pytest.FixtureRequest, core_run: Callable[[str, str, str], Run], tiny_model: Callable[..., Path]
) -> tuple[Capture, list[np.ndarray]]:
    run = core_run(*request.param)
    capture = open_capture(run.store("len300"), timeout=300)
    return capture, attention_weights(tiny_model(request.param[0]), run.tokens("len300")[:-1])


def test_attention_is_that_of_transformers(captured: tuple[Capture, list[np.ndarray]]) -> None:
    capture, want = captured
    rows, model = len(capture.token_ids), capture.attrs["architecture"]
    assert capture.attrs["rotary"] == (model != "GPT2LMHeadModel")
    assert capture.attrs["qk_norm"] == (model == "Qwen3ForCausalLM")
    assert rows > 256, "more than one block of queries"
    for layer in range(len(want)):
        got = capture.attention(layer)
        assert got.shape == want[layer].shape == (capture.attrs["dims"]["heads"], rows, rows)
        np.testing.assert_allclose(got, want[layer], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(capture.attention(-1, head=1), capture.attention(len(want) - 1)[1])
    some = capture.attention(0, head=-1, queries=slice(100, 130))
    assert some.shape == (30, 130)
    np.testing.assert_allclose(some, want[0][-1, 100:130, :130], rtol=0, atol=1e-5)


def test_attention_that_cannot_be_rebuilt_is_refused(captured: tuple[Capture, list[np.ndarray]]) -> None:
    capture, _ = captured
    heads = capture.attrs["dims"]["heads"]
    with pytest.raises(ValueError, match=f"head {heads} does not exist: the model has heads 0 to {heads - 1}"):
        capture.attention(0, head=heads)
    with pytest.raises(ValueError, match="step 1"):
        capture.attention(0, queries=slice(0, 10, 2))
    capture.missing.append([4, 5])
    with pytest.raises(ValueError, match="lacks rows before the queries"):
        capture.attention(0)
    assert capture.attention(0, queries=slice(0, 4)).shape == (heads, 4, 4)
