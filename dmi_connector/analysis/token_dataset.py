# SPDX-License-Identifier: Apache-2.0
"""A torch data set of tokens: shuffled batches of the rows of one or several hooks, out of many stores."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    raise ImportError("TokenDataset: torch is not installed; install dmi_connector[torch]") from error

from dmi_connector.dtypes import as_torch
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.captures import Captures, named_rows, open_captures
from dmi_connector.store.read.chunk_reader import read_blocks
from dmi_connector.store.read.hook_array import ShardPieces
from dmi_connector.store.read.row_view import RowView
from dmi_connector.store.read.thread_pool import read_threads, set_read_threads

Batch = torch.Tensor | dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Stream:
    """What one worker of one rank reads in one epoch, in the order of its reading.

    blocks: numbers of blocks. ends: tokens up to the end of each. batches: that it gives. seed: of its shuffling.
    """

    blocks: np.ndarray
    ends: np.ndarray
    batches: int
    seed: tuple[int, ...]


class TokenDataset(IterableDataset[Batch]):
    """Batches of rows of hooks in many stores. Give it to a `DataLoader` with batch_size=None, or loop over it.

    With one hook a batch is a tensor [batch_size, width], with several a dict of them, in which row i of each is of the
    same token. Tensors have the stored dtype, or `dtype`; reduced hooks are decoded to float32.

    captures: from `open_captures`, or a directory. hooks: such as "resid_pre@3" (hook@layer), "resid_final" or
    "blocks.3.attn.hook_z".

    Order: chunks of tokens are drawn from all stores at random; those of `buffer_tokens` are read together, and their
    tokens mixed. The same seed gives the same batches; it depends on the numbers of ranks and workers. Each epoch has
    another order. Tokens that do not fill a batch are left out of that epoch. shuffle=False: the order of the stores.

    epochs: how often all tokens are given; None: without end. skip: rows that are left out at the start of each store.
    rank, world_size: of this process; by default those of torch.distributed, if that is initialised. Ranks and workers
    read different tokens, and give equally many batches.

    Memory: two buffers of `buffer_tokens` rows of all hooks. A batch is a part of such a buffer: clone what you keep.

    Raises ValueError for hooks that cannot be batched, for names of TransformerLens whose hook was stored as other
    values, and when the stores hold too few tokens; KeyError for a hook or layer that the first store did not capture.
    Other stores are opened when they are read. One that did not capture it raises KeyError then:
    `open_captures(..., hooks=hooks)` leaves such stores out.
    """

    def __init__(
        self,
        captures: Captures | str | os.PathLike[str],
        hooks: str | Sequence[str],
        batch_size: int = 4096,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_tokens: int = 1 << 16,
        epochs: int | None = 1,
        skip: int = 0,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        found = captures if isinstance(captures, Captures) else open_captures(captures)
        names = [hooks] if isinstance(hooks, str) else list(hooks)
        if not names or batch_size < 1 or buffer_tokens < batch_size:
            raise ValueError(
                f"hooks {names}, batch_size {batch_size} and buffer_tokens {buffer_tokens} do not fit; name a hook, and"
                " let the buffer hold a batch"
            )
        self.views = {name: named_rows(found, name, skip) for name in names}
        for name, view in self.views.items():
            if len(view.shape) == 3:
                raise ValueError(f"{name!r} has layers {view.layers}; name one, as in '{name}@{view.layers[0]}'")
        self.single = isinstance(hooks, str)
        self.batch_size, self.buffer_tokens = batch_size, buffer_tokens
        self.seed, self.shuffle, self.epochs, self.dtype = seed, shuffle, epochs, dtype
        own_rank, own_size = _distributed()
        self.rank = own_rank if rank is None else rank
        self.world_size = own_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside the world of {self.world_size}")
        self._blocks = next(iter(self.views.values())).blocks()
        most = self.buffer_tokens + int(max(self._blocks[2], default=0))
        self._memory = _Memory(self.views, min(self.num_tokens, most))
        self._start = self._at = (0, 0)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as plain values."""
        names = ("batch_size", "seed", "shuffle", "buffer_tokens", "epochs", "rank", "world_size")
        return {"hooks": list(self.views), "tokens": self.num_tokens, **{name: getattr(self, name) for name in names}}

    @property
    def remote(self) -> bool:
        """Whether some stores lie in an object store."""
        return any(isinstance(store, RemotePath) for store in next(iter(self.views.values())).stores)

    @property
    def num_tokens(self) -> int:
        """Tokens of all stores."""
        return int(self._blocks[2].sum())

    def batches(self, epoch: int = 0, workers: int = 1) -> int:
        """Batches that this rank gives in an epoch. Raises ValueError when there are too few tokens for one each."""
        return self._stream(epoch, 0, workers).batches * workers

    # ---- resume -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iteration of this object stands: after the batches that it gave.

        Where a DataLoader has workers, these hold the iterations: use `loader`.
        """
        return self._state(self._at, 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches of `state`: the next iteration gives those that would have followed.

        Raises ValueError for a state of other tokens, settings or ranks.
        """
        self._start = self._at = self._checked(state, 1)

    def _state(self, at: tuple[int, int], workers: int) -> dict[str, Any]:
        return {"epoch": at[0], "batch": at[1], "workers": workers, "world_size": self.world_size, "of": self._print()}

    def _checked(self, state: dict[str, Any], workers: int) -> tuple[int, int]:
        for name, own in (("workers", workers), ("world_size", self.world_size), ("of", self._print())):
            if state[name] != own:
                if name == "of":
                    raise ValueError(
                        "the state is of other stores or settings; go on with those that it was saved with"
                    )
                raise ValueError(
                    f"the state is of {name} {state[name]}, not {own}; go on with those that it was saved with"
                )
        return int(state["epoch"]), int(state["batch"])

    def _print(self) -> str:
        """A digest of everything that the order depends on, but for ranks and workers."""
        names = [store.name for store in next(iter(self.views.values())).stores]
        facts = (names, list(self.views), self.batch_size, self.buffer_tokens, self.seed, self.shuffle)
        digest = hashlib.sha256(repr(facts).encode())
        for part in self._blocks:
            digest.update(part.tobytes())
        return digest.hexdigest()

    def loader(self, workers: int = 0, **options: Any) -> TokenLoader:
        """A loader with `workers` processes, and with exact resume. options: for torch's DataLoader."""
        return TokenLoader(self, workers, options)

    # ---- iteration --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        if info is None:
            start, self._start = self._start, (0, 0)
            return self.stream(0, 1, *start)
        set_read_threads(max(1, read_threads() // info.num_workers))
        # A DataLoader asks its workers in turn, from the first on: after a resume that one has another's part.
        epoch, batch = self._start
        given = batch + info.id
        return self.stream(given % info.num_workers, info.num_workers, epoch, given // info.num_workers)

    def stream(self, worker: int, workers: int, epoch: int, batch: int) -> Iterator[Batch]:
        """The batches of one worker from `batch` of `epoch` on."""
        memory = self._memory
        with ThreadPoolExecutor(1, "dmi-prefetch") as ahead:
            while self.epochs is None or epoch < self.epochs:
                self._at = (epoch, batch)
                stream = self._stream(epoch, worker, workers)
                for given in self._batches(stream, batch, memory, ahead):
                    batch += 1
                    self._at = (epoch, batch)
                    yield given
                epoch, batch = epoch + 1, 0
        self._at = (epoch, 0)

    def _stream(self, epoch: int, worker: int, workers: int) -> _Stream:
        counts = self._blocks[2]
        order = np.arange(len(counts))
        if self.shuffle:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        streams = self.world_size * workers
        number = self.rank * workers + worker
        parts = [order[i::streams] for i in range(streams)]
        least = min(int(counts[part].sum()) for part in parts) // self.batch_size
        if not least:
            raise ValueError(
                f"{self.num_tokens} tokens are too few for batches of {self.batch_size} in {streams} workers; use a"
                " smaller batch_size, or fewer workers"
            )
        return _Stream(parts[number], np.cumsum(counts[parts[number]]), least, (self.seed, epoch, number))

    def _batches(self, stream: _Stream, first: int, memory: _Memory, ahead: ThreadPoolExecutor) -> Iterator[Batch]:
        """The batches of an epoch from number `first` on. While one buffer is given out, the next is read."""
        size = self.batch_size
        groups = self._groups(stream)
        wanted = [group for group in groups if first * size < group[2] and group[1] < stream.batches * size]
        read = ahead.submit(self._read, stream, wanted[0][0], groups, memory) if wanted else None
        rest: list[dict[str, np.ndarray]] = []  # rows that did not fill a batch
        for i, (_, begin, end) in enumerate(wanted):
            assert read is not None
            rows, read = read.result(), None
            at = max(first * size - begin, 0)
            while first < stream.batches:
                lacking = size - _length(rest)
                part = _part(rows, at, min(lacking, end - begin - at))
                at += _length([part])
                if _length([part]) < lacking:
                    rest.append({name: values.copy() for name, values in part.items()})
                    break
                whole = (
                    {name: np.concatenate([r[name] for r in (*rest, part)], axis=1) for name in part} if rest else part
                )
                first, rest = first + 1, []
                del part
                yield self._given(whole)
                del whole
                if read is None and i + 1 < len(wanted):
                    # Not before: only now has the caller let go of the last batch of the buffer before this one.
                    read = ahead.submit(self._read, stream, wanted[i + 1][0], groups, memory)
            del rows
            if read is None and i + 1 < len(wanted):
                read = ahead.submit(self._read, stream, wanted[i + 1][0], groups, memory)

    def _groups(self, stream: _Stream) -> list[tuple[int, int, int]]:
        """(number, first token, one past the last token) of each part of a stream that is read at once."""
        most = self.buffer_tokens
        of_block = (stream.ends - 1) // most
        last = np.flatnonzero(np.diff(of_block, append=of_block[-1] + 1))
        ends = stream.ends[last].tolist()
        return [(i, begin, end) for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]

    def _read(
        self, stream: _Stream, number: int, groups: list[tuple[int, int, int]], memory: _Memory
    ) -> dict[str, np.ndarray]:
        """The rows of one group, mixed: name -> [1, rows, stored width]."""
        _, begin, end = groups[number]
        places = np.arange(end - begin)
        if self.shuffle:
            np.random.default_rng((*stream.seed, number)).shuffle(places)
        found = memory.take(end - begin)
        first, last = np.searchsorted(stream.ends, [begin, end - 1], "right").tolist()

        blocks = stream.blocks[first : last + 1]
        stores, rows, counts = (part[blocks].tolist() for part in self._blocks)
        stops = (stream.ends[first : last + 1] - begin).tolist()

        def plan(i: int) -> Iterator[ShardPieces]:
            there = places[stops[i] - counts[i] : stops[i]]
            for name, view in self.views.items():
                yield from view.plan_block(stores[i], rows[i], there, found[name])

        row_bytes = sum(buffer[:, :1].nbytes for buffer in found.values())
        read_blocks(plan, range(len(blocks)), row_bytes * max(counts))
        return found

    def _given(self, rows: dict[str, np.ndarray]) -> Batch:
        tensors = {name: as_torch(self.views[name].decoded(part)) for name, part in rows.items()}
        if self.dtype is not None:
            tensors = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}
        return next(iter(tensors.values())) if self.single else tensors


class TokenLoader:
    """Batches of a `TokenDataset` from worker processes. `state_dict` counts the batches that were given out.

    Each loop goes on where `load_state_dict` or the last loop left off; after the last epoch it begins anew.
    """

    def __init__(self, dataset: TokenDataset, workers: int, options: dict[str, Any]) -> None:
        self.dataset, self.workers, self._options = dataset, workers, options
        self._at = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: after the batches that it gave."""
        return self.dataset._state(self._at, max(1, self.workers))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches of `state`. Raises ValueError for a state of other tokens, settings or workers."""
        self._at = self.dataset._checked(state, max(1, self.workers))

    def __iter__(self) -> Iterator[Batch]:
        self.dataset._start = self._at
        epoch, batch = self._at
        most = functools.cache(functools.partial(self.dataset.batches, workers=max(1, self.workers)))
        options = self._options
        if self.workers and self.dataset.remote:
            options = {"multiprocessing_context": "spawn", **options}  # the client of an object store bears no fork
        loader: DataLoader[Batch] = DataLoader(self.dataset, batch_size=None, num_workers=self.workers, **options)
        for given in loader:
            batch += 1
            if batch > most(epoch):
                epoch, batch = epoch + 1, 1
            self._at = (epoch, batch)
            yield given
        self._at = (0, 0)


class _Memory:
    """Buffers of `most` rows of each hook, which are used again when nobody has a part of them any more.

    Fresh memory for each would cost as many page faults. A copy in another process begins without a buffer.
    """

    def __init__(self, views: dict[str, RowView], most: int) -> None:
        self._views, self._most = views, most
        self._made: dict[str, list[np.ndarray]] = {name: [] for name in views}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memory, (self._views, self._most)

    def take(self, rows: int) -> dict[str, np.ndarray]:
        """name -> [1, rows, stored width]."""
        return {name: self._free(name)[:, :rows] for name in self._views}

    def _free(self, name: str) -> np.ndarray:
        made = self._made[name]
        for i in range(len(made)):
            # The list and the call hold a reference each. Each part of the buffer, numpy's or torch's, holds another.
            if sys.getrefcount(made[i]) == 2:
                return made[i]
        made.append(self._views[name].buffer(self._most))
        return made[-1]


def _part(rows: dict[str, np.ndarray], start: int, count: int) -> dict[str, np.ndarray]:
    return {name: part[:, start : start + count] for name, part in rows.items()}


def _length(parts: list[dict[str, np.ndarray]]) -> int:
    return sum(next(iter(part.values())).shape[1] for part in parts)


def _distributed() -> tuple[int, int]:
    """(rank, world size) of torch.distributed; (0, 1) where it is not in use."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
