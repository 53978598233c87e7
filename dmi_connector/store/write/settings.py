# SPDX-License-Identifier: Apache-2.0
"""Settings for writing stores, which the engine passes to the coordinator at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WriteSettings:
    """Settings of the coordinator and its writers.

    fsync: flush each store to its device before it gets its final name. rank_timeout: seconds that rank 0 waits for the
    other ranks. shutdown_seconds: time to finish stores when the engine ends. file_mode: who may read stores. nice:
    nice level of the writers, 0 to 19. idle: run writers in the scheduling class SCHED_IDLE. least_share: minimum share
    of their time that writers work (pace.py). keep: arguments of the coordinator's `Keeper`, {} for none. upload:
    fields of `UploadSettings`, {} for none. always_compress: compress chunks even if the engine may have to wait for
    writers.
    """

    fsync: bool = False
    rank_timeout: float = 60.0
    shutdown_seconds: float = 60.0
    file_mode: str = "private"
    nice: int = 5
    idle: bool = False
    least_share: float = 1.0
    keep: Mapping[str, Any] = field(default_factory=dict)
    upload: Mapping[str, Any] = field(default_factory=dict)
    always_compress: bool = False


@dataclass(frozen=True)
class UploadSettings:
    """Where finished stores are uploaded to, and what happens when uploads fall behind (uploads.py).

    url: s3://bucket/prefix. remove_local: remove the local copy of an uploaded store. backlog_bytes: maximum bytes of
    finished stores that wait for their upload. retry_seconds: how long the upload of a store is retried. drop: leave
    stores beyond backlog_bytes to a repair; if False, the engine waits instead. only_complete: do not upload stores
    that lack rows, or whose request was aborted.
    """

    url: str
    remove_local: bool = False
    backlog_bytes: int = 1 << 36
    retry_seconds: int = 180
    drop: bool = False
    only_complete: bool = False
