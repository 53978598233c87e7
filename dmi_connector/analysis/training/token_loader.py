# SPDX-License-Identifier: Apache-2.0
"""Loops over a `TokenDataset` in worker processes. A loop can be resumed exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dmi_connector.analysis.training.token_batches import TokenBatches
from dmi_connector.analysis.training.worker_loops import Batch, Position


class TokenLoader:
    """Batches of a `TokenDataset` from worker processes. `TokenDataset.loader` makes it.

    A loop resumes at the position of `load_state_dict`, or where an earlier loop of this loader was interrupted.
    Otherwise it starts with the epoch of `TokenDataset.set_epoch`, or with the epoch after the latest loop over the
    data set.
    """

    def __init__(self, dataset: TokenBatches, workers: int, options: dict[str, Any]) -> None:
        self.dataset, self.workers, self._options = dataset, workers, options
        self._left: tuple[Position, Position] | None = None  # (position of an unfinished loop, start of the next loop)

    def _at(self) -> Position:
        # If the epoch was set or another loop began since then, the rest of the interrupted loop is dropped.
        rest = self._left is not None and self._left[1] is self.dataset._next
        return self._left[0] if rest and self._left is not None else self.dataset._next

    def set_epoch(self, epoch: int) -> None:
        """See `TokenDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest loop, after the batches that it yielded."""
        return self.dataset._state(self._at(), max(1, self.workers))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches of `state`. Raises ValueError if tokens, settings or number of workers differ."""
        self.dataset._go_on_at(self.dataset._checked(state, max(1, self.workers)))

    def __len__(self) -> int:
        """Number of batches of a loop that starts now; see `TokenDataset.__len__`."""
        return self.dataset._length(self._at(), max(1, self.workers))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches. Raises ValueError before a worker starts, if there is less than one batch per worker."""
        at = self._at()
        if at.end is None or at.epoch < at.end:
            self.dataset.batches(at.epoch, max(1, self.workers))
        return self._loop(at)

    def _loop(self, at: Position) -> Iterator[Batch]:
        data = self.dataset
        after = data._next = data._after(at)
        most = functools.cache(functools.partial(data.batches, workers=max(1, self.workers)))
        options = self._options
        if self.workers and data.remote:
            options = {"multiprocessing_context": "spawn", **options}  # clients of object stores do not survive a fork
        if "collate_fn" in options:
            options = {**options, "collate_fn": functools.partial(_collated, options["collate_fn"])}
        loader: DataLoader[Any] = DataLoader(_Counted(data, at), batch_size=None, num_workers=self.workers, **options)
        self._left = at, after
        for given, seen in loader:
            at = replace(at, batch=at.batch + 1)
            if at.batch > most(at.epoch):
                at = replace(at, epoch=at.epoch + 1, batch=1)
            if data._next is after:
                self._left = at, after
            data._finite.add(seen)
            data._finite.warn()
            if given is not None:
                yield given
        self._left = None
        data._finite.warn_all()


class _Counted(IterableDataset[Any]):
    """Yields (batch, counts of rows that are not finite). The batch is None if it has no finite row."""

    def __init__(self, dataset: TokenBatches, start: Position) -> None:
        self.dataset, self.start = dataset, start

    def __iter__(self) -> Iterator[tuple[Batch | None, Any]]:
        if get_worker_info() is not None:
            self.dataset._finite.take()  # drops the counts of the parent, which a fork inherits
        for batch in self.dataset.worker_batches(self.start):
            yield batch, self.dataset._finite.take()


def _collated(collate: Callable[[Any], Any], given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Apply the user's `collate_fn` to the batch of an item of `_Counted`."""
    batch, seen = given
    return (None if batch is None else collate(batch)), seen
