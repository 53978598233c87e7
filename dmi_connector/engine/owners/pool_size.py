# SPDX-License-Identifier: Apache-2.0
"""Computes how many rows a pool has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dmi_connector.engine.owners.pool_limits import PAGE, StepLimits
from dmi_connector.option_values import OptionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.settings import ServerOptions

_SHARES = ((2_000_000, 0.128), (500_000, 0.095), (0, 0.045))
"""Defaults (bytes, share): a pool with larger rows gets this share of the cache's memory. The first match applies."""
_GUARANTEED = 16
"""A pool of the default size has room for this many captured requests at a time, with any other load."""
_STEPS = 2
"""A pool of the default size holds at most the rows of this many full steps and of all requests that may run."""


def pool_rows(options: ServerOptions, row_bytes: int, limits: StepLimits, vllm_config: VllmConfig) -> int:
    """Rows of the pool without the null page, a multiple of PAGE.

    Raises OptionError if `pool_bytes` is too small for a step and one request.
    """
    chunk = options.chunk_tokens
    least = limits.least_pages(chunk)
    if options.pool_bytes:
        pages = options.pool_bytes // (row_bytes * PAGE) - 1
        if pages < least:
            raise OptionError(
                f"pool_bytes: {options.pool_bytes} has {max(0, pages) * PAGE} rows, too few for one captured request "
                f"and one step; give at least {(least + 1) * row_bytes * PAGE}, or lower max_num_seqs, "
                "max_num_batched_tokens or chunk_tokens, or choose fewer hooks"
            )
        return pages * PAGE
    share = next(share for size, share in _SHARES if row_bytes > size)
    pages = int(_cache_bytes(vllm_config) * share) // (row_bytes * PAGE)
    requests = limits.requests
    most = _STEPS * limits.pages_of_step(limits.tokens) + requests * limits.pages_of_request(chunk)
    return max(min(pages, most), limits.least_pages(chunk, min(requests, _GUARANTEED))) * PAGE


def _cache_bytes(vllm_config: VllmConfig) -> int:
    """Approximate bytes that vLLM will use for its cache. vLLM has built the model, but not measured a step yet.

    On a CPU without a given size, this is 4 GiB, although vLLM may use more.
    """
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes:
        return int(cache.kv_cache_memory_bytes)
    if vllm_config.device_config.device_type == "cpu":
        from vllm import envs

        return (envs.VLLM_CPU_KVCACHE_SPACE or 4) << 30
    _, total = torch.cuda.mem_get_info()
    return max(0, int(total * cache.gpu_memory_utilization) - torch.cuda.memory_allocated())
