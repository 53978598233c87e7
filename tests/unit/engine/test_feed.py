# SPDX-License-Identifier: Apache-2.0
"""Fields of SamplingParams given with `dmi run --sampling`, which are checked before an engine starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.offline.feed import _refuse, _sampling
from dmi_connector.option_values import OptionError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_p": 0.5, "temperature": -1}, r"--sampling temperature: vLLM refuses -1: .*; correct it or leave it out"),
        ({"top_p": "0.9"}, "--sampling top_p: vLLM refuses '0.9'"),
        ({"tempreature": 0.5}, "--sampling tempreature: vLLM refuses 0.5"),
        ({"structured_outputs": {}}, "--sampling structured_outputs: vLLM refuses {}"),
        ({"structured_outputs": {"chioce": ["a"]}}, "--sampling structured_outputs: .*chioce"),
        ({"logit_bias": {"a": 1}}, "--sampling logit_bias: "),
        ({"min_tokens": 5, "stop": [""]}, "--sampling stop: "),
    ],
)
def test_the_field_that_vllm_refuses_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        _sampling(json.loads(json.dumps(fields)), 8)


def test_the_field_whose_removal_makes_the_others_valid_is_named() -> None:
    """`seed` is refused without `temperature`, but it is not the cause."""

    def check(fields: Mapping[str, Any]) -> None:
        if "seed" in fields and "temperature" not in fields:
            raise ValueError("a seed needs a temperature")
        if "stop" in fields:
            raise ValueError("stop needs text")

    with pytest.raises(OptionError, match="--sampling stop: vLLM refuses 'a': stop needs text"):
        _refuse({"seed": 1, "temperature": 1.0, "stop": "a"}, check)
    with pytest.raises(OptionError, match="--sampling seed: vLLM refuses 1: a seed needs a temperature"):
        _refuse({"seed": 1, "top_p": 0.5}, check)


def test_an_error_that_no_field_causes_is_raised_unchanged() -> None:
    def check(_fields: Mapping[str, Any]) -> None:
        raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        _refuse({}, check)


def test_fields_of_other_types_are_built_from_json() -> None:
    fields = json.loads('{"structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {"17": -5}}')
    params = _sampling(fields, 8)("k")
    assert params.structured_outputs.choice == ["yes", "no"] and params.logit_bias == {17: -5}
    assert params.extra_args["kv_transfer_params"]["dmi"] == {"key": "k"} and params.max_tokens == 8
    asked = _sampling({}, None)("k", {"loss_spans": [[0, 2]]}).extra_args["kv_transfer_params"]
    assert asked == {"include_output_tokens": False, "dmi": {"key": "k", "loss_spans": [[0, 2]]}}
