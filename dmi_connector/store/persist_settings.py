# SPDX-License-Identifier: Apache-2.0
"""How captures are written: what the engine tells the coordinator at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dmi_connector.store import schema


@dataclass(frozen=True)
class PersistSettings:
    """How captures are written unless their spec says otherwise. `rank_timeout` and `shutdown_seconds` are in seconds.
    keep: arguments of the coordinator's `Keeper`, {} for none. nice: of the writer processes, 0 to 19. idle: whether
    they are in the scheduling class for idle time: whatever else wakes up has their core at once. least_share: of their
    time that they work while the ring is sure to hold what comes, or rows of generated tokens come and it has room
    (pace.py).
    """

    codec: str = "zstd"
    chunk_tokens: int = 128
    segment_tokens: int = 1024
    fsync: bool = False
    rank_timeout: float = 60.0
    shutdown_seconds: float = 60.0
    file_mode: str = "private"
    nice: int = 5
    idle: bool = False
    least_share: float = 1.0
    keep: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema.check_chunking(self.chunk_tokens, self.segment_tokens, self.codec)
