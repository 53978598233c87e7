# SPDX-License-Identifier: Apache-2.0
"""Stores rows in pages of vLLM's cache: a separate cache layer (row_cache.py) holds one row per cached token.

The layer has the same blocks as the attention layers. So a row has the same slot as its token's keys and values. A
prefix-cache hit also finds the rows. A preempted or ended request loses its rows together with its keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.engine.owners.base import Owner, RowMemory, RowSlots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from dmi_connector.engine.messages import StepMetadata
    from dmi_connector.engine.owners.base import Captured, Context

HELD = 1 / 16
"""Maximum fraction of the cache's blocks that are kept for ended requests with pending rows."""


class PagedSlots(RowSlots):
    """Slots of rows in vLLM's blocks. The blocks of an ended request are kept until the workers have gathered its last
    rows.

    blocks: the number of blocks of the cache. keep: whether blocks of ended requests may be kept. held: id -> (ended
    request whose blocks are kept, number of blocks).
    """

    def __init__(self, context: Context, block_size: int, blocks: int, keep: bool = True, group: int = 0) -> None:
        super().__init__(group, block_size)
        self._context, self.keep = context, keep
        self.held: dict[str, tuple[Request, int]] = {}
        self._most_held = 0 if context.options.sink == "null" else int(blocks * HELD)
        self._release = False

    def of(self, tracked: Captured, start: int, stop: int) -> np.ndarray:
        return self.in_cache(tracked, start, stop)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """No tokens, because the rows of a prefix-cache hit are in its blocks."""
        return 0, False

    def preempted(self, tracked: Captured, computed: int, metadata: StepMetadata) -> int:
        """Export full chunks of computed rows before the next forward, which may overwrite the request's blocks.

        Rows after the last full chunk are computed again.

        In an engine that may sleep, no row counts as exported, because the engine may sleep before the export.
        """
        metadata.preempted.append(tracked.capture)
        return 0 if self._context.may_sleep else computed

    def ended(self, request: Request, blocks: list[int], waiting: bool, others: bool) -> bool:
        keeps = self._keeps(len(blocks), waiting, others)
        if keeps:
            self.held[request.request_id] = request, len(blocks)
        return keeps

    def _keeps(self, blocks: int, waiting: bool, others: bool) -> bool:
        """Whether the blocks of an ended request are kept.

        If staging memory is short (`waiting`), policy "block" keeps the blocks, because reusing them would stall the
        GPU. Policy "drop" does not. If staging memory is not short, blocks are kept within the limit HELD while other
        captured requests run. Without such requests they are not kept, because vLLM may run only one more step.
        """
        if not blocks or not self.keep:
            return False
        if waiting:
            return self._context.options.policy == "block"
        return others and sum(count for _, count in self.held.values()) + blocks <= self._most_held

    def freed(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.held.pop(request_id, None)

    def take_release(self) -> bool:
        release, self._release = self._release, False
        return release

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Let a reset of the prefix cache free the kept blocks: vLLM refuses the reset while a block is in use.

        The rows in these blocks are exported before the next forward. Workers still report the requests afterwards.
        vLLM then frees the blocks again, which has no effect.
        """
        reset = kv_cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            given = [request for request, _ in self.held.values()]
            self.held.clear()
            self._release |= bool(given)
            for request in given:
                kv_cache_manager.free(request)
            return reset()

        kv_cache_manager.reset_prefix_cache = reset_prefix_cache


class Paged(Owner):
    """An owner whose rows are in pages of vLLM's cache."""

    def features(self, vllm_config: VllmConfig) -> list[str]:
        return ["rows in the cache"]

    def check(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        if model.is_hybrid:
            raise ValueError(
                f"model: {model.model!r} has Mamba or linear-attention layers, which need vLLM's hybrid cache manager, "
                f"which owner={self.name!r} does not support; use owner='pool'"
            )

        text = model.hf_text_config
        if getattr(text, "is_heterogeneous", False) and getattr(text, "num_kv_shared_layers", 0):  # Gemma 4 E2B, E4B
            raise ValueError(
                f"model: {model.model!r} has layers that share keys (num_kv_shared_layers) and heads of several sizes, "
                f"which need vLLM's hybrid cache manager; owner={self.name!r} does not support it, so use owner='pool'"
            )

    def row_slots(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> PagedSlots:
        from vllm import envs

        # While blocks of an ended request are kept, vLLM accepts no other request with the same id.
        keep = not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        for index, group in enumerate(config.kv_cache_groups):
            if context.cache_layer in group.layer_names:
                return PagedSlots(context, group.kv_cache_spec.block_size, config.num_blocks, keep, index)
        raise ValueError(
            f"the cache layer {context.cache_layer!r} is in no KV cache group: the model was built without taps. "
            "Is the dmi_connector plugin installed in this environment and allowed by VLLM_PLUGINS?"
        )

    def row_memory(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowMemory:
        from dmi_connector.engine.owners.row_cache import CaptureLayer

        layer = vllm_config.compilation_config.static_forward_context[context.cache_layer]
        assert isinstance(layer, CaptureLayer)
        layer.check_cache()
        return layer
