# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a pool for models with Mamba states: its minimum size, and hits that end inside a block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.owners.pool_limits import StepLimits
from dmi_connector.engine.owners.pool_pages import PoolSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.option_values import OptionError
from tests.trackerkit import FakeRequest, make_tracker

BLOCK = 1152


def slots_of(store_dir: Path, block: int = 0) -> PoolSlots:
    context = make_tracker(store_dir, "q", sink="host").context
    limits = StepLimits(SimpleNamespace(max_num_batched_tokens=4096), 4096, 4, block=block)
    return PoolSlots(context, 0, BLOCK, 100, limits)


def test_a_pool_without_room_for_a_block_of_a_prompt_is_refused(tmp_path: Path) -> None:
    """When the workers allocate the pool, vLLM does not know its block size yet."""
    slots = slots_of(tmp_path, BLOCK)
    least = -(-(4 + BLOCK) // 16) + slots.most
    page = 16 * slots._context.layout.row_bytes
    with pytest.raises(
        OptionError, match=rf"pool_bytes: .*{BLOCK} tokens of prompts.* give at least {(least + 1) * page}"
    ):
        slots.sized(least - 1)
    slots.sized(least)
    slots_of(tmp_path).sized(least - 1)


class Manager:
    """A fake of vLLM's cache manager that finds a prefix hit of `hit` tokens, or of fewer if the caller limits it."""

    def __init__(self, hit: int, partial: bool) -> None:
        self.hit, self.coordinator = hit, SimpleNamespace(enable_partial_hash_hits=partial)
        self.block_pool = SimpleNamespace(hash_block_size=BLOCK)

    def reset_prefix_cache(self) -> bool:
        """Does nothing."""
        return True

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[str, int, int]:
        return "blocks", self.hit if max_cache_hit_length is None else min(self.hit, max_cache_hit_length), 0


@pytest.mark.parametrize("limits", [(), (None,), (48,)], ids=["vLLM 0.32", "vLLM 0.33", "limited"])
@pytest.mark.parametrize("partial", [False, True])
def test_a_hit_that_ends_inside_a_block_is_refused_where_rows_are_wanted(
    tmp_path: Path, partial: bool, limits: tuple[int | None, ...]
) -> None:
    """vLLM tells connectors only the whole blocks of a hit. Here there is none."""
    slots, manager = slots_of(tmp_path), Manager(64 if 48 in limits else 48, partial)
    slots.sized(1000)
    slots.bind(manager)  # type: ignore[arg-type]
    tracker = Tracker(slots._context, slots, 1 << 60)  # type: ignore[arg-type]
    answers = []
    for name, start in (("all", 0), ("behind", 60), ("none", -1)):
        kv: Any = {"dmi": {"enabled": False} if start < 0 else {"tokens": [start, None]}}
        request: Any = FakeRequest(name, kv, list(range(90)), 90)
        request.skip_reading_prefix_cache = request.resumable = False
        tracker.on_new_request(request)
        assert manager.get_computed_blocks(request, *limits)[1] == 48
        answers.append(slots.matched(request, 0)[0])
    assert answers == ([None, 0, 0] if partial else [0, 0, 0])
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[])
    slots.cover(SimpleNamespace(num_scheduled_tokens={"all": 90}, scheduled_cached_reqs=nothing), 0)  # type: ignore[arg-type]
    assert slots.take_counts() == {"recomputed_tokens": 48 * partial, "borrowed_tokens": 0}
