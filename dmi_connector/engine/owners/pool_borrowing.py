# SPDX-License-Identifier: Apache-2.0
"""Limits prefix-cache hits of a captured request to tokens whose rows it has, or borrows from an earlier capture.

vLLM tells the connector the length of a hit, and the connector cannot shorten the hit. If the hit has tokens whose rows
are missing, the request waits for the next scheduling pass. At the end of the current pass, the last block hashes of
the request are removed: vLLM looks up only as many blocks as a request has hashes. By then, rows of requests that began
in this pass were handed to the workers. So with n > 1, the other child requests can borrow the rows of the first child.

A source is a capture whose rows others may borrow (pool_sources.py). While its request runs, the coordinator keeps its
store until borrowed rows are copied: the message that names the borrower precedes the message that ends the capture.
When the request ends, a running borrower replaces it as the source. If no borrower runs, a new borrower waits up to
_WAIT_S until the store is finished. Hard links then keep the files of this store (pool_holds.py).
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
"""Seconds that a borrower waits for the store of a request that has ended. After that it computes the tokens again."""


@dataclass(eq=False)
class CacheReads:
    """How one captured request reads the prefix cache.

    source: the request's own capture, from which others may borrow. borrow: (another source, position up to which the
    request borrows its rows), if the request is scheduled in this pass. held: path of the links to the store of
    `held_source`, or "". hit: the most cached tokens that vLLM found since the request last ran. begun: whether the
    request was ever scheduled. recomputed: number of cached tokens that it computed again. hidden: block hashes that
    `cut` removed, which follow the first `kept` ones.
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
        """vLLM's request."""
        return self.tracked.request

    def cut(self, count: int) -> None:
        """Remove all block hashes after the first `count`."""
        hashes = self.request.block_hashes
        self.hidden, self.kept = hashes[count:], count
        del hashes[count:]

    def shorter(self, hit: int, size: int) -> int:
        """Number of blocks by which a hit is shorter than the hashes that `cut` left; -1 if no hashes are cut.

        hit: number of cached tokens. size: tokens per hash.
        """
        if not self.hidden or len(self.request.block_hashes) != self.kept:
            return -1
        return self.kept - hit // size

    def restore(self) -> None:
        """Put the removed hashes back, unless vLLM has computed them again. vLLM needs them to allocate blocks."""
        if self.hidden and len(self.request.block_hashes) == self.kept:
            self.request.block_hashes += self.hidden
        self.hidden = []


class Borrowing:
    """Decides how captured requests read the prefix cache, and which rows they borrow.

    block_size: tokens per block, used as tokens per hash until `bind`. If hits may end inside a block, the number of
    hashes does not determine the length of a hit. A request that needs rows of such a hit computes all its tokens
    again.
    """

    def __init__(self, context: Context, block_size: int) -> None:
        options = context.options
        self.sources = RowSources(options.chunk_tokens, block_size, context.ranks > 1, options.sink == "disk")
        self._holds = Holds(options.store_dir)
        self._lent: dict[str, str] = {}  # path of a borrower's store -> path of the links that it copies from
        self._part_hits = False  # whether hits may end inside a block
        self._dropped = 0  # blocks that vLLM drops from the end of a hit: 1 with drafts that read the target's states
        self._later: list[tuple[CacheReads, int, int]] = []  # requests that wait, with `hit` and `low` of `allows`
        self.counts = {"recomputed_tokens": 0, "borrowed_tokens": 0}

    def arrived(self, tracked: Captured) -> CacheReads:
        """A request that will be captured has arrived."""
        request, params, kind = tracked.request, tracked.params, self.sources.kind(tracked.selection)
        source = Source(tracked.capture, tracked.path, request.request_id, params.key, kind, params.start)
        self.sources.add(source)
        return CacheReads(tracked, source)

    def allows(self, reads: CacheReads, hit: int, low: int) -> bool:
        """Whether a request may begin with a hit of `hit` tokens. If not, vLLM asks again in the next pass.

        low: position below which the request wants no rows, or already has them.
        """
        if (shorter := reads.shorter(hit, self.sources.hash_size)) in (0, 1):
            self._dropped = shorter
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
        """(source, position up to which a request can borrow its rows), None without a source. A request that was
        scheduled before has its own rows. `keep_if` needs scores of all rows, and borrowed rows have no scores.
        """
        if reads.begun or self._part_hits or reads.tracked.params.keep_if is not None:
            return None
        return self.sources.find(reads.source, reads.request, top)

    def _hold(self, reads: CacheReads, source: Source) -> bool:
        """Keep the store of a source until its rows are copied. Returns whether the store is kept."""
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
        """At the end of a pass, cut hashes of waiting requests. Returns those that must not read the prefix cache."""
        nothing, size = [], self.sources.hash_size
        for reads, hit, low in self._later:
            top = min(hit, reads.tracked.limit)
            found = self._find(reads, top)
            stop = low if found is None else found[1]
            if stop < size or self._part_hits:
                nothing.append(reads.request)
            elif stop < top or top == hit:  # otherwise all wanted rows of the hit can be borrowed now
                reads.cut(stop // size + self._dropped)
        self._later.clear()
        return nothing

    def close(self) -> None:
        """Remove all links."""
        self._holds.close()

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
        """The store at `path` is finished, and the rows that it borrows are copied. whole: whether it has all rows."""
        self.sources.stored(path, whole)
        if path in self._lent:
            self._holds.release(self._lent.pop(path))

    def scheduled(self, reads: CacheReads) -> None:
        """Prompt tokens of a request are computed in this step. Counts cached tokens that are computed again."""
        again, reads.hit = reads.hit - reads.request.num_computed_tokens, 0
        if again > 0:
            reads.recomputed += again
            self.counts["recomputed_tokens"] += again

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Read the number of tokens per hash, and forget all sources whenever the prefix cache is reset."""
        self.sources.hash_size = kv_cache_manager.block_pool.hash_block_size
        self._part_hits = bool(getattr(kv_cache_manager.coordinator, "enable_partial_hash_hits", False))
        reset = kv_cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self.sources.reset()
            return reset()

        kv_cache_manager.reset_prefix_cache = reset_prefix_cache

    def take_counts(self) -> dict[str, int]:
        """Increases since the last call, by key of `metrics.COUNTERS`."""
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return counts
