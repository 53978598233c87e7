# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half of a pool knows about the rows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmi_connector.engine.owners.pool_borrowing import CacheReads

if TYPE_CHECKING:
    from dmi_connector.engine.owners.base import Captured


@dataclass(eq=False)
class Rows:
    """The rows of one request in a pool.

    pages: pages of the pool, in order of positions. Page n of a request begins with its position n * size. first: the n
    of `pages[0]`. entries: the table entry of each page, -1 for a page that is not in the table. captured: position up
    to which rows exist after a preemption or borrowing. exported: position up to which rows were handed to the workers.
    seen: number of computed tokens after the last step that was checked. ahead: position up to which rows get pages as
    soon as vLLM allocates blocks. stop, most: see `PoolSlots._room`. admitted: whether `most` pages are reserved for
    the request. reads_cache: whether its options allow prefix-cache hits. reads: see `CacheReads`.
    """

    tracked: Captured
    first: int
    stop: int
    most: int
    reads_cache: bool
    reads: CacheReads
    pages: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    captured: int = 0
    exported: int = 0
    seen: int = 0
    ahead: int = 0
    admitted: bool = False
