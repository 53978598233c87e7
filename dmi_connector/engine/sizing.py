# SPDX-License-Identifier: Apache-2.0
"""Computes defaults that depend on the machine: buffer sizes, and the number and priority of writers."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dmi_connector.engine.scheduler.quota import UNLIMITED
from dmi_connector.option_values import OptionError
from dmi_connector.settings import ServerOptions
from dmi_connector.store.write.settings import WriteSettings

LEAST_SHARE = 0.05
"""Minimum duty cycle of writers on a machine with a GPU while the ring has room (store/write/pace.py)."""

WRITER_NICE = 19
"""Nice level of writers on a machine with a GPU: the lowest priority."""

CPU_HOST_BYTES, GPU_STAGING_BYTES = 256 << 20, 1 << 30
"""Default sizes: of the host buffer on a CPU, and of staging memory."""

MOST_HOST_SHARE, ALL_HOSTS_SHARE = 1 / 8, 1 / 4
"""Default host buffers with GPUs, as shares of the machine's memory: maximum for one GPU, and total for all GPUs."""

MOST_GPU_WRITERS, MOST_CPU_WRITERS, CPU_CORES_A_WRITER = 64, 4, 4
"""Maximum default number of writers per GPU, and on a CPU. The third: cores per writer on a CPU, which also runs the
model.
"""

_DEVICES = "/dev/nvidia[0-9]*"
"""GPUs of this machine or container, including those that CUDA_VISIBLE_DEVICES hides."""

_SLACK_BYTES = 1 << 20
"""Room for alignment in a buffer."""


@dataclass(frozen=True)
class BufferSizes:
    """Bytes of the shared host buffer, its minimum size, and bytes of the GPU staging buffer (0 on a CPU)."""

    host: int
    least_host: int
    staging: int


def gpu_share(token_bytes: Sequence[int], rank: int) -> float:
    """A rank's default share of the machine's cores and of the memory for host buffers.

    Each GPU of the machine has an equal share. The ranks of an engine divide their shares in proportion to the bytes
    that each exports.

    token_bytes: bytes of a row in a payload (chunk_layout.py), by rank of the engine.
    """
    gpus = max(len(glob.glob(_DEVICES)), torch.cuda.device_count(), len(token_bytes))
    return len(token_bytes) / gpus * token_bytes[rank] / max(1, sum(token_bytes))


def buffer_sizes(
    options: ServerOptions, token_bytes: int, gpu: bool, step_bytes: int = 0, share: float = 1.0
) -> BufferSizes:
    """The buffer sizes that options give, or defaults.

    token_bytes: bytes of a row in a payload. step_bytes: bytes of the logits of a step. share: share of a rank with a
    GPU, see `gpu_share`.

    Raises OptionError if a buffer is too small for two full chunks. The host buffer must also hold the logits of two
    steps.
    """
    chunks = 2 * token_bytes * options.chunk_tokens + _SLACK_BYTES
    host_least = chunks + 2 * step_bytes
    for name, asked, least in (
        ("host_buffer_bytes", options.host_buffer_bytes, host_least),
        ("staging_bytes", options.staging_bytes if gpu else 0, chunks),
    ):
        if 0 < asked < least:
            logits, fix = (" and the logits of two steps", ", or lower max_num_seqs") if least > chunks else ("", "")
            raise OptionError(
                f"{name}: {asked} holds less than two chunks of this selection{logits}; give at least {least}, "
                f"choose fewer hooks or reduce chunk_tokens{fix}"
            )
    if options.sink == "null":
        return BufferSizes(_SLACK_BYTES, _SLACK_BYTES, 0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    default = int(memory * min(MOST_HOST_SHARE, ALL_HOSTS_SHARE * share)) if gpu else CPU_HOST_BYTES
    host = options.host_buffer_bytes or max(default, host_least)
    staging = (options.staging_bytes or max(GPU_STAGING_BYTES, chunks)) if gpu else 0
    return BufferSizes(host, host_least, staging)


def keep_rows(options: ServerOptions, token_bytes: Sequence[int], gpu: bool) -> int:
    """`Tracker.keep_rows`: the number of rows that fill half of the staging memory of a rank.

    token_bytes: bytes of a row in a payload, by rank (`chunk_layout.sent_bytes`). Raises OptionError as `buffer_sizes`.
    """
    if not gpu or options.sink == "null":
        return UNLIMITED  # rows are gathered at once
    return min(buffer_sizes(options, nbytes, gpu).staging // nbytes // 2 for nbytes in token_bytes)


def write_settings(options: ServerOptions, rank: int, gpu: bool) -> WriteSettings:
    """The settings of a rank's coordinator. The coordinator of rank 0 also measures and prunes the directory.

    With a GPU and policy block, writers run with SCHED_IDLE and yield to the engine's thread at once. On a CPU such
    writers would never run, because the model keeps all cores busy. Under policy drop the ring would become full, and
    rows would be lost.
    """
    give_way = gpu and options.policy == "block"
    keep = {
        "directory": options.store_dir,
        "roots": options.save_path_roots,
        "measure": options.max_total_bytes > 0 or options.min_free_bytes > 0,
        "retain_seconds": options.retain_seconds,
        "retain_bytes": options.retain_bytes,
    }
    upload = {
        "url": options.upload,
        "remove_local": options.upload_remove_local,
        "backlog_bytes": options.upload_backlog_bytes,
        "retry_seconds": options.upload_retry_seconds,
        "drop": options.policy == "drop",
        "only_complete": options.upload_only_complete,
    }
    return WriteSettings(
        options.fsync,
        file_mode=options.file_mode,
        shutdown_seconds=options.shutdown_seconds,
        nice=WRITER_NICE if gpu else WriteSettings.nice,
        idle=give_way,
        least_share=LEAST_SHARE if give_way else WriteSettings.least_share,
        keep={} if rank else keep,
        upload=upload if options.upload and not rank else {},
        # A writer does not measure the time of flushes and uploads, which chunks without compression would make longer.
        always_compress=options.always_compress or options.fsync or bool(options.upload),
    )


def default_writers(gpu: bool, share: float = 1.0) -> int:
    """Default number of writer processes of a rank.

    share: share of a rank with a GPU, see `gpu_share`. With a GPU there is one writer per core, because writers yield
    to the engine. On a CPU there are fewer.
    """
    cores = len(os.sched_getaffinity(0))
    if not gpu:
        return max(1, min(MOST_CPU_WRITERS, cores // CPU_CORES_A_WRITER))
    return max(1, min(MOST_GPU_WRITERS, round(cores * share)))
