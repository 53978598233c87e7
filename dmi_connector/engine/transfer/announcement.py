# SPDX-License-Identifier: Apache-2.0
"""Logs at start what the selection costs per token, and which limit is reached first."""

from __future__ import annotations

import torch
from vllm.logger import init_logger

from dmi_connector.codecs import CODECS
from dmi_connector.engine import sizing
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.sizing import BufferSizes
from dmi_connector.engine.transfer.chunk_layout import ChunkLayout
from dmi_connector.engine.transfer.gpu_lane import DeviceLane

logger = init_logger("vllm.dmi_connector")


def announce(
    context: CaptureContext,
    full: ChunkLayout,
    rows: torch.Tensor,
    sizes: BufferSizes,
    lane: DeviceLane | None,
    writers: int,
    place: str,
) -> None:
    """Log the cost of the selection, and the limit that is reached first. place: "pool" or "cache", for the message."""
    options = context.options
    logger.info(
        "dmi_connector: %d hooks of %s, %s rows: %.3f MB per token in the %s (%d tokens fit), %.3f MB per token "
        "exported",
        sum(len(layers) for layers in context.selection.hooks.values()),
        context.arch.name,
        context.owner.name,
        context.layout.row_bytes / 1e6,
        place,
        rows.shape[0],
        full.payload.token_bytes / 1e6,
    )
    if layers := context.selection.hooks.get("pattern"):
        dims = context.dims
        logger.info(
            "dmi_connector: attention summaries of %d layers read all keys twice: %.1f MFLOP for each token and "
            "1,000 tokens of its context",
            len(layers),
            len(layers) * dims.heads * dims.head_dim * 2 * 1000 / context.tp / 1e6,
        )
    if options.sink == "null":
        return
    logger.info(
        "dmi_connector: host buffer %.0f MiB = %d tokens, staging %.0f MiB = %d tokens, policy %s",
        sizes.host / 2**20,
        sizes.host // full.payload.token_bytes,
        sizes.staging / 2**20,
        sizes.staging // full.payload.token_bytes,
        options.policy,
    )
    limits = {}
    if lane is not None:
        limits["link"] = lane.link_bytes_per_second()
    if writers:
        codec = CODECS[options.codec]
        compressed, plain = writers * codec.gb_per_s * 1e9, codec.plain_gb_per_s if codec.compresses else None
        if plain is None or sizing.write_settings(options, 0, lane is not None).always_compress:
            limits[f"{writers} writers, codec {codec.name}"] = compressed
        else:
            limits[f"{writers} writers, uncompressed"] = writers * plain * 1e9
            logger.info(
                "dmi_connector: %d writers compress with %s up to about %.1f GB/s = %.0f tokens/s; above that they "
                "leave chunks uncompressed, unless the disk is slower or always_compress is set",
                writers,
                codec.name,
                compressed / 1e9,
                compressed / full.payload.token_bytes,
            )
    if limits:
        name = min(limits, key=lambda n: limits[n])
        logger.info(
            "dmi_connector: full capture is bound by %s at about %.1f GB/s = %.0f tokens/s (all: %s)",
            name,
            limits[name] / 1e9,
            limits[name] / full.payload.token_bytes,
            ", ".join(f"{n} {v / 1e9:.1f} GB/s" for n, v in limits.items()),
        )
