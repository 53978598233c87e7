# SPDX-License-Identifier: Apache-2.0
"""Options of a request in kv_transfer_params: names, selections, requests without capture, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.check import check_store, hooks_of
from tests.engine.harness import ALL_HOOKS, CHUNK, SEGMENT, Ask, Run, engine, generate, prompt

LENGTH, TOTAL = 40, 52  # prompt tokens; prompt and generated tokens (51 rows)
SERVED = [hook for hook in hooks_of("qwen3") if hook != "ln1"]  # this server does not capture ln1


def asked(include: bool = True, **dmi: Any) -> Ask:
    return Ask(prompt(LENGTH), kv={"include_output_tokens": include, "dmi": dmi})


GOOD = {
    "plain": asked(),
    "key": asked(key="Probe-1.a_b"),
    "hooks": asked(hooks="q,mlp_out@0-1"),
    "hook list": asked(hooks=["attention", "-z"]),
    "last layer": asked(layers=[-1]),
    "layers": asked(layers=[0, -1], hooks="resid_pre,embed"),
    "tokens": asked(tokens=[10, 45]),
    "from": asked(tokens=[33, None]),
    "prompt part": asked(include=False, tokens=[35, 500]),
    "generated": asked(tokens=[44, 48]),
    "beyond": asked(tokens=[300, 400]),
    "spans": asked(loss_spans=[[0, 3], [30, 40]]),
    "path": Ask(prompt(LENGTH), kv={"include_output_tokens": True, "hidden_states_path": "/nowhere/a.safetensors"}),
}
# {request options: texts that the reason must contain: option, value and fix}
BAD: dict[str, tuple[Any, list[str]]] = {
    "unknown hook": ({"dmi": {"hooks": "mlp_pots"}}, ["hooks", "mlp_pots", "did you mean 'mlp_post'"]),
    "uncaptured hook": ({"dmi": {"hooks": "ln1"}}, ["hooks", "ln1", "not captured by this server"]),
    "hook of another model": (
        {"dmi": {"hooks": ["router_logits"]}},
        ["hooks", "router_logits", "no experts"],
    ),
    "hooks type": ({"dmi": {"hooks": 7}}, ["dmi.hooks", "7", "comma-separated string"]),
    "hook item type": ({"dmi": {"hooks": ["q", 7]}}, ["dmi.hooks", "7", "list of strings"]),
    "layer outside": ({"dmi": {"layers": [3]}}, ["dmi.layers", "3", "layers 0 to 2"]),
    "layer range": ({"dmi": {"hooks": "q@1-9"}}, ["hooks", "9", "layers 0 to 2"]),
    "layers type": ({"dmi": {"layers": "0"}}, ["dmi.layers", "'0'", "list of layer numbers"]),
    "huge layer": ({"dmi": {"layers": [2**63]}}, ["dmi.layers", str(2**63), "layers 0 to 2"]),
    "no layer left": (
        {"dmi": {"hooks": "q@0", "layers": [1]}},
        ["dmi.layers", "[1]", "none of the chosen hooks", "q@0"],
    ),
    "key path": ({"dmi": {"key": "../x"}}, ["dmi.key", "'../x'", "letters, digits"]),
    "key long": ({"dmi": {"key": "k" * 129}}, ["dmi.key", "kkk", "1 to 128"]),
    "key type": ({"dmi": {"key": ["a"]}}, ["dmi.key", "['a']", "letters, digits"]),
    "tokens empty": ({"dmi": {"tokens": [5, 5]}}, ["dmi.tokens", "[5, 5]", "larger than start"]),
    "tokens huge": ({"dmi": {"tokens": [0, 2**63]}}, ["dmi.tokens stop", str(2**63), "integer"]),
    "tokens negative": ({"dmi": {"tokens": [-1, 5]}}, ["dmi.tokens start", "-1", "integer"]),
    "tokens type": ({"dmi": {"tokens": "0:5"}}, ["dmi.tokens", "'0:5'", "[start, stop]"]),
    "spans beyond": (
        {"dmi": {"loss_spans": [[0, 3], [30, 41]]}},
        ["dmi.loss_spans", "[30, 41]", "beyond the 40 tokens of the prompt"],
    ),
    "enabled type": ({"dmi": {"enabled": "no"}}, ["dmi.enabled", "'no'", "true or false"]),
    "include type": ({"include_output_tokens": 1}, ["include_output_tokens", "1", "true or false"]),
    "unknown option": ({"dmi": {"hook": "q"}}, ["dmi", "'hook'", "did you mean 'hooks'"]),
    "dmi type": ({"dmi": [1]}, ["dmi", "[1]", "JSON object"]),
}


@pytest.fixture(scope="module")
def run(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("options"))
    args = capture_args(f"{ALL_HOOKS},-ln1", run.store_dir, chunk_tokens=CHUNK, segment_tokens=SEGMENT)
    del args["kv_transfer_config"]["kv_connector_module_path"]  # the plugin has registered the connector
    args["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2]
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(llm, run, {name: Ask(prompt(LENGTH), kv=kv) for name, (kv, _) in BAD.items()})
        generate(llm, run, {"off": asked(enabled=False, key="off")})
        run.facts["before"] = sorted(path.name for path in run.store_dir.iterdir())
        generate(llm, run, {"together": asked(), "bad": Ask(prompt(9), kv={"dmi": {"key": ""}})})
        generate(llm, run, GOOD)
    return run


@pytest.mark.parametrize("name", BAD)
def test_a_bad_option_is_answered_with_option_value_and_fix(run: Run, name: str) -> None:
    reply = run.replies[name]
    assert set(reply.kv_transfer_params) == {"dmi_error"}, reply.kv_transfer_params
    for part in BAD[name][1]:
        assert part in reply.kv_transfer_params["dmi_error"], f"{part!r} is not in the reason"
    assert len(reply.outputs[0].token_ids) == 12, "the request itself must continue"
    assert reply.outputs[0].token_ids == run.replies["plain"].outputs[0].token_ids


def test_refused_and_disabled_captures_leave_nothing_on_disk(run: Run) -> None:
    assert run.facts["before"] in ([], ["index.jsonl"]), run.facts["before"]
    assert run.replies["off"].kv_transfer_params is None
    assert find_captures(run.store_dir, key="off") == []
    stores = {path.name for path in run.store_dir.glob("*.zarr*")}
    assert stores == {run.store(name).name for name in ("together", *GOOD)}
    assert {c.store.name for c in find_captures(run.store_dir)} == stores


def test_responses_name_what_is_ignored(run: Run) -> None:
    """Ignored options: layer ids of the engine's configuration, and the path of a request."""
    said = {name: run.replies[name].kv_transfer_params["dmi_warning"] for name in ("plain", "path")}
    assert said["plain"].startswith("eagle_aux_hidden_state_layer_ids: [1, 2] have no effect")
    assert said["path"].startswith(f"{said['plain']}; hidden_states_path: '/nowhere/a.safetensors' is ignored")
    assert not Path("/nowhere").exists()


def test_spans_to_train_on_are_kept_as_given(run: Run) -> None:
    spans = {name: open_capture(run.store(name), 0).attrs.get("loss_spans") for name in ("spans", "plain")}
    assert spans == {"spans": [[0, 3], [30, 40]], "plain": None}


def test_a_bad_request_does_not_harm_its_neighbour(run: Run, oracle: Callable[..., Oracle]) -> None:
    assert "dmi.key" in run.replies["bad"].kv_transfer_params["dmi_error"]
    check_store(run.store("together"), oracle("qwen3"), run.tokens("together"), LENGTH, SERVED)


@pytest.mark.parametrize(
    ("name", "hooks", "rows", "layers"),
    [
        ("plain", SERVED, (0, 51), {}),
        ("path", SERVED, (0, 51), {}),
        ("key", SERVED, (0, 51), {}),
        ("hooks", ["q", "mlp_out"], (0, 51), {"mlp_out": [0, 1]}),
        ("hook list", ["q_rot", "k_rot", "v"], (0, 51), {}),
        ("layers", ["embed", "resid_pre"], (0, 51), {"resid_pre": [0, 2]}),
        ("last layer", SERVED, (0, 51), {hook: [2] for hook in SERVED}),
        ("tokens", SERVED, (10, 45), {}),
        ("from", SERVED, (33, 51), {}),
        ("prompt part", SERVED, (35, 40), {}),
        ("generated", SERVED, (44, 48), {}),
    ],
)
def test_a_narrowed_capture_holds_only_what_was_asked_for(
    run: Run,
    oracle: Callable[..., Oracle],
    name: str,
    hooks: list[str],
    rows: tuple[int, int],
    layers: dict[str, list[int]],
) -> None:
    assert len(run.tokens(name)) == TOTAL
    check_store(run.store(name), oracle("qwen3"), run.tokens(name), LENGTH, hooks, rows=rows, layers=layers)


def test_a_range_beyond_the_request_gives_an_empty_store(run: Run) -> None:
    capture = open_capture(run.store("beyond"), timeout=300)
    assert capture.complete and len(capture.token_ids) == 0
    assert capture.numpy("q").shape == (3, 0, 128) and capture.numpy("logits").shape[0] == 0


def test_captures_are_found_by_key_and_by_request_id(run: Run) -> None:
    [by_key] = find_captures(run.store_dir, key="Probe-1.a_b")
    reply = run.replies["key"].kv_transfer_params
    assert (by_key.store, by_key.key, by_key.state) == (run.store("key"), "Probe-1.a_b", "complete")
    assert reply["dmi_key"] == "Probe-1.a_b" and by_key.request_id == reply["dmi_request_id"]
    [by_id] = find_captures(run.store_dir, request_id=reply["dmi_request_id"])
    assert by_id == by_key
    assert find_captures(run.store_dir, key="Probe") == []
