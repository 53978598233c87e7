# SPDX-License-Identifier: Apache-2.0
"""How far a captured request reads the prefix cache: as far as it has rows, or borrows them from an earlier capture.

vLLM asks the connector when it has found a hit, and does not let it shorten the hit. So a request whose hit ends
elsewhere is asked to wait for the next pass. At the end of the pass its hashes are cut: vLLM looks up no more blocks
than a request has hashes. By then the pass has handed rows of requests that began in it, so the children of a request
with n > 1 find those of the first one.

A source whose request runs is kept by the coordinator until its rows are copied: it hears of the borrower before it
hears of the end. When that request ends, a borrower of its rows that runs is the source of them. Without one the
finished store is held by links (pool_holds.py). Until it is finished the borrower waits, but not longer than _WAIT_S.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from dmi_connector.engine.messages import Borrow
from dmi_connector.engine.owners.pool_holds import Holds
from dmi_connector.engine.owners.pool_sources import RowSources, Source

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from dmi_connector.engine.owners.base import Captured, Context

logger = init_logger("vllm.dmi_connector")

_WAIT_S = 1.0
"""Seconds that a borrower waits for the store of a request that has ended. Then it computes the tokens again."""


@dataclass(eq=False)
class CacheReads:
    """What one request reads of the prefix cache.

    source: what it is to others. borrow: whose rows it borrows if it is scheduled now, and up to which position. held:
    links to the store of `held_source`, or "". hit: most cached tokens that vLLM found since it last ran. begun:
    whether it was ever scheduled. recomputed: cached tokens that were computed again. hidden: hashes that were removed
    after the first `kept`.
    """

    tracked: Captured
    source: Source
    borrow: tuple[Source, int] | None = None
    held: str = ""
    held_source: Source | None = None
    hit: int = 0
    begun: bool = False
    recomputed: int = 0
    hidden: list[Any] = field(default_factory=list)
    kept: int = 0

    @property
    def request(self) -> Request:
        """vLLM's."""
        return self.tracked.request

    def cut(self, count: int) -> None:
        """Leave `count` hashes."""
        hashes = self.request.block_hashes
        self.hidden, self.kept = hashes[count:], count
        del hashes[count:]

    def restore(self) -> None:
        """Put hashes back, if vLLM has not computed them again. It needs them for the blocks that it gives."""
        if self.hidden and len(self.request.block_hashes) == self.kept:
            self.request.block_hashes += self.hidden
        self.hidden = []


class Borrowing:
    """The reads of all captured requests. block_size: tokens of a block, until vLLM's own hashes are known.

    Where hits may end inside a block, hashes do not say how long a hit is: then all tokens of it are computed again.
    """

    def __init__(self, context: Context, block_size: int) -> None:
        options = context.options
        self.sources = RowSources(options.chunk_tokens, block_size, context.ranks > 1, options.sink == "disk")
        self._holds = Holds(options.store_dir)
        self._lent: dict[str, str] = {}  # links by path of the store that is copied to
        self._part_hits = False  # whether hits may end inside a block
        self._later: list[tuple[CacheReads, int, int]] = []  # to be cut: hit, and `low` of `allows`
        self.counts = {"recomputed_tokens": 0, "borrowed_tokens": 0}

    def arrived(self, tracked: Captured) -> CacheReads:
        """A request is to be captured."""
        request, params, kind = tracked.request, tracked.params, self.sources.kind(tracked.selection)
        source = Source(tracked.capture, tracked.path, request.request_id, params.key, kind, params.start)
        self.sources.add(source)
        return CacheReads(tracked, source)

    def allows(self, reads: CacheReads, hit: int, low: int) -> bool:
        """Whether a request may begin with a hit of `hit` tokens. If not, ask again in the next pass.

        low: position below which it wants no rows, or has them.
        """
        reads.restore()
        reads.hit, reads.borrow = max(reads.hit, hit), None
        top = min(hit, reads.tracked.limit)
        if low < top:
            reads.borrow = self._find(reads, top)
            if reads.borrow is None or reads.borrow[1] < top or not self._hold(reads, reads.borrow[0]):
                self._later.append((reads, hit, low))
                return False
        return True

    def _find(self, reads: CacheReads, top: int) -> tuple[Source, int] | None:
        """Whose rows a request can borrow. One that was preempted has its own. `keep_if` is about scores of all rows,
        and borrowed ones have none.
        """
        if reads.begun or self._part_hits or reads.tracked.params.keep_if is not None:
            return None
        return self.sources.find(reads.source, reads.request, top)

    def _hold(self, reads: CacheReads, source: Source) -> bool:
        """See to it that a source stays until its rows are copied. Returns whether it will."""
        if source is reads.held_source and reads.held:
            return True
        self._release(reads)
        if source.ended is None:
            return True
        try:
            reads.held, reads.held_source = self._holds.hold(source.path), source
        except FileNotFoundError:
            source.gone = source.written or time.monotonic() > source.ended + _WAIT_S
        except ValueError as error:
            source.gone = True
            logger.warning("dmi_connector: no rows are borrowed from a damaged store: %s", error)
        except OSError as error:
            source.gone = True
            logger.warning_once(
                "dmi_connector: finished stores cannot be linked, so no rows of them are borrowed: %s", error.strerror
            )
        return bool(reads.held)

    def _release(self, reads: CacheReads) -> None:
        if reads.held:
            self._holds.release(reads.held)
            reads.held, reads.held_source = "", None

    def cut(self) -> list[Request]:
        """A pass ends: cut the hits of those that wait. Returns requests that are to read nothing."""
        nothing, size = [], self.sources.hash_size
        for reads, hit, low in self._later:
            top = min(hit, reads.tracked.limit)
            found = self._find(reads, top)
            stop = low if found is None else found[1]
            if stop < size or self._part_hits:
                nothing.append(reads.request)
            elif stop < top or top == hit:  # else all rows that it wants of the hit are there by now
                reads.cut(stop // size)
        self._later.clear()
        return nothing

    def begin(self, reads: CacheReads) -> Borrow | None:
        """A request is scheduled for the first time. Returns the rows that it borrows."""
        reads.begun, reads.source.age = True, self.sources.age
        if reads.borrow is None:
            return None
        source, stop = reads.borrow
        ids = np.array(reads.request.all_token_ids[source.start : stop], np.int32)
        self.counts["borrowed_tokens"] += len(ids)
        self.sources.borrowed(source, reads.source, stop)
        path = reads.held or source.path
        if reads.held:
            self._lent[reads.tracked.path], reads.held = reads.held, ""
        return Borrow(path, source.request_id, source.key, ids)

    def ended(self, reads: CacheReads) -> None:
        """The request has ended."""
        reads.source.ended = time.monotonic()
        self.sources.ended(reads.source)
        self._release(reads)

    def stored(self, path: str, whole: bool) -> None:
        """A store is finished, and what it was to borrow is copied. whole: it has all rows."""
        self.sources.stored(path, whole)
        if path in self._lent:
            self._holds.release(self._lent.pop(path))

    def scheduled(self, reads: CacheReads) -> None:
        """Tokens of its prompt are computed in this step."""
        again, reads.hit = reads.hit - reads.request.num_computed_tokens, 0
        if again > 0:
            reads.recomputed += again
            self.counts["recomputed_tokens"] += again

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Forget all sources when the prefix cache is reset."""
        self.sources.hash_size = kv_cache_manager.block_pool.hash_block_size
        self._part_hits = bool(getattr(kv_cache_manager.coordinator, "enable_partial_hash_hits", False))
        reset = kv_cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self.sources.reset()
            return reset()

        kv_cache_manager.reset_prefix_cache = reset_prefix_cache

    def take_counts(self) -> dict[str, int]:
        """What changed since the last call, by key of `metrics.COUNTERS`."""
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return counts
