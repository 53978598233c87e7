# SPDX-License-Identifier: Apache-2.0
"""Shuffled batches of rows of hooks from many stores. The position of a loop can be saved, and the loop resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise ImportError("TokenDataset: torch is not installed; install dmi_connector[torch]") from error

from dmi_connector.analysis.training.batch_order import BatchOrder, Group, Stream
from dmi_connector.analysis.training.normalization import Given, of_views, save_normalizations
from dmi_connector.analysis.training.row_buffers import RowBuffers, length_of, part_of
from dmi_connector.analysis.training.worker_loops import Batch, Position, WorkerLoops
from dmi_connector.captures.captures import Captures, named_rows, open_captures
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite, not_finite
from dmi_connector.captures.row_choice import Mask, RowChoice
from dmi_connector.captures.row_view import RowView
from dmi_connector.captures.token_fields import DTYPES, IN_STORE
from dmi_connector.dtypes import as_numpy, as_torch
from dmi_connector.option_values import whole_number
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.arrays.chunk_reader import read_blocks
from dmi_connector.store.read.arrays.hook_array import ShardPieces
from dmi_connector.store.read.files.thread_pool import read_threads, set_read_threads

_ROW = "number of the row"
"""Key under which `_read` returns the index of each row in the view. No hook has this name."""


class TokenBatches(IterableDataset[Batch]):
    """Order, position and reading of the batches. `TokenDataset` explains the arguments, and adds `loader`."""

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
        phase: str | None = None,
        after: int | Collection[int] | None = None,
        mask: Mask | None = None,
        last: int | None = None,
        dtype: torch.dtype | None = None,
        finite: str = "skip",
        normalize: Given | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        found = captures if isinstance(captures, Captures) else open_captures(captures)
        names = [hooks] if isinstance(hooks, str) else list(hooks)
        self.fields = [name for name in names if name in DTYPES]
        names = [name for name in names if name not in DTYPES]
        numbers = {"batch_size": batch_size, "buffer_tokens": buffer_tokens, "seed": seed, "epochs": epochs}
        for option, given in numbers.items():
            least = 0 if option == "seed" else 1
            number, endless = whole_number(given), option == "epochs" and given is None
            if not endless and (number is None or number < least):
                raise ValueError(f"{option} {given!r} is not valid; give an integer of at least {least}")
        if not names or buffer_tokens < batch_size:
            raise ValueError(
                f"hooks {hooks!r}, batch_size {batch_size}, buffer_tokens {buffer_tokens}: not valid; name a hook, and"
                " give a batch_size from 1 to buffer_tokens"
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {dtype!r} is not valid; give a dtype of torch, as in dtype=torch.float32")
        choice = RowChoice(skip, phase, after, mask, last)
        self.views: dict[str, RowView] = {}
        self._view = named_rows(found, names[0], choice)
        for name in names:
            view = self.views[name] = named_rows(found, name, choice, self._view)
            if len(view.shape) == 3:
                raise ValueError(f"{name!r} has layers {view.layers}; name one, as in '{name}@{view.layers[0]}'")
            if view.sampled != self._view.sampled:
                raise ValueError(f"{name!r} and {names[0]!r} do not have rows of the same tokens; batch logits alone")
        self.single = isinstance(hooks, str)
        self.batch_size, self.buffer_tokens = batch_size, buffer_tokens
        self.seed, self.shuffle, self.epochs, self.dtype = seed, shuffle, epochs, dtype
        own_rank, own_size = _distributed()
        self.rank = own_rank if rank is None else rank
        self.world_size = own_size if world_size is None else world_size
        number, of = whole_number(self.rank), whole_number(self.world_size)
        if number is None or of is None or not 0 <= number < of:
            raise ValueError(f"rank {self.rank!r} is not valid; use 0 to {self.world_size - 1} with this world_size")
        self._blocks = self._view.blocks()
        self.order = BatchOrder(self._blocks[2], batch_size, buffer_tokens, seed, shuffle, self.rank, self.world_size)
        self.normalization = of_views(self.views, normalize, seed)
        self._begins = np.cumsum(self._blocks[2]) - self._blocks[2]  # first row of each block in the view
        most = self.buffer_tokens + int(max(self._blocks[2], default=0))
        self._memory = RowBuffers(self.views, min(self.num_tokens, most))
        self._finite = FiniteCheck(finite)
        self.set_epoch(0)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as values that JSON can hold."""
        names = ("batch_size", "seed", "shuffle", "buffer_tokens", "epochs", "rank", "world_size")
        plain = {name: getattr(self, name) for name in names}
        normalized = {name: one.kind for name, one in self.normalization.items()}
        return {"hooks": [*self.views, *self.fields], "tokens": self.num_tokens, **plain, "normalize": normalized}

    @property
    def remote(self) -> bool:
        """Whether some stores are in an object store."""
        return any(isinstance(store, RemotePath) for store in self._view.stores)

    @property
    def num_tokens(self) -> int:
        """Number of chosen tokens in all stores."""
        return int(self._blocks[2].sum())

    def batches(self, epoch: int = 0, workers: int = 1) -> int:
        """Number of batches of this rank in an epoch. Raises ValueError if there are too few tokens for a batch per
        worker.
        """
        return self.order.stream(epoch, 0, workers).batches * workers

    def __len__(self) -> int:
        """Number of batches of the next loop in one process, including those that `finite` leaves out.

        Raises TypeError for endless epochs, as torch expects, and ValueError if there are too few tokens.
        """
        return self._length(self._next, 1)

    def _length(self, at: Position, workers: int) -> int:
        """Number of batches of a loop that starts at a position."""
        if at.end is None:
            raise TypeError("a data set with epochs=None has no length: its batches never end")
        return sum(self.batches(epoch, workers) for epoch in range(at.epoch, at.end)) - at.batch

    @property
    def not_finite(self) -> dict[str, int]:
        """{path of a store: number of rows read so far that have a NaN or an infinity}.

        A row counts again in each epoch. The workers of a `DataLoader` count separately, so use `loader`.
        """
        return dict(self._finite.rows)

    def save_normalization(self, path: str | os.PathLike[str]) -> None:
        """Write `normalization` to a safetensors file, for `normalize` of another data set.

        Raises ValueError without a normalisation, and OSError if the file cannot be written.
        """
        if not self.normalization:
            raise ValueError("the data set has no normalisation; make it with normalize='mean_norm' or 'whiten'")
        save_normalizations(path, self.normalization)

    # ---- resume -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest loop over this object, after the batches that it returned.

        The workers of a `DataLoader` have their own loops, so use `loader`.
        """
        return self._state(self._at, 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop begin with this epoch. Each epoch has its own order.

        Without this call, the first loop begins with epoch 0, and each later loop with the epoch after the last epoch
        of the previous loop. Persistent workers of a `DataLoader` do not see the call, so use `loader`. Raises
        ValueError for an epoch below 0.
        """
        number = whole_number(epoch)
        if number is None or number < 0:
            raise ValueError(f"epoch {epoch!r} is not valid; use 0 or more")
        self._go_on_at(self._begin(epoch))

    def _go_on_at(self, position: Position) -> None:
        self._next = self._at = position
        self._loops = WorkerLoops()

    def _begin(self, epoch: int) -> Position:
        return Position(epoch, 0, None if self.epochs is None else epoch + self.epochs)

    def _after(self, start: Position) -> Position:
        """The start of the next loop, if a loop began at `start`."""
        return self._begin(start.epoch + 1 if start.end is None else start.end)

    def _start_loop(self) -> Position:
        start, self._next = self._next, self._after(self._next)
        return start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next loop return the batches that follow those of `state`, a result of `state_dict`.

        Raises ValueError for a state of other tokens, settings or ranks.
        """
        self._go_on_at(self._checked(state, 1))

    def _state(self, at: Position, workers: int) -> dict[str, Any]:
        return {**asdict(at), "workers": workers, "world_size": self.world_size, "of": self._print()}

    def _checked(self, state: dict[str, Any], workers: int) -> Position:
        if lacking := [name for name in ("epoch", "batch", "workers", "world_size", "of") if name not in state]:
            raise ValueError(f"the state lacks {', '.join(lacking)}; give a result of state_dict of this data set")
        for name, own in (("workers", workers), ("world_size", self.world_size), ("of", self._print())):
            if state[name] != own:
                if name == "of":
                    raise ValueError(
                        "the state is of other stores or settings; use the stores and settings of the saved loop"
                    )
                raise ValueError(f"the state is of {name} {state[name]}, not {own}; use {name} {state[name]} to resume")
        end = state.get("end", self.epochs)  # older states lack it
        return Position(int(state["epoch"]), int(state["batch"]), end)

    def _print(self) -> str:
        """A digest of everything that determines the order, except ranks and workers."""
        names = [store.name for store in self._view.stores]
        facts = (names, list(self.views), self.batch_size, self.buffer_tokens, self.seed, self.shuffle)
        digest = hashlib.sha256(repr(facts).encode())
        runs = self._view.runs
        for part in (*self._blocks, runs.firsts, runs.begins):
            digest.update(part.tobytes())
        for one in self.normalization.values():
            digest.update(one.digest.encode())
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
        """Yield the batches of this process, which may be a worker of a `DataLoader`.

        Yields None instead of a batch without a finite row.
        """
        info = get_worker_info()
        if info is None:
            return self._batches_from(0, 1, start)
        set_read_threads(max(1, read_threads() // info.num_workers))
        # A DataLoader takes batches from its workers in turn, beginning with worker 0. After a resume, the first batch
        # may be of another worker's stream. Each worker therefore reads the stream of the batch that it returns first.
        given = start.batch + info.id
        first = replace(start, batch=given // info.num_workers)
        return self._batches_from(given % info.num_workers, info.num_workers, first)

    def _batches_from(self, worker: int, workers: int, at: Position) -> Iterator[Batch | None]:
        """Yield the batches of the stream of one worker, starting at a position."""
        memory = self._memory
        with ThreadPoolExecutor(1, "dmi-prefetch") as ahead:
            while at.end is None or at.epoch < at.end:
                self._at = at
                stream = self.order.stream(at.epoch, worker, workers)
                for given in self._batches(stream, at.batch, memory, ahead):
                    self._at = at = replace(at, batch=at.batch + 1)
                    yield given
                at = replace(at, epoch=at.epoch + 1, batch=0)
        self._at = self._begin(at.epoch)

    def _batches(
        self, stream: Stream, first: int, memory: RowBuffers, ahead: ThreadPoolExecutor
    ) -> Iterator[Batch | None]:
        """Yield the batches of an epoch, starting with batch `first`.

        A thread reads the next group while the batches of the current one are in use.
        """
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
                yield self._given(whole)
                del whole
                if read is None and i + 1 < len(wanted):
                    # Only now has the caller released the last batch of the previous buffer, so that it can be reused.
                    read = ahead.submit(self._read, stream, wanted[i + 1], memory)
            del rows
            if read is None and i + 1 < len(wanted):
                read = ahead.submit(self._read, stream, wanted[i + 1], memory)

    def _read(self, stream: Stream, group: Group, memory: RowBuffers) -> dict[str, np.ndarray]:
        """Read and shuffle the rows of one group. Returns {hook: rows, [1, rows, stored width]}.

        The result also has {_ROW: indexes of the rows in the view, int64 [1, rows]}, and {field: values, [1, rows]} for
        the fields that are read from stores.
        """
        _, begin, end = group
        places = self.order.places(stream, group)
        found = memory.take(end - begin)
        first, last = np.searchsorted(stream.ends, [begin, end - 1], "right").tolist()

        blocks = stream.blocks[first : last + 1]
        stores, counts = self._blocks[0][blocks].tolist(), self._blocks[2][blocks].tolist()
        begins = self._begins[blocks]
        stops = (stream.ends[first : last + 1] - begin).tolist()
        row_bytes = sum(buffer[:, :1].nbytes for buffer in found.values())
        read = [name for name in self.fields if name in IN_STORE]
        more = {name: np.empty((1, end - begin), DTYPES[name]) for name in read}
        more[_ROW] = np.empty((1, end - begin), np.int64)
        more[_ROW][0, places] = np.repeat(begins - np.cumsum([0, *counts[:-1]]), counts) + np.arange(end - begin)

        def plan(i: int) -> Iterator[ShardPieces]:
            there = places[stops[i] - counts[i] : stops[i]]
            for name, view in self.views.items():
                yield from view.plan_block(stores[i], int(begins[i]), there, found[name])
            if read:
                span = self._view.runs.span(int(begins[i]), counts[i])
                for name, values in self._view.store_tokens(stores[i], read).items():
                    more[name][0, there] = values[span]

        read_blocks(plan, range(len(blocks)), row_bytes * max(counts))
        return found | more

    def _given(self, rows: dict[str, np.ndarray]) -> Batch | None:
        """Convert rows of `_read` to a batch; None if `finite` leaves no row."""
        numbers = rows[_ROW][0]
        tensors = {name: as_torch(view.decoded(rows[name])) for name, view in self.views.items()}
        tensors |= {name: one.apply(tensors[name]) for name, one in self.normalization.items()}
        if self.dtype is not None:
            tensors = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}
        bad = np.unique(np.concatenate([self._bad(name, tensor) for name, tensor in tensors.items()]))
        fields = {name: rows[name][0] for name in self.fields if name in rows}
        if len(bad):
            self._finite.see_all(self._view.stores, *self._view.origins(numbers[bad]))
            if self._finite.policy == "skip":
                kept = np.delete(np.arange(len(numbers)), bad)
                if not len(kept):
                    self._refuse_fewer_batches()
                    return None
                tensors = {name: tensor[torch.from_numpy(kept)] for name, tensor in tensors.items()}
                fields, numbers = {name: values[kept] for name, values in fields.items()}, numbers[kept]
        if self.single:
            return next(iter(tensors.values()))
        stores, own = self._view.origins(numbers) if self.fields else (numbers, numbers)
        fields |= {"store": stores, "row": own}
        batch: dict[str, Any] = {name: torch.from_numpy(fields[name]) for name in self.fields if name != "key"}
        return tensors | batch | ({"key": self._view.keys(stores).tolist()} if "key" in self.fields else {})

    def _bad(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        """Indexes of the rows of a tensor that are not finite, int64 [n]."""
        return not_finite(as_numpy(_of_numpy(tensor)), minus_infinity=self.views[name].hook == "logits")

    def _refuse_fewer_batches(self) -> None:
        """Raise NotFinite if there are other ranks, which would wait for the batch that this rank leaves out."""
        if self.world_size > 1:
            raise NotFinite(
                f"rank {self.rank} has a batch whose rows all hold {WHAT}, and ranks need equally many batches; leave"
                f" out {next(reversed(self._finite.first))}, or use a larger batch_size"
            )


def _of_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that numpy has: torch's 8-bit floats become float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _distributed() -> tuple[int, int]:
    """(rank, world size) of torch.distributed; (0, 1) if it is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
