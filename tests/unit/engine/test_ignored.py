# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM's own connector that have no effect here are named in responses and in the log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector import capture_args
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.scheduler.ignored import ignored_path
from dmi_connector.hooks import parse_selection
from tests.trackerkit import DIMS, ask, generate, make_tracker


def layers(hooks: str, ids: object, owner: str = "draft") -> str:
    """The warning about these layer ids of a model with three layers."""
    context: Any = SimpleNamespace(dims=DIMS, selection=parse_selection(hooks, DIMS))
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=ids))
    config: Any = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))
    return OWNERS[owner].ignored(config, context)


@pytest.mark.parametrize(
    ("hooks", "ids", "fix"),
    [
        ("hidden-states", [1, 2], "'resid_pre@1+2'"),
        ("hidden-states", [0, 3], "'resid_pre@0,resid_final'"),
        ("resid_pre@1", [2, 1], "'resid_pre@1+2'"),
        ("resid_pre@0", [3], "'resid_final'"),
        ("q", [1, 3], "'resid_pre@1,resid_final'"),
    ],
)
def test_layer_ids_of_other_layers_than_the_captured_ones_are_named(hooks: str, ids: list[int], fix: str) -> None:
    said = layers(hooks, ids)
    assert said.startswith(f"eagle_aux_hidden_state_layer_ids: {ids} have no effect, since hooks"), said
    assert f"set hooks to {fix} and the ids to [1]" in said


@pytest.mark.parametrize(
    ("hooks", "ids"),
    [("hidden-states", [3, 0, 1, 2]), ("resid_pre@1+2,q", (1, 2)), ("resid_final", [3]), ("q", [1]), ("q", None)],
)
def test_the_captured_layers_and_the_ids_of_capture_args_are_not(hooks: str, ids: object) -> None:
    assert layers(hooks, ids) == ""


def test_the_ids_of_capture_args_stand_for_no_layer(tmp_path: Path) -> None:
    draft = capture_args("q", tmp_path)["speculative_config"]["draft_model_config"]["hf_config"]
    assert layers("q", draft["eagle_aux_hidden_state_layer_ids"]) == ""
    assert layers("q", [1, 2], owner="target") == "", "owner target has no speculative config"


def test_a_path_of_a_request_is_named_in_its_response_and_once_in_the_log(
    tmp_path: Path, engine_log: list[str]
) -> None:
    tracker, responses = make_tracker(tmp_path, "resid_pre"), []
    for name, path in (("a", "/tmp/a.safetensors"), ("b", "/tmp/b.safetensors"), ("c", None)):
        request = ask({"hidden_states_path": path, "dmi": {"key": name}}, 20, name)
        tracker.on_new_request(request)  # type: ignore[arg-type]
        responses.append(generate(tracker, request, 2)[1] or {})
    said = [response.get("dmi_warning", "") for response in responses]
    assert said[0] == ignored_path({"hidden_states_path": "/tmp/a.safetensors"}) and "dmi.save_path" in said[0]
    assert said[0].startswith("hidden_states_path: '/tmp/a.safetensors' is ignored") and "/tmp/b" in said[1]
    assert not said[2] and all(response["dmi_store"] for response in responses)
    assert [message for message in engine_log if "ignored" in message] == [f"dmi: ignored in request 'a': {said[0]}"]
    tracker.warning = "of the engine"
    for kv, want in (({}, "of the engine"), ({"hidden_states_path": "/x"}, "of the engine; hidden_states_path: '/x'")):
        tracker.on_new_request(request := ask(kv, 20, "d"))  # type: ignore[arg-type]
        assert (generate(tracker, request, 2)[1] or {})["dmi_warning"].startswith(want)


def test_params_of_any_kind_are_looked_at() -> None:
    assert [ignored_path(params) for params in (None, 3, [], {}, {"hidden_states_path": None})] == [""] * 5
    assert len(ignored_path({"hidden_states_path": "x" * 10**6})) < 1000
