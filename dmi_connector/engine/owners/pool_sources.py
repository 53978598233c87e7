# SPDX-License-Identifier: Apache-2.0
"""Which captures have the rows of tokens that vLLM's prefix cache has: others borrow them, and read the cache.

vLLM's hash of a block covers all tokens before it too, and what else decides their values: salt, LoRA adapter, images.
So one entry says of a capture that it has all rows from its first one to the end of a chunk. Only whole chunks are
borrowed, since writers copy them as they are encoded. A hit that ends elsewhere is cut (pool_borrowing.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from dmi_connector.hooks import Selection

_ENTRIES = 1 << 16
"""Chunks that are remembered, about 20 MB. The one that was not asked for longest is forgotten."""
_KINDS = 64
"""Selections that are remembered: requests choose hooks and layers, so their number is unbounded."""


@dataclass(eq=False)
class Source:
    """A capture whose rows others may borrow.

    kind: number of its selection. start: position of its first row. age: resets of the prefix cache before it began.
    ended: when its request did, by the monotonic clock. written: its store is finished, as a worker said. gone: it
    lacks rows, or its store was removed.
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


class RowSources:
    """Sources by the hash of the last block of each of their chunks.

    chunk: rows of a chunk. hash_size: tokens of a hash. alike: only captures of the same selection share rows: ranks
    share layers out by selection. age: resets of the prefix cache. After one the model may have other weights.
    """

    def __init__(self, chunk: int, hash_size: int, alike: bool, enabled: bool, entries: int = _ENTRIES) -> None:
        self.hash_size, self.age = hash_size, 0
        self._chunk, self._alike, self._enabled, self._most = chunk, alike, enabled, entries
        self._entries: OrderedDict[tuple[int, int, bytes], Source] = OrderedDict()
        self._kinds: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._hooks: dict[int, Mapping[str, tuple[int, ...]]] = {}
        self._last = 0
        self._known: WeakValueDictionary[int | str, Source] = WeakValueDictionary()  # by capture and by path

    def __len__(self) -> int:
        return len(self._entries)

    def kind(self, selection: Selection) -> int:
        """The number of a selection."""
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
        """A request is to be captured."""
        self._known[source.capture] = self._known[source.path] = source

    def note(self, source: Source, request: Request, stop: int) -> None:
        """All rows of `source` below position `stop` were handed to the workers."""
        rows = stop - source.start
        if not self._enabled or source.gone or source.age < self.age:
            return
        if rows <= 0 or rows % self._chunk or stop % self.hash_size:
            return
        key = (source.kind, source.start, request.block_hashes[stop // self.hash_size - 1])
        self._entries[key] = source
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def find(self, wants: Source, request: Request, top: int) -> tuple[Source, int] | None:
        """(source, position up to which it has rows that `wants` borrows, at most `top`), None without any."""
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
        """Selections that have all hooks and layers of another."""
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
        """The store at `path` is finished. whole: it has all rows."""
        if (source := self._known.get(path)) is not None:
            source.written = True
            source.gone |= not whole

    def reset(self) -> None:
        """Forget all: the prefix cache is reset."""
        self._entries.clear()
        self.age += 1
