# SPDX-License-Identifier: Apache-2.0
"""How stores are written: what the engine tells the coordinator at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WriteSettings:
    """How the coordinator and its writers work.

    fsync: flush each store to its device before it gets its final name. rank_timeout: seconds that rank 0 waits for the
    other ranks. shutdown_seconds: time to finish what is under way when the engine ends. file_mode: who may read
    stores. nice: nice level of the writers, 0 to 19. idle: put writers into the scheduling class for idle time.
    least_share: minimum share of time that writers work while the ring has room (pace.py). keep: arguments of the
    coordinator's `Keeper`, {} for none. upload: fields of `UploadSettings`, {} for none. always_compress: also chunks
    for which the engine may have to wait.
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
    """Where finished stores are uploaded to, and what happens when that falls behind (uploads.py).

    url: s3://bucket/prefix. remove_local: remove the local copy of what was uploaded. backlog_bytes: of finished stores
    that wait. retry_seconds: how long a store is tried. drop: leave a store that finds the backlog full to a repair,
    where it else makes the engine wait. only_complete: leave stores here that lack rows, or whose request was aborted.
    """

    url: str
    remove_local: bool = False
    backlog_bytes: int = 1 << 36
    retry_seconds: int = 180
    drop: bool = False
    only_complete: bool = False
