# SPDX-License-Identifier: Apache-2.0
"""The worker half of a pool: the rows of tokens, and the metadata of batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.model.coverage import UNWRITTEN
from dmi_connector.engine.owners import pool_memory
from dmi_connector.engine.owners.pool_memory import RowPool
from dmi_connector.settings import ServerOptions

LAYER = "model.layers.0.attn"


class Builder:
    """A fake metadata builder of an attention backend."""

    def __init__(self, *layers: str) -> None:
        self.layer_names = list(layers)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> tuple[Any, bool]:
        return common_attn_metadata, fast_build

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """As in a backend that chooses between two: calls `build` of another builder."""
        return common_attn_metadata


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pool_memory, "_watching", {})
    backend = SimpleNamespace(get_builder_cls=lambda: Builder)
    attention = SimpleNamespace(get_attn_backend=lambda: backend)
    found = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, is_multimodal_model=False, is_hybrid=False, max_model_len=64),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=40, max_num_scheduled_tokens=None, max_num_seqs=2, enable_chunked_prefill=True
        ),
        speculative_config=None,
        use_v2_model_runner=True,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=1 << 20),
        compilation_config=SimpleNamespace(static_forward_context={LAYER: attention}),
    )
    found.scheduler_config.disable_chunked_mm_input = False
    monkeypatch.setattr(pool_memory, "get_current_vllm_config", lambda: found)
    return found


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor]]:
    """(kind, memory) of each allocation. Its kind is "kept" or "freed" in sleep."""
    found: list[tuple[str, torch.Tensor]] = []

    def place(kind: str) -> Any:
        allocate = getattr(pool_memory, f"{kind}_in_sleep")

        def placing(call: Any, device: torch.device, may_sleep: bool) -> torch.Tensor:
            found.append((kind if may_sleep else "", made := allocate(call, device, may_sleep)))
            return made

        return placing

    for kind in ("kept", "freed"):
        monkeypatch.setattr(pool_memory, f"{kind}_in_sleep", place(kind))
    return found


@pytest.fixture
def pool(request: pytest.FixtureRequest, config: Any, placed: list[tuple[str, torch.Tensor]]) -> RowPool:
    """A pool. The parameter says whether the engine may sleep."""
    options = ServerOptions.parse({"store_dir": "/x", "owner": "pool", "chunk_tokens": 8})
    layout, sleeps = SimpleNamespace(row_bytes=32), getattr(request, "param", False)
    context: Any = SimpleNamespace(options=options, layout=layout, cache_layer="dmi_rows.1", may_sleep=sleeps)
    return RowPool(context)


def forward(*slots: int, layer: str = LAYER) -> Any:
    return SimpleNamespace(slot_mapping={layer: torch.tensor(slots)})


def test_tokens_have_rows_where_the_table_has_pages(pool: RowPool, config: Any) -> None:
    assert config.compilation_config.static_forward_context["dmi_rows.1"] is pool
    assert pool.rows.shape == ((1 + pool.pages) * 16, 32)
    assert pool.rows_and_slots(SimpleNamespace(slot_mapping=None), True) is None, "a profiling run has no rows"
    found = pool.rows_and_slots(forward(0, 40, -1, layer="any"), True)
    assert found is not None and found[1].tolist() == [-1, -1, -1], "before the cache is allocated, tokens have no rows"
    pool.follow(LAYER, 32, 10, config)
    pool.place(np.array([[2, 5], [3, 1]]))
    rows, slots = pool.rows_and_slots(forward(33, 80, 95, 0, -1), True) or pytest.fail("there are rows")
    assert rows is pool.rows and slots.tolist() == [3 * 16 + 1, 16, 31, -1, -1]
    address = slots.data_ptr()
    pool.place(np.array([[2], [-1]]))
    rows, slots = pool.rows_and_slots(forward(33, 80), False) or pytest.fail("there are rows")
    assert slots.tolist() == [49, 16], "a later tap of the same forward must not look up slots again"
    rows, slots = pool.rows_and_slots(forward(33, 80), True) or pytest.fail("there are rows")
    assert slots.tolist() == [-1, 16] and slots.data_ptr() == address, (
        "the address must not change, because graphs hold it"
    )
    assert pool.rows_and_slots(forward(1, layer="another"), True) is None


@pytest.mark.parametrize("pool", [False, True], indirect=True)
def test_sleep_frees_the_rows_and_keeps_what_graphs_look_up(
    pool: RowPool, config: Any, placed: list[tuple[str, torch.Tensor]]
) -> None:
    before = pool.table
    pool.follow(LAYER, 32, 10, config)
    kinds = ["freed", "kept", "kept", "kept"] if pool._may_sleep else [""] * 4
    assert [kind for kind, _ in placed] == kinds
    for (_, made), tensor in zip(placed, (pool.rows, before, pool.slots, pool.table), strict=True):
        assert made is tensor and not made.is_inference()
    assert (pool.table == -1).all() and len(pool.table) == 20


def test_blocks_smaller_than_a_page_have_smaller_pages(pool: RowPool, config: Any) -> None:
    pages = pool.pages
    pool.follow(LAYER, 8, 10, config)
    assert pool.pages == 2 * pages + 1 and len(pool.table) == 10


def test_a_longer_step_than_vllm_announced_is_an_error(pool: RowPool, config: Any) -> None:
    pool.follow(LAYER, 16, 10, config)
    with pytest.raises(RuntimeError, match="a step has 600 tokens, more than the 552 that the pool expects"):
        pool.rows_and_slots(forward(*range(600)), True)


def test_the_pool_sees_the_metadata_of_each_batch_of_its_layer(
    pool: RowPool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("build", "build_for_cudagraph_capture"):
        monkeypatch.setattr(Builder, name, getattr(Builder, name))
    for _ in range(2):  # two engines in one process
        pool.follow(LAYER, 16, 10, config)
    captured = SimpleNamespace(slot_mapping=torch.tensor([-1]))
    assert Builder("another").build_for_cudagraph_capture(captured) is captured and pool.step is None
    assert Builder(LAYER).build_for_cudagraph_capture(captured) is captured and pool.step is captured
    pool.step = None
    step = SimpleNamespace(slot_mapping=torch.tensor([16, -1]))
    assert Builder("another").build(0, step) == (step, False) and pool.step is None
    assert Builder("another", LAYER).build(0, common_attn_metadata=step, fast_build=True) == (step, True)
    assert pool.step is step and pool.unpoisoned is None
    pool.poisons = True
    pool.place(np.array([[1], [2]]))
    pool.rows.zero_()
    Builder(LAYER).build(0, step)
    pool.poison_step()
    filled = (pool.rows.view(torch.int16) == UNWRITTEN).all(1)
    assert filled.nonzero().flatten().tolist() == [0, 32], "only the null page and the rows of the step may be poisoned"
    seen = pool.step
    pool_memory._watching[LAYER] = lambda: None  # type: ignore[assignment]
    Builder(LAYER).build(0, SimpleNamespace())
    assert pool.step is seen, "an engine that has ended must get no metadata"
