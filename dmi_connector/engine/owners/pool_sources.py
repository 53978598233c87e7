# SPDX-License-Identifier: Apache-2.0
"""Finds captures whose rows other requests can borrow for tokens in vLLM's prefix cache.

vLLM's hash of a block covers all tokens up to the block's end, and everything else that their values depend on: salt,
LoRA adapter, images. So one entry states that a capture has all rows from its first row to the end of a chunk. Only
whole chunks are borrowed, because writers copy them in encoded form. A hit that ends inside a chunk is shortened
(pool_borrowing.py).

When the request of a source ends, a running request that borrowed its rows replaces it as their source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from dmi_connector.hooks import Selection

_ENTRIES = 1 << 16
"""Maximum number of chunks that are remembered, about 20 MB. The least recently used one is forgotten first."""
_Key = tuple[int, int, bytes]
"""(kind, position of the first row, hash of a block)."""
_KINDS = 64
"""Maximum number of selections that are remembered. Requests choose hooks and layers, so there may be any number."""


@dataclass(eq=False)
class Source:
    """A capture whose rows others may borrow.

    kind: number of its selection. start: position of its first row. age: number of resets of the prefix cache before it
    began. ended: monotonic time at which its request ended, None before. written: whether a worker reported that its
    store is finished. gone: whether the capture lacks rows, or its store was removed. entries: (position up to which it
    has rows, key of the entry). borrowers: (position up to which it borrows, capture of the same kind).
    """

    capture: int
    path: str
    request_id: str
    key: str | None
    kind: int
    start: int
    age: int = 0
    ended: float | None = None
    written: bool = False
    gone: bool = False
    entries: list[tuple[int, _Key]] = field(default_factory=list, repr=False)
    borrowers: list[tuple[int, Source]] = field(default_factory=list, repr=False)

    @property
    def runs(self) -> bool:
        """Whether its request runs and it has all rows. Its store is then kept until borrowers have copied its rows."""
        return self.ended is None and not self.gone


class RowSources:
    """Sources by the hash of the last block of each of their chunks.

    chunk: rows per chunk. hash_size: tokens per hash. alike: whether only captures with the same selection share rows.
    It is true with several ranks, because the selection determines which rank writes which layers. age: number of
    resets of the prefix cache. After a reset the model may have other weights. entries: maximum number of chunks.
    """

    def __init__(self, chunk: int, hash_size: int, alike: bool, enabled: bool, entries: int = _ENTRIES) -> None:
        self.hash_size, self.age = hash_size, 0
        self._chunk, self._alike, self._enabled, self._most = chunk, alike, enabled, entries
        self._entries: OrderedDict[_Key, Source] = OrderedDict()
        self._kinds: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._hooks: dict[int, Mapping[str, tuple[int, ...]]] = {}
        self._last = 0
        self._known: WeakValueDictionary[int | str, Source] = WeakValueDictionary()  # by capture and by store path

    def __len__(self) -> int:
        return len(self._entries)

    def kind(self, selection: Selection) -> int:
        """The number of a selection, the same for equal selections until it is forgotten."""
        hooks = selection.row_hooks
        key = tuple(hooks.items())
        if key not in self._kinds:
            self._last += 1
            self._kinds[key] = self._last
            self._hooks[self._last] = hooks
            if len(self._kinds) > _KINDS:
                del self._hooks[self._kinds.popitem(last=False)[1]]
        self._kinds.move_to_end(key)
        return self._kinds[key]

    def add(self, source: Source) -> None:
        """Register the capture of a request that has arrived."""
        self._known[source.capture] = self._known[source.path] = source

    def note(self, source: Source, request: Request, stop: int) -> None:
        """Add an entry if a chunk of `source` ends at position `stop`. All rows below it were handed to the workers."""
        rows = stop - source.start
        if not self._enabled or source.gone or source.age < self.age:
            return
        if rows <= 0 or rows % self._chunk or stop % self.hash_size:
            return
        key = (source.kind, source.start, request.block_hashes[stop // self.hash_size - 1])
        self._entries[key] = source
        source.entries.append((stop, key))
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def borrowed(self, source: Source, by: Source, stop: int) -> None:
        """`by` borrows the rows of `source` below position `stop`."""
        if by.kind != source.kind:
            return
        if source.ended is None:
            source.borrowers.append((stop, by))
        else:
            self._replace(source, by, stop)

    def ended(self, source: Source) -> None:
        """The request of `source` has ended. The running borrower with the most rows (the last such) replaces it."""
        running = [(stop, other) for stop, other in source.borrowers if other.runs and other.age == self.age]
        source.borrowers.clear()
        if running:
            running.sort(key=lambda found: found[0])
            stop, heir = running.pop()
            heir.borrowers += running
            self._replace(source, heir, stop)

    def _replace(self, source: Source, by: Source, stop: int) -> None:
        """Make `by` the source of the rows of `source` below position `stop`."""
        for end, key in source.entries:
            if end <= stop and self._entries.get(key) is source:
                self._entries[key] = by
                by.entries.append((end, key))

    def find(self, wants: Source, request: Request, top: int) -> tuple[Source, int] | None:
        """(source, position up to which `wants` can borrow its rows, at most `top`), None without a source."""
        if not self._entries:
            return None
        size, hashes = self.hash_size, request.block_hashes
        kinds = self._covering(wants.kind)
        for stop in range(top - (top - wants.start) % self._chunk, wants.start, -self._chunk):
            if stop % size or stop // size > len(hashes):
                continue
            for kind in kinds:
                key = (kind, wants.start, hashes[stop // size - 1])
                source = self._entries.get(key)
                if source is None:
                    continue
                if not source.gone:
                    self._entries.move_to_end(key)
                    return source, stop
                del self._entries[key]
        return None

    def _covering(self, kind: int) -> list[int]:
        """Numbers of the selections that have all hooks and layers of selection `kind`."""
        mine = self._hooks.get(kind)
        if self._alike or mine is None:
            return [kind]
        return [
            other
            for other, hooks in self._hooks.items()
            if all(set(layers) <= set(hooks.get(name, ())) for name, layers in mine.items())
        ]

    def lost(self, captures: Iterable[int]) -> None:
        """These captures lack rows."""
        for capture in captures:
            if (source := self._known.get(capture)) is not None:
                source.gone = True

    def stored(self, path: str, whole: bool) -> None:
        """The store at `path` is finished. whole: whether it has all rows."""
        if (source := self._known.get(path)) is not None:
            source.written = True
            source.gone |= not whole

    def reset(self) -> None:
        """Forget all entries, because the prefix cache is reset."""
        self._entries.clear()
        self.age += 1
