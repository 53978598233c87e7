# SPDX-License-Identifier: Apache-2.0
"""What a worker works out once at start: buffer sizes, what stores say of their origin, what the selection costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.plan import Plan
from dmi_connector.settings import OptionError, ServerOptions
from dmi_connector.store.persist_settings import PersistSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.device import DeviceLane

logger = init_logger("vllm.dmi_connector")

LEAST_SHARE = 0.05
"""Of their time that writers beside a GPU work while the ring is sure to hold what comes, or there is room while rows
of generated tokens come (store/pace.py).
"""

WRITER_GB_PER_S = {"none": 1.6, "lz4": 0.7, "zstd": 0.4}
"""Raw GB/s of one writer process by codec on bf16 activations, for the estimate at start (benchmarks/)."""


@dataclass(frozen=True)
class BufferSizes:
    """Bytes of the shared host buffer and of the GPU staging buffer (0 on the CPU)."""

    host: int
    staging: int


def buffer_sizes(options: ServerOptions, token_bytes: int, gpu: bool, step_bytes: int = 0) -> BufferSizes:
    """Sizes as asked for, or defaults; both must hold two full chunks, the host buffer also what one step exports
    beside them (`step_bytes`: logits). Raises OptionError.
    """
    chunks = 2 * token_bytes * options.chunk_tokens + (1 << 20)
    host_least = chunks + 2 * step_bytes
    for name, asked, least in (
        ("host_buffer_bytes", options.host_buffer_bytes, host_least),
        ("staging_bytes", options.staging_bytes if gpu else 0, chunks),
    ):
        if 0 < asked < least:
            raise OptionError(
                f"{name}: {asked} holds less than two chunks of this selection; give at least {least}, "
                "choose fewer hooks or reduce chunk_tokens"
            )
    if options.sink == "null":
        return BufferSizes(1 << 20, 0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = options.host_buffer_bytes or max(memory // 8 if gpu else 256 << 20, host_least)
    staging = (options.staging_bytes or max(1 << 30, chunks)) if gpu else 0
    return BufferSizes(host, staging)


def hold_rows(context: CaptureContext, vllm_config: VllmConfig) -> int:
    """Rows on their way above which the scheduler keeps the blocks of finished requests: half the staging memory."""
    gpu = vllm_config.device_config.device_type != "cpu"
    if not gpu or context.options.sink == "null":
        return 1 << 60
    return buffer_sizes(context.options, context.layout.row_bytes, gpu).staging // context.layout.row_bytes // 2


def persist_settings(options: ServerOptions, rank: int, gpu: bool) -> PersistSettings:
    """What the coordinator of a rank needs to know; that of rank 0 also looks after the directory.

    Beside a GPU writers give way at once to the engine's thread, which needs a core only now and then. Beside a model
    that keeps all cores busy they would never come to their turn.
    """
    # Under policy drop room in the ring is worth more than an engine that is not slowed.
    leisure = gpu and options.policy == "block"
    keep = {
        "directory": options.store_dir,
        "roots": options.save_path_roots,
        "measure": options.max_total_bytes > 0,
        "retain_seconds": options.retain_seconds,
        "retain_bytes": options.retain_bytes,
    }
    return PersistSettings(
        options.codec,
        options.chunk_tokens,
        options.segment_tokens,
        options.fsync,
        file_mode=options.file_mode,
        shutdown_seconds=options.shutdown_seconds,
        nice=19 if gpu else PersistSettings.nice,
        idle=leisure,
        least_share=LEAST_SHARE if leisure else PersistSettings.least_share,
        keep={} if rank else keep,
    )


def default_writers(gpu: bool) -> int:
    """Writer processes of a rank: beside a GPU one for each core, for they give way; on a CPU the model needs cores."""
    cores = len(os.sched_getaffinity(0))
    return min(32, cores) if gpu else max(1, min(4, cores // 4))


def announce(
    context: CaptureContext,
    full: Plan,
    rows: torch.Tensor,
    sizes: BufferSizes,
    lane: DeviceLane | None,
    writers: int,
) -> None:
    """Log what the selection costs and which limit will bind."""
    options = context.options
    logger.info(
        "dmi_connector: %d hooks of %s, %s rows: %.3f MB a token in the cache (%d tokens fit), "
        "%.3f MB a token exported",
        sum(len(layers) for layers in context.selection.hooks.values()),
        context.arch.name,
        context.owner,
        context.layout.row_bytes / 1e6,
        rows.shape[0],
        full.token_bytes / 1e6,
    )
    if layers := context.selection.hooks.get("pattern"):
        dims = context.dims
        logger.info(
            "dmi_connector: attention summaries of %d layers look at all keys again: %.1f MFLOP for each token and "
            "1,000 tokens of its context",
            len(layers),
            len(layers) * dims.heads * dims.head_dim * 2 * 1000 / context.tp / 1e6,
        )
    if options.sink == "null":
        return
    logger.info(
        "dmi_connector: host buffer %.0f MiB = %d tokens, staging %.0f MiB = %d tokens, policy %s",
        sizes.host / 2**20,
        sizes.host // full.token_bytes,
        sizes.staging / 2**20,
        sizes.staging // full.token_bytes,
        options.policy,
    )
    limits = {}
    if lane is not None:
        limits["link"] = lane.link_bytes_per_second()
    if writers:
        limits[f"{writers} writers, codec {options.codec}"] = writers * WRITER_GB_PER_S[options.codec] * 1e9
    if limits:
        name = min(limits, key=lambda n: limits[n])
        logger.info(
            "dmi_connector: full capture is bound by %s at about %.1f GB/s = %.0f tokens/s (all: %s)",
            name,
            limits[name] / 1e9,
            limits[name] / full.token_bytes,
            ", ".join(f"{n} {v / 1e9:.1f} GB/s" for n, v in limits.items()),
        )


def store_attrs(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """What every store of this engine says about its origin."""
    import vllm

    import dmi_connector

    dims = context.dims
    return {
        "model": vllm_config.model_config.model,
        "architecture": context.arch.name,
        "dtype": context.dtype,
        "num_layers": dims.layers,
        "identities": True,
        "tp": context.tp,
        "owner": context.owner,
        "versions": {
            "dmi_connector": dmi_connector.__version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
        "dims": {
            "hidden": dims.hidden,
            "heads": dims.heads,
            "kv_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "vocab": dims.vocab,
        },
    }
