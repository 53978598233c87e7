# SPDX-License-Identifier: Apache-2.0
"""Scheduler half of a pool: admits requests, allocates pages for their rows, and limits the tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.logger import init_logger

from dmi_connector.engine.messages import Borrow, StepMetadata
from dmi_connector.engine.owners.base import RowSlots
from dmi_connector.engine.owners.pool_borrowing import Borrowing
from dmi_connector.engine.owners.pool_free import Pages
from dmi_connector.engine.owners.pool_head import Head
from dmi_connector.engine.owners.pool_limits import StepLimits, page_size
from dmi_connector.engine.owners.pool_rows import Rows
from dmi_connector.option_values import OptionError, refuse

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from dmi_connector.engine.owners.base import Captured, Context

logger = init_logger("vllm.dmi_connector")


class PoolSlots(RowSlots):
    """Slots of rows in a pool.

    There are no pages until `sized` is called. blocks: number of blocks of vLLM's cache. cache: bytes of vLLM's cache.
    most: maximum number of pages of a request, in addition to those for its prompt tokens of one step.

    To avoid deadlocks, a request is admitted only if the pool has pages for it, for all admitted requests, and for one
    step. Pages whose rows were handed to the workers count as free, because workers gather these rows even if no
    request runs. A request with `keep_if` needs pages for all its rows. `head` keeps smaller requests from overtaking a
    larger request forever.
    """

    eager: ClassVar[bool] = True
    stays: ClassVar[bool] = True

    def __init__(
        self, context: Context, group: int, block_size: int, blocks: int, limits: StepLimits, cache: int = 0
    ) -> None:
        super().__init__(group, block_size)
        self._context, self._blocks, self._cache, self.limits = context, blocks, cache, limits
        self.size = page_size(block_size)
        self._slots = np.zeros((1, self.size), np.int64)  # [pages, slots of a page]; at first only the null page
        self._chunk = context.options.chunk_tokens
        self.most = limits.pages_of_request(self._chunk, self.size, aligned=False)
        self._usual = limits.pages_of_request(self._chunk, self.size, aligned=self._chunk % self.size == 0)
        self._admitted_pages = 0
        self._behind = int(limits.of_request > 1)  # the row of the last known token may be that of a rejected one
        self.pages = Pages(0)
        self._rows: dict[str, Rows] = {}
        self._prompts: dict[str, Rows] = {}  # admitted requests with prompt tokens to compute
        self._waiting = 0  # number of requests that are not admitted
        self.head: Head[Rows] = Head(self.most)
        self._running = 0  # number of requests in the last step
        self._handed_rows = 0
        self._given: list[tuple[int, int, int]] = []  # pages to take back: (rows handed until then, page, entry)
        self._table: dict[int, int] = {}  # entry -> page, for entries that change before the forward
        self._skip: list[Request] = []  # requests that must not read the prefix cache
        self.borrowing = Borrowing(context, block_size)
        self._hits: dict[str, int] = {}  # number of cached tokens of a request that is being scheduled

    def sized(self, pages: int) -> None:
        if pages == self.pages.count:
            return  # a repeated call, and pages may be in use
        least = self._pages(self.limits.floor(self.limits.requests)) + self.most
        if pages < least:  # the workers chose the size before the size of blocks was known
            page_bytes = self.size * self._context.layout.row_bytes
            raise OptionError(
                f"pool_bytes: {(pages + 1) * page_bytes} is too small for one captured request and one step with "
                f"{self.limits.prompt} tokens of prompts; give at least {(least + 1) * page_bytes}, or lower "
                "max_num_seqs or chunk_tokens, or choose fewer hooks"
            )
        self.pages = Pages(pages)
        self._slots = np.arange((1 + pages) * self.size).reshape(-1, self.size)
        rows, limits = pages * self.size, self.limits
        pool, least = rows * self._context.layout.row_bytes, limits.floor(limits.requests)
        logger.info(
            "dmi_connector: a pool of %d rows (%.2f GB), and a cache of %d tokens (%.3f of its size without the pool)",
            rows,
            pool / 1e9,
            self._blocks * self.block_size,
            self._cache / (self._cache + pool),
        )
        logger.info(
            "dmi_connector: the pool holds %d captured requests at a time with steps of %d tokens, and %d with steps "
            "of %d tokens, in chunks of %d tokens; other requests wait",
            max(0, (pages - self._pages(limits.tokens)) // self._usual),
            limits.tokens,
            max(0, (pages - self._pages(least)) // self._usual),
            least,
            self._chunk,
        )

    # ---- slots ------------------------------------------------------------------------------------------------------

    def of(self, tracked: Captured, start: int, stop: int) -> np.ndarray:
        rows = self._rows[tracked.request.request_id]
        before = start // self.size
        pages = rows.pages[before - rows.first : -(-stop // self.size) - rows.first]
        slots: np.ndarray = self._slots[pages].ravel()
        return slots[start - before * self.size : stop - before * self.size]

    def _entry(self, tracked: Captured, page: int) -> int:
        """The table entry of page `page` of a request."""
        at = page * self.size
        return (tracked.blocks[at // self.block_size] * self.block_size + at % self.block_size) // self.size

    def _cover(self, rows: Rows, stop: int) -> None:
        """Allocate pages for rows of positions below `stop`, as far as vLLM has allocated blocks."""
        tracked = rows.tracked
        stop = min(stop, rows.stop, tracked.limit, len(tracked.blocks) * self.block_size)
        last = rows.first + len(rows.pages) - 1
        if rows.pages and rows.entries[-1] < 0 and last * self.size < stop and rows.captured < (last + 1) * self.size:
            self._enter(rows, last, rows.pages[-1])  # the request was preempted in the middle of this page
        while (page := rows.first + len(rows.pages)) * self.size < stop:
            rows.pages.append(self.pages.take())
            rows.entries.append(-1)
            self._enter(rows, page, rows.pages[-1])

    def _enter(self, rows: Rows, page: int, place: int) -> None:
        entry = rows.entries[page - rows.first] = self._entry(rows.tracked, page)
        self._table[entry] = place

    def cover(self, output: SchedulerOutput, gathered: int) -> list[tuple[Captured, int]]:
        """See `RowSlots.cover`. Returns the requests whose prompt tokens are computed in this step."""
        self.pages.gathered(gathered)
        self._take_back()
        scheduled = output.num_scheduled_tokens
        prompts: list[tuple[Captured, int]] = []
        for request_id in [*self._prompts]:
            if request_id in scheduled:
                rows = self._prompts[request_id]
                request = rows.tracked.request
                self.borrowing.scheduled(rows.reads)
                rows.seen = rows.ahead = request.num_computed_tokens + scheduled[request_id]
                if rows.seen >= request.num_tokens and not request.resumable:
                    del self._prompts[request_id]
                    rows.ahead += self.limits.lookahead
                self._cover(rows, rows.ahead)
                prompts.append((rows.tracked, rows.seen))
        cached = output.scheduled_cached_reqs
        for request_id in compress(cached.req_ids, cached.new_block_ids):  # most requests get no blocks
            if (known := self._rows.get(request_id)) is not None:
                self._cover(known, known.ahead)
        return prompts

    def look(self, running: Sequence[Captured], scheduled: Mapping[str, int]) -> None:
        self._take_back()
        for tracked in running:
            request_id = tracked.request.request_id
            if request_id not in self._prompts:
                rows, computed = self._rows[request_id], tracked.request.num_computed_tokens
                rows.seen = computed + scheduled.get(request_id, 0)
                rows.ahead = rows.seen + self.limits.lookahead
                placed = (rows.first + len(rows.pages)) * self.size
                # Otherwise `_cover` has nothing to do.
                if rows.ahead > placed and len(tracked.blocks) * self.block_size > placed:
                    self._cover(rows, rows.ahead)

    def _take_back(self) -> None:
        """Take back pages whose rows are handed over before this forward, or were handed over after the last one."""
        for handed, page, entry in self._given:
            if entry >= 0:
                self._table[entry] = -1
            self.pages.give_back(page, handed)
        self._given.clear()

    def handed(self, tracked: Captured, stop: int, rows: int) -> None:
        mine, self._handed_rows = self._rows[tracked.request.request_id], rows
        mine.exported = stop
        self.borrowing.sources.note(mine.reads.source, tracked.request, stop)
        whole = stop // self.size - mine.first
        if whole > 0:
            self._give(mine, whole)

    def _give(self, rows: Rows, count: int) -> None:
        """Release the first `count` pages of a request. They are free once their rows are gathered."""
        self._given += [(self._handed_rows, *of) for of in zip(rows.pages[:count], rows.entries[:count], strict=True)]
        del rows.pages[:count], rows.entries[:count]
        rows.first += count

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _room(self, tracked: Captured) -> tuple[int, int]:
        """(first position whose row gets no slot, number of pages that are reserved when a request is admitted)."""
        if tracked.params.keep_if is not None:
            return self.limits.room_of_all(tracked, self.size)
        return self.limits.longest, self.most if tracked.params.start % self.size else self._usual

    def check_room(self, tracked: Captured) -> None:
        condition, (stop, most) = tracked.params.keep_if, self._room(tracked)
        step = self._pages(self.limits.floor(self.limits.requests))
        if condition is not None and most + step > self.pages.count:
            needed = (1 + most + step) * self.size * self._context.layout.row_bytes
            raise refuse(
                "dmi.keep_if",
                condition.text,
                f"keeps up to {stop - tracked.params.start} rows in the pool until the request ends, and pool_bytes "
                f"has room for {(self.pages.count - step) * self.size}; lower max_tokens, give dmi.tokens, or start "
                f"the server with pool_bytes {needed} or more",
            )

    def arrived(self, tracked: Captured) -> None:
        request, first = tracked.request, tracked.params.start // self.size
        if request.resumable:  # the next prompt includes the generated tokens, whose rows do not stay until then
            tracked.params = replace(tracked.params, include_output_tokens=True)
        reads_cache, reads = not request.skip_reading_prefix_cache, self.borrowing.arrived(tracked)
        rows = self._rows[request.request_id] = Rows(tracked, first, *self._room(tracked), reads_cache, reads)
        self.head.smallest = min(self.head.smallest, rows.most)
        self._waiting += 1
        self._choose_budget()

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns None ("ask again later") if the request must wait for pages, or for a shorter prefix-cache hit."""
        rows = self._rows.get(request.request_id)
        if rows is None:
            return 0, False
        computed = max(computed, self._hits.pop(request.request_id, 0))
        if not self._admit(rows):
            if request.skip_reading_prefix_cache:  # with it, vLLM would treat None as 0
                request.skip_reading_prefix_cache = False
                self._skip.append(request)
            return None, False
        low = max(rows.tracked.params.start, rows.captured)
        return (0, False) if self.borrowing.allows(rows.reads, computed, low) else (None, False)

    def begin(self, tracked: Captured) -> Borrow | None:
        rows = self._rows[tracked.request.request_id]
        borrow = self.borrowing.begin(rows.reads)
        if borrow is not None:
            rows.captured = rows.exported = tracked.params.start + len(borrow.token_ids)
            rows.first = -(-rows.captured // self.size)
        return borrow

    def close(self) -> None:
        self.borrowing.close()

    def lost(self, captures: Iterable[int]) -> None:
        self.borrowing.sources.lost(captures)

    def stored(self, path: str, whole: bool) -> None:
        self.borrowing.stored(path, whole)

    def _admit(self, rows: Rows) -> bool:
        """Reserve pages for a request that has none. Returns whether it may begin in a step of the present budget."""
        if not rows.admitted and not self.head.allows(rows):
            return False
        step = self._pages(self.limits.reserve)
        if self._admitted_pages + (0 if rows.admitted else rows.most) + step > self.pages.count:
            if not rows.admitted:
                self.head.refused(rows)
            return False
        if not rows.admitted:
            rows.admitted = True
            self.head.left(rows)
            self._admitted_pages += rows.most
            self._waiting -= 1
            self._prompts[rows.tracked.request.request_id] = rows
        return True

    def _pages(self, tokens: int) -> int:
        return self.limits.pages_of_step(tokens, self.size)

    def preempted(self, tracked: Captured, computed: int, metadata: StepMetadata) -> int:
        """Keep the rows of the request's incomplete last chunk in their pages.

        In an engine that may sleep, these rows are computed again, because sleep frees the memory of the pool.
        """
        request = tracked.request
        rows = self._rows[request.request_id]
        computed = min(max(computed, rows.seen), request.num_tokens - self._behind, tracked.limit)
        rows.captured = max(rows.captured, rows.exported, 0 if self._context.may_sleep else computed)
        rows.seen = rows.ahead = 0
        for index, entry in enumerate(rows.entries):
            if entry >= 0:
                self._table[entry] = rows.entries[index] = -1
        kept = max(0, -(-rows.captured // self.size) - rows.first)
        self._given += [(self._handed_rows, page, -1) for page in rows.pages[kept:]]
        del rows.pages[kept:], rows.entries[kept:]
        self._prompts[request.request_id] = rows
        request.skip_reading_prefix_cache = not rows.reads_cache
        return rows.captured

    def captured(self, tracked: Captured) -> int:
        return self._rows[tracked.request.request_id].captured

    def attributes(self, tracked: Captured) -> dict[str, Any]:
        recomputed = self._rows[tracked.request.request_id].reads.recomputed
        return {"recomputed_tokens": recomputed} if recomputed else {}

    def ended(self, request: Request, blocks: list[int], waiting: bool, others: bool) -> bool:
        return False

    def forget(self, tracked: Captured) -> None:
        request_id = tracked.request.request_id
        rows = self._rows.pop(request_id)
        self.borrowing.ended(rows.reads)
        self._give(rows, len(rows.pages))
        self._waiting -= not rows.admitted
        self._admitted_pages -= rows.most if rows.admitted else 0
        self.head.left(rows)
        self._prompts.pop(request_id, None)

    # ---- the end of a scheduling pass -------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Write the changes of the table into the step's message, and choose the budget of the next pass."""
        if self._table:
            metadata.table = np.array([[*self._table], [*self._table.values()]], np.int64)
            self._table = {}
        metadata.need = self.pages.take_need()
        for request in [*self._skip, *self.borrowing.cut()]:  # not earlier: vLLM would treat None as 0
            request.skip_reading_prefix_cache = True
        self._skip.clear()
        self.head.end_pass()
        self._running = len(output.num_scheduled_tokens)
        self._choose_budget()

    def _choose_budget(self) -> None:
        """Set the token budget of the next step. While prompts are captured, the pool has a free row for each token.

        The budget leaves pages for waiting requests: for as many of them as may run and fit beside the smallest budget.
        """
        limits, spare = self.limits, self.pages.count - self._admitted_pages
        tokens = limits.tokens
        if self._prompts or self._waiting:
            kept = self._kept(spare - self._pages(limits.floor(limits.requests)))
            if self._prompts or kept:
                tokens = min(tokens, (spare - kept) * self.size)
        limits.scheduler.max_num_batched_tokens = limits.stock if tokens >= limits.tokens else tokens

    def _kept(self, pages: int) -> int:
        """Number of pages to leave for waiting requests. pages: free pages that the smallest budget does not need."""
        if (first := self.head.request) is not None and first.most > self.most:
            return first.most if first.most <= pages else 0
        more = min(self._waiting, max(0, self.limits.requests - self._running), max(0, pages // self.most))
        return more * self.most

    def take_counts(self) -> dict[str, int]:
        return self.borrowing.take_counts()

    # ---- vLLM's blocks ----------------------------------------------------------------------------------------------

    def freed(self, request_ids: Iterable[str]) -> None:
        """Nothing to free: a pool keeps no blocks of vLLM."""

    def take_release(self) -> bool:
        return False

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        self.borrowing.bind(kv_cache_manager)
        # Record the length of hits that may end inside a block: vLLM tells a connector only their whole blocks.
        if not getattr(kv_cache_manager.coordinator, "enable_partial_hash_hits", False):
            return
        find = kv_cache_manager.get_computed_blocks

        def get_computed_blocks(request: Request, *limits: Any, **more: Any) -> Any:
            found = find(request, *limits, **more)  # from vLLM 0.33 on, with a maximum length of the hit
            if request.request_id in self._rows:
                self._hits[request.request_id] = found[1]
            return found

        kv_cache_manager.get_computed_blocks = get_computed_blocks
