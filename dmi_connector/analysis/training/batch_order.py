# SPDX-License-Identifier: Apache-2.0
"""The order of tokens in a `TokenDataset`: which worker of which rank reads which blocks, and how rows are shuffled.

A block is the part of a view's rows that lies in one chunk of a store.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Group = tuple[int, int, int]
"""A part of a stream whose blocks are read together: (index, first token, one past the last token)."""


@dataclass(frozen=True)
class Stream:
    """What one worker of one rank reads in one epoch.

    blocks: indexes of blocks in the order of reading, int64 [blocks]. ends: number of tokens up to the end of each
    block, int64 [blocks]. batches: number of batches. seed: seed of the shuffling. groups: parts of the stream whose
    blocks are read together, and whose tokens are shuffled together.
    """

    blocks: np.ndarray
    ends: np.ndarray
    batches: int
    seed: tuple[int, ...]
    groups: list[Group]


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """The order of tokens, which depends on seed, sizes, ranks and workers.

    counts: number of rows of each block, int64 [blocks]. Other fields are as in `TokenDataset`.
    """

    counts: np.ndarray
    batch_size: int
    buffer_tokens: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int

    def stream(self, epoch: int, worker: int, workers: int) -> Stream:
        """The stream of worker number `worker` of `workers` in an epoch.

        Raises ValueError if a worker of any rank would get less than a batch.
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
        """Divide the stream into runs of `buffer_tokens` tokens, and group the blocks that end in the same run.

        block_ends: number of tokens up to the end of each block.
        """
        of_block = (block_ends - 1) // self.buffer_tokens
        last = np.flatnonzero(np.diff(of_block, append=of_block[-1] + 1))
        ends = block_ends[last].tolist()
        return [(i, begin, end) for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]

    def places(self, stream: Stream, group: Group) -> np.ndarray:
        """The index in the buffer of each token of a group."""
        number, begin, end = group
        places = np.arange(end - begin)
        if self.shuffle:
            np.random.default_rng((*stream.seed, number)).shuffle(places)
        return places
