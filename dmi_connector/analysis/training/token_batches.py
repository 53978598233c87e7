# SPDX-License-Identifier: Apache-2.0
"""Shuffled batches of the rows of one or several hooks from many stores, and the position of a loop over them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise ImportError("TokenDataset: torch is not installed; install dmi_connector[torch]") from error

from dmi_connector.analysis.training.row_buffers import RowBuffers, length_of, part_of
from dmi_connector.analysis.training.worker_loops import Batch, Position, WorkerLoops
from dmi_connector.captures.captures import Captures, named_rows, open_captures
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite, not_finite
from dmi_connector.dtypes import as_numpy, as_torch
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.arrays.chunk_reader import read_blocks
from dmi_connector.store.read.arrays.hook_array import ShardPieces
from dmi_connector.store.read.files.thread_pool import read_threads, set_read_threads


@dataclass(frozen=True)
class _Stream:
    """What one worker of one rank reads in one epoch, in this order.

    blocks: numbers of blocks. ends: tokens up to the end of each. batches: that it gives. seed: of its shuffling.
    groups: (number, first token, one past the last token) of each part that is read at once.
    """

    blocks: np.ndarray
    ends: np.ndarray
    batches: int
    seed: tuple[int, ...]
    groups: list[tuple[int, int, int]]


class TokenBatches(IterableDataset[Batch]):
    """Order, position and reading of the batches. `TokenDataset` describes the arguments and adds `loader`."""

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
        finite: str = "skip",
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
        self._memory = RowBuffers(self.views, min(self.num_tokens, most))
        self._finite = FiniteCheck(finite)
        self.set_epoch(0)

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

    @property
    def not_finite(self) -> dict[str, int]:
        """Rows with values that are not finite that were read so far: path of the store -> their number, again in each
        epoch. Where a DataLoader has workers, these count: use `loader`.
        """
        return dict(self._finite.rows)

    # ---- resume -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iteration of this object: after the batches that it gave.

        Where a DataLoader has workers, these hold the iterations: use `loader`.
        """
        return self._state(self._at, 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin with this epoch, which has an order of its own. Without it the first loop begins with
        epoch 0, and each other one with the epoch after those of the loop before. Persistent workers of a `DataLoader`
        do not see it: use `loader`. Raises ValueError below 0.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch} is not valid; use 0 or more")
        self._go_on_at(self._begin(epoch))

    def _go_on_at(self, position: Position) -> None:
        self._next = self._at = position
        self._loops = WorkerLoops()

    def _begin(self, epoch: int) -> Position:
        return Position(epoch, 0, None if self.epochs is None else epoch + self.epochs)

    def _after(self, start: Position) -> Position:
        """Where the next loop begins, after one that began at `start`."""
        return self._begin(start.epoch + 1 if start.end is None else start.end)

    def _start_loop(self) -> Position:
        start, self._next = self._next, self._after(self._next)
        return start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches of `state`: the next iteration gives those that would have followed.

        Raises ValueError for a state of other tokens, settings or ranks.
        """
        self._go_on_at(self._checked(state, 1))

    def _state(self, at: Position, workers: int) -> dict[str, Any]:
        return {**asdict(at), "workers": workers, "world_size": self.world_size, "of": self._print()}

    def _checked(self, state: dict[str, Any], workers: int) -> Position:
        for name, own in (("workers", workers), ("world_size", self.world_size), ("of", self._print())):
            if state[name] != own:
                if name == "of":
                    raise ValueError(
                        "the state is of other stores or settings; go on with those that it was saved with"
                    )
                raise ValueError(
                    f"the state is of {name} {state[name]}, not {own}; go on with those that it was saved with"
                )
        end = state.get("end", self.epochs)  # older states lack it
        return Position(int(state["epoch"]), int(state["batch"]), end)

    def _print(self) -> str:
        """A digest of everything that determines the order, except ranks and workers."""
        names = [store.name for store in next(iter(self.views.values())).stores]
        facts = (names, list(self.views), self.batch_size, self.buffer_tokens, self.seed, self.shuffle)
        digest = hashlib.sha256(repr(facts).encode())
        for part in self._blocks:
            digest.update(part.tobytes())
        return digest.hexdigest()

    # ---- iteration --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        start = self._start_loop() if info is None else self._loops.start(info, self._next, self._after)
        return self._finite_batches(self.worker_batches(start))

    def _finite_batches(self, batches: Iterator[Batch | None]) -> Iterator[Batch]:
        for batch in batches:
            self._finite.warn()
            if batch is not None:
                yield batch
        self._finite.warn_all()

    def worker_batches(self, start: Position) -> Iterator[Batch | None]:
        """The batches of this process, which may be a worker of a DataLoader. None: a batch without a finite row."""
        info = get_worker_info()
        if info is None:
            return self._batches_from(0, 1, start)
        set_read_threads(max(1, read_threads() // info.num_workers))
        # A DataLoader asks its workers in turn, from the first on: after a resume that one has another's part.
        given = start.batch + info.id
        first = replace(start, batch=given // info.num_workers)
        return self._batches_from(given % info.num_workers, info.num_workers, first)

    def _batches_from(self, worker: int, workers: int, at: Position) -> Iterator[Batch | None]:
        """The batches of one worker, starting at a position."""
        memory = self._memory
        with ThreadPoolExecutor(1, "dmi-prefetch") as ahead:
            while at.end is None or at.epoch < at.end:
                self._at = at
                stream = self._stream(at.epoch, worker, workers)
                for given in self._batches(stream, at.batch, memory, ahead):
                    self._at = at = replace(at, batch=at.batch + 1)
                    yield given
                at = replace(at, epoch=at.epoch + 1, batch=0)
        self._at = self._begin(at.epoch)

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
        ends = np.cumsum(counts[parts[number]])
        return _Stream(parts[number], ends, least, (self.seed, epoch, number), self._groups(ends))

    def _batches(
        self, stream: _Stream, first: int, memory: RowBuffers, ahead: ThreadPoolExecutor
    ) -> Iterator[Batch | None]:
        """The batches of an epoch, starting with number `first`. While one buffer is used, the next is read."""
        size = self.batch_size
        wanted = [group for group in stream.groups if first * size < group[2] and group[1] < stream.batches * size]
        read = ahead.submit(self._read, stream, wanted[0], memory) if wanted else None
        rest: list[dict[str, np.ndarray]] = []  # rows that did not fill a batch
        for i, (_, begin, end) in enumerate(wanted):
            assert read is not None
            rows, read = read.result(), None
            at = max(first * size - begin, 0)
            while first < stream.batches:
                lacking = size - length_of(rest)
                part = part_of(rows, at, min(lacking, end - begin - at))
                at += length_of([part])
                if length_of([part]) < lacking:
                    rest.append({name: values.copy() for name, values in part.items()})
                    break
                whole = (
                    {name: np.concatenate([r[name] for r in (*rest, part)], axis=1) for name in part} if rest else part
                )
                first, rest = first + 1, []
                del part
                yield self._given(whole, stream, first - 1)
                del whole
                if read is None and i + 1 < len(wanted):
                    # Not before: only now has the caller let go of the last batch of the buffer before this one.
                    read = ahead.submit(self._read, stream, wanted[i + 1], memory)
            del rows
            if read is None and i + 1 < len(wanted):
                read = ahead.submit(self._read, stream, wanted[i + 1], memory)

    def _groups(self, block_ends: np.ndarray) -> list[tuple[int, int, int]]:
        """The groups of a `_Stream`. block_ends: tokens up to the end of each block."""
        most = self.buffer_tokens
        of_block = (block_ends - 1) // most
        last = np.flatnonzero(np.diff(of_block, append=of_block[-1] + 1))
        ends = block_ends[last].tolist()
        return [(i, begin, end) for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]

    def _places(self, stream: _Stream, group: tuple[int, int, int]) -> np.ndarray:
        """Where each token of a group goes in its buffer."""
        number, begin, end = group
        places = np.arange(end - begin)
        if self.shuffle:
            np.random.default_rng((*stream.seed, number)).shuffle(places)
        return places

    def _read(self, stream: _Stream, group: tuple[int, int, int], memory: RowBuffers) -> dict[str, np.ndarray]:
        """The rows of one group, mixed: name -> [1, rows, stored width]."""
        _, begin, end = group
        places = self._places(stream, group)
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

    def _given(self, rows: dict[str, np.ndarray], stream: _Stream, number: int) -> Batch | None:
        """The batch of some rows, number `number` of a stream; None where no row of it is left."""
        tensors = {name: as_torch(self.views[name].decoded(part)) for name, part in rows.items()}
        if self.dtype is not None:
            tensors = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}
        bad = np.unique(np.concatenate([not_finite(as_numpy(_of_numpy(tensor))) for tensor in tensors.values()]))
        if len(bad):
            self._see(stream, number * self.batch_size + bad)
            if self._finite.policy == "skip":
                left = torch.from_numpy(np.delete(np.arange(self.batch_size), bad))
                if not len(left):
                    self._refuse_fewer_batches()
                    return None
                tensors = {name: tensor[left] for name, tensor in tensors.items()}
        return next(iter(tensors.values())) if self.single else tensors

    def _see(self, stream: _Stream, places: np.ndarray) -> None:
        """Count rows that are not finite. places: of them in the order of the stream, int64 [n], rising."""
        for group in stream.groups:
            _, begin, end = group
            inside = places[(places >= begin) & (places < end)] - begin
            if len(inside):
                tokens = begin + np.argsort(self._places(stream, group))[inside]
                block = np.searchsorted(stream.ends, tokens, "right")
                stores, rows, counts = (part[stream.blocks[block]] for part in self._blocks)
                view = next(iter(self.views.values()))
                self._finite.see_all(view.stores, stores, rows + counts - (stream.ends[block] - tokens))

    def _refuse_fewer_batches(self) -> None:
        if self.world_size > 1:
            raise NotFinite(
                f"rank {self.rank} has a batch whose rows all hold {WHAT}, and ranks need equally many batches; leave"
                f" out {next(reversed(self._finite.first))}, or use a larger batch_size"
            )


def _of_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that numpy has: torch's 8-bit floats in float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _distributed() -> tuple[int, int]:
    """(rank, world size) of torch.distributed; (0, 1) where it is not in use."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
