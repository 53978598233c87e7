# SPDX-License-Identifier: Apache-2.0
"""The order of rows in a `TokenDataset`: which blocks each worker of each rank reads, and how rows are shuffled.

A block is the rows of a `RowView` that lie in one chunk of a store. Each row is of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Group = tuple[int, int, int]
"""Blocks of a stream that are read together: (index of the group, first row in the stream, one past the last row)."""


@dataclass(frozen=True)
class Stream:
    """What one worker of one rank reads in one epoch.

    blocks: indexes of blocks in the order of reading, int64 [blocks]. ends: number of rows of the stream up to the end
    of each block, int64 [blocks]. batches: number of full batches, the same for all workers of all ranks. seed: seed of
    the shuffling within groups. groups: consecutive blocks that are read, and with `shuffle` shuffled, together.
    """

    blocks: np.ndarray
    ends: np.ndarray
    batches: int
    seed: tuple[int, ...]
    groups: list[Group]


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """The order of rows in each epoch.

    counts: number of rows of each block, int64 [blocks]. The other fields are arguments of `TokenDataset`.
    """

    counts: np.ndarray
    batch_size: int
    buffer_tokens: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int

    def stream(self, epoch: int, worker: int, workers: int) -> Stream:
        """The stream of worker `worker` (from 0) of the `workers` of this rank, in an epoch.

        Raises ValueError if there are no rows, or if a worker of any rank would get less than a batch.
        """
        order = np.arange(len(self.counts))
        if self.shuffle:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        streams = self.world_size * workers
        number = self.rank * workers + worker
        parts = [order[i::streams] for i in range(streams)]
        least = min(int(self.counts[part].sum()) for part in parts) // self.batch_size
        if not self.counts.sum():
            raise ValueError("no store has a row that passes skip, phase, after, mask and last; choose other rows")
        if not least:
            spread, fewer = (f" in {streams} workers", ", or fewer workers") if streams > 1 else ("", "")
            raise ValueError(
                f"{self.counts.sum()} tokens are too few for batches of {self.batch_size}{spread}; use a smaller"
                f" batch_size{fewer}"
            )
        ends = np.cumsum(self.counts[parts[number]])
        return Stream(parts[number], ends, least, (self.seed, epoch, number), self._groups(ends))

    def _groups(self, block_ends: np.ndarray) -> list[Group]:
        """Divide the stream into ranges of `buffer_tokens` rows, and group the blocks that end in the same range.

        block_ends: `Stream.ends`.
        """
        of_block = (block_ends - 1) // self.buffer_tokens
        last = np.flatnonzero(np.diff(of_block, append=of_block[-1] + 1))
        ends = block_ends[last].tolist()
        return [(i, begin, end) for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]

    def places(self, stream: Stream, group: Group) -> np.ndarray:
        """The index in the buffer at which each row of a group is stored, int64 [rows], in the order of the stream."""
        number, begin, end = group
        places = np.arange(end - begin)
        if self.shuffle:
            np.random.default_rng((*stream.seed, number)).shuffle(places)
        return places
