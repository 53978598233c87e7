# SPDX-License-Identifier: Apache-2.0
"""Owners of rows. A further owner needs only a class and a line in each of two tables."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

import dmi_connector.engine
from dmi_connector import args, capture_args
from dmi_connector.engine import models
from dmi_connector.engine.connector import DMIPoolConnector
from dmi_connector.engine.owners import OWNERS, owner_of
from dmi_connector.engine.owners.pool import key_group
from dmi_connector.engine.owners.target import Target

ENGINE = Path(dmi_connector.engine.__file__).parent


class Made:
    """A fake model class of an owner, which vLLM loads by name."""


class Other(Target):
    """A further owner."""

    name: ClassVar[str] = "other"
    models: ClassVar[dict[str, str]] = {"MadeModel": f"{__name__}:Made"}

    def fits(self, vllm_config: Any) -> bool:
        return bool(vllm_config.other)


def config(
    method: str | None,
    *,
    v2: bool = True,
    runner: str = "generate",
    hybrid: bool = False,
    owner: str = "",
    sleep: bool = False,
    **more: Any,
) -> Any:
    """The parts of a configuration that owners read. method: that of a speculative config whose schedule has no drafts.
    owner: the option of the connector.
    """
    draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=["ExtractHiddenStatesModel"]))
    schedule = [[1, 8, 0]]
    speculative = SimpleNamespace(
        method=method, num_speculative_tokens_per_batch_size=schedule, draft_model_config=draft
    )
    scheduler = SimpleNamespace(max_num_scheduled_tokens=None, max_num_batched_tokens=64, enable_chunked_prefill=True)
    sleeps = {"enable_sleep_mode": sleep, "enable_cumem_allocator": False}
    model = SimpleNamespace(
        model="m", runner_type=runner, is_hybrid=hybrid, max_model_len=128, hf_text_config=SimpleNamespace(), **sleeps
    )
    return SimpleNamespace(
        **{
            "speculative_config": None if method is None else speculative,
            "use_v2_model_runner": v2,
            "scheduler_config": scheduler,
            "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
            "model_config": model,
            "kv_transfer_config": SimpleNamespace(kv_connector_extra_config={"owner": owner} if owner else {}),
            **more,
        }
    )


def test_the_arguments_of_each_owner_are_known_and_no_others() -> None:
    assert tuple(OWNERS) == args.OWNERS and all(OWNERS[name].name == name for name in OWNERS)


def test_the_arguments_of_one_engine_are_not_those_of_another() -> None:
    one, other = capture_args(), capture_args()
    one["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"].append(2)
    assert other == capture_args() != one


@pytest.mark.parametrize(
    ("method", "v2", "asked", "owner", "features"),
    [
        (None, True, "", "target", ["rows in the cache"]),
        ("ngram", True, "", "target", ["rows in the cache", "speculative decoding"]),
        (args.EXTRACT_HIDDEN_STATES, False, "", "draft", ["rows in the cache", "draft", "draft on the V1 runner"]),
        (args.EXTRACT_HIDDEN_STATES, True, "", "draft", ["rows in the cache", "draft", "draft on the V2 runner"]),
        (None, True, "pool", "pool", ["pool"]),
        (None, True, "hybrid pool", "pool", ["pool", "hybrid models"]),
        ("ngram", False, "pool", "pool", ["pool", "speculative decoding"]),
        (args.EXTRACT_HIDDEN_STATES, True, "pool", "pool", ["pool", "speculative decoding"]),
    ],
)
def test_the_configuration_tells_the_owner_and_what_it_uses(
    method: str | None, v2: bool, asked: str, owner: str, features: list[str]
) -> None:
    given = config(method, v2=v2, owner=asked.removeprefix("hybrid "), hybrid=asked.startswith("hybrid"))
    found = owner_of(given)
    assert (found.name, found.features(given)) == (owner, features)


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        (None, {}, ""),
        (None, {"runner": "pooling"}, ""),
        (None, {"hybrid": True}, "model: 'm' has Mamba or linear-attention layers.*owner='target' .*use owner='pool'"),
        (
            "medusa",
            {},
            "speculative_config: method 'medusa' may propose several tokens for a position; use one of ngram",
        ),
        (args.EXTRACT_HIDDEN_STATES, {}, ""),
        (args.EXTRACT_HIDDEN_STATES, {"hybrid": True}, "model: 'm' has Mamba .*owner='draft' .*use owner='pool'"),
        (args.EXTRACT_HIDDEN_STATES, {"runner": "pooling"}, "runner: with 'pooling', vLLM skips .*owner='target'"),
        (None, {"owner": "pool"}, ""),
        (None, {"owner": "pool", "hybrid": True}, ""),
        (None, {"owner": "pool", "sleep": True}, ""),
        (args.EXTRACT_HIDDEN_STATES, {"owner": "pool"}, "speculative_config: .*owner='draft' needs.*leave"),
        ("medusa", {"owner": "pool"}, "speculative_config: method 'medusa' may propose several tokens for a position"),
    ],
)
def test_an_owner_refuses_what_it_does_not_support(method: str | None, more: dict[str, Any], words: str) -> None:
    given = config(method, **more)
    if not words:
        return owner_of(given).check(given)
    with pytest.raises(ValueError, match=words):
        owner_of(given).check(given)


def groups(*specs: Any) -> Any:
    """The config of a cache with one group per spec."""
    made = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{i}"]) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=made)


def test_rows_follow_a_group_that_keeps_a_slot_for_each_token() -> None:
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    window = SlidingWindowSpec(block_size=16, sliding_window=64, **sizes)
    full = FullAttentionSpec(block_size=32, **sizes)
    state = MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))
    of_sizes = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layers.1": full})
    assert key_group(groups(full)) == (0, "layers.0", 32)
    assert key_group(groups(window, state, full, full)) == (2, "layers.2", 32)
    assert key_group(groups(window, of_sizes)) == (1, "layers.1", 32)
    assert key_group(groups(RSWASpec(block_size=16, rswa_window=8, **sizes), full)) == (1, "layers.1", 32)
    for specs, kinds in (((window, state), "MambaSpec, SlidingWindowSpec"), ((), "no cache")):
        words = rf"model: none of its layers has full attention \(they have {kinds}\).*; use owner=.target."
        with pytest.raises(ValueError, match=words):
            key_group(groups(*specs))


def test_a_connector_takes_its_blocks_of_all_groups() -> None:
    connector = DMIPoolConnector.__new__(DMIPoolConnector)
    ended: list[list[int]] = []
    slots = SimpleNamespace(group=1)
    connector.tracker = SimpleNamespace(slots=slots, finish=lambda _request, blocks: ended.append(blocks))  # type: ignore[assignment]
    connector.request_finished_all_groups(None, ([1], [2, 3], []))  # type: ignore[arg-type]
    assert ended == [[2, 3]]


def test_a_stage_without_full_attention_has_no_pool() -> None:
    """Every stage has the groups of the whole model. A group may have no layer in a stage."""
    found = groups(FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32))
    found.kv_cache_groups[0].layer_names.clear()
    assert key_group(found) == (0, "", 32)
    context: Any = SimpleNamespace(here=range(2, 4))
    with pytest.raises(
        ValueError, match=r"pipeline_parallel_size: no layer of this stage \(2 to 3\) has full attention"
    ):
        OWNERS["pool"].row_memory(context, found, config(None))


def test_a_draft_refuses_prompts_that_would_wait_forever() -> None:
    given = config(args.EXTRACT_HIDDEN_STATES)
    given.scheduler_config.enable_chunked_prefill = False
    with pytest.raises(ValueError, match=r"max_num_batched_tokens: a step takes 64 tokens.*set it to 128"):
        owner_of(given).check(given)
    given.scheduler_config.max_num_scheduled_tokens = 128
    owner_of(given).check(given)


def test_another_owner_is_asked_first_if_the_table_says_so() -> None:
    with mock.patch.dict(OWNERS, {"other": Other(), **OWNERS}, clear=True):  # patch.dict also restores the order
        assert owner_of(config(None, other=True)).name == "other"
        assert owner_of(config(None, other=False)).name == "target"
        made = models.MadeModel
        assert vars(models).pop("MadeModel") is made, "the class must be made once"
        assert issubclass(made, Made) and made.__name__ == "MadeModel" and made.__module__ == models.__name__
        cache = SimpleNamespace(kv_offloading_size=None)
        assert made.capturing(SimpleNamespace(kv_transfer_config=None, cache_config=cache)) is None


def test_an_unknown_architecture_has_no_class() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'MadeModel'"):
        _ = models.MadeModel


def test_no_other_file_of_the_engine_asks_which_owner_it_has() -> None:
    """No code compares with an owner's name."""
    found = []
    for path in ENGINE.rglob("*.py"):
        if path.parent.name == "owners":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            sides += [node.value] if isinstance(node, ast.MatchValue) else []
            if any(isinstance(side, ast.Constant) and side.value in OWNERS for side in sides):
                found.append(f"{path}:{node.lineno}")
    assert not found
