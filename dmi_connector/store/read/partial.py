# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a store that is still being written, by the journals, which list the chunks in its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.read.arrays.chunk import read_piece
from dmi_connector.store.read.arrays.hook_array import HookArray, Piece
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.store_files import LocalFiles
from dmi_connector.store.read.hook_names import Source
from dmi_connector.store.read.journal import JournalArray, JournalContent, JournalTail, is_journal, known_attrs


def partial_of(final: Path) -> Path:
    """The directory of a store while it is being written."""
    return final.with_name(final.name + schema.PARTIAL_SUFFIX)


class PartialStore:
    """One store that is being written.

    Writers may remove and rename its files at any time. Methods then raise FileNotFoundError.
    """

    def __init__(self, final: Path) -> None:
        self.path = partial_of(final)
        self.files = LocalFiles(str(self.path))
        self._tails: dict[str, JournalTail] = {}
        self._arrays: dict[tuple[str, int], JournalArray] = {}
        self._geometry: dict[tuple[str, int], HookArray] = {}

    def refresh(self) -> None:
        """Read the records that were added to the journals since the last call."""
        for name in filter(is_journal, os.listdir(self.path)):
            self._tails.setdefault(name, JournalTail(self.path / name)).read()
        arrays: dict[tuple[str, int], JournalArray] = {}
        for array in (array for journal in self._journals for array in journal.arrays):
            arrays.setdefault((array.spec.name, array.spec.rank), JournalArray(array.spec)).add(array)
        self._arrays = arrays  # in one assignment, because another thread may read rows

    @property
    def _journals(self) -> list[JournalContent]:
        return [tail.content for tail in list(self._tails.values()) if tail.content is not None]

    def attrs(self) -> dict[str, Any] | None:
        """The known root attributes, including `hooks`; None until the first journal exists."""
        abouts = [journal.about for journal in self._journals if journal.about]
        first = next((about for about in abouts if not about.get("rank")), None)
        if first is None:
            return None
        return {**known_attrs(first), "hooks": schema.hooks_attribute(list(self._specs().values()))}

    def _specs(self) -> dict[str, ArraySpec]:
        """The known arrays, by name."""
        abouts = sorted((j.about for j in self._journals if j.about), key=lambda about: bool(about.get("rank")))
        known = [ArraySpec(**spec) for about in abouts for spec in about.get("arrays", [])]
        return {spec.name: replace(spec, rank=0) for spec in known}

    def token_ids(self, first: int) -> np.ndarray | None:
        """Token ids of the chunk that begins at row `first`, int32 [n]; None if it is not written yet."""
        return next((j.token_ids[first] for j in self._journals if first in j.token_ids), None)

    def written(self, known: np.ndarray) -> np.ndarray:
        """Token ids of the rows that all arrays have so far, int32 [n]. Call it after `attrs` has returned attributes.

        known: the result of an earlier call, or an empty array.
        """
        chunk, arrays = self._journals[0].chunk_tokens, [s.name for s in self._specs().values() if not s.per_sample]
        at = len(known) // chunk * chunk
        found = [known[:at]]
        while (ids := self.token_ids(at)) is not None and all(self._count(name, at) >= len(ids) for name in arrays):
            found.append(ids)
            at += len(ids)
        return np.concatenate(found)

    def sampled(self, array: str) -> np.ndarray:
        """Token positions of the samples of an array that will not change any more, int32 [samples]; [] without it."""
        journal = self._arrays.get((array, 0))
        count = _written(journal, 0)
        return np.array([journal.positions[at] for at in range(count)] if journal else [], np.int32)

    def _count(self, array: str, first: int) -> int:
        """Number of rows of the array's chunk at row `first` that all ranks have written."""
        spec = self._spec(array)
        ranks = range(spec.shards if spec else 0)
        return min((_written(self._arrays.get((array, rank)), first) for rank in ranks), default=0)

    def rows(self, sources: Sequence[Source], first: int) -> np.ndarray | None:
        """Decoded rows [sources, n, width] of the chunk that begins at row `first`, or of samples from `first` on.

        None if the chunk is not written yet. Raises ValueError for a damaged chunk.
        """
        values = [self._values(source, first) for source in sources]
        return None if any(rows is None for rows in values) else np.stack(values)  # type: ignore[arg-type]

    def stored(self, array: str, index: int, first: int, samples: int | None = None) -> np.ndarray | None:
        """Stored rows [n, stored width] of the chunk that begins at row `first`. index: index along the layer axis.

        samples: for a per-sample array, number of samples from `first` on; None for all. Returns None and raises like
        `rows`.
        """
        spec = self._spec(array)
        if spec is None:
            return None
        ranks = [index // spec.part_layers] if spec.part_layers else range(spec.shards)
        arrays = [self._arrays.get((array, rank)) for rank in ranks]
        count = samples or min((_written(one, first) for one in arrays), default=0)
        if not count:
            return None
        parts = [self._part(one, index, first, count) for one in arrays if one is not None]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def documents(self, length: int, samples: int) -> dict[str, Any]:
        """{array: its zarr.json in a store with `length` rows and `samples` rows of logits}.

        Call it after `attrs` has returned attributes.
        """
        journal = self._journals[0]
        grid = schema.Grid(journal.chunk_tokens, journal.segment_tokens)
        return {
            name: schema.hook_document(spec, samples if spec.per_sample else length, grid, journal.codec)
            for name, spec in self._specs().items()
        }

    def _spec(self, name: str) -> ArraySpec | None:
        return next((array.spec for (known, _), array in self._arrays.items() if known == name), None)

    def _values(self, source: Source, first: int) -> np.ndarray | None:
        rows, spec = self.stored(source.array, source.index, first), self._spec(source.array)
        if rows is None or spec is None:
            return None
        reduced = StoredReduction.of(schema.hooks_attribute([spec])[spec.name], self.path)
        if reduced is not None:
            return reduced.decode(rows[None], [spec.layers[source.index] if spec.layers else None])[0]
        return rows if rows.dtype.kind in "iu" else rows.astype(np.float32)

    def _part(self, array: JournalArray, layer: int, first: int, count: int) -> np.ndarray:
        """Rows of one layer that one rank wrote, [count, columns] in the stored dtype."""
        spec, journal = array.spec, self._journals[0]
        if spec.per_sample:
            found = [self._chunk(array, 0, at, 1, at // schema.SAMPLES_PER_SHARD) for at in range(first, first + count)]
            return np.concatenate(found)
        return self._chunk(array, layer - spec.first_layer, first, count, first // journal.segment_tokens)

    def _chunk(self, array: JournalArray, layer: int, first: int, count: int, segment: int) -> np.ndarray:
        spec = array.spec
        geometry = self._array(spec, count if first == 0 else None)
        out = np.empty((count, geometry.columns), geometry.bits)
        every = slice(0, count)
        path = schema.shard_path(spec, segment)
        try:
            offset, size = array.places[first][layer].tolist()
            with self.files.open(path) as file:
                read_piece(geometry, file, offset, size, Piece((), every, out, every))
        except ValueError as error:
            raise ValueError(f"{self.path}/{path}: {error}") from error
        return out.view(geometry.dtype)

    def _array(self, spec: ArraySpec, only: int | None) -> HookArray:
        """The geometry of an array's chunks. only: number of rows of a first chunk, which may be short; else None."""
        journal = self._journals[0]
        rows = min(journal.chunk_tokens, only or journal.chunk_tokens)
        known = self._geometry.get((spec.name, rows))
        if known is None:
            grid = schema.Grid(rows, rows)
            document = schema.hook_document(spec, rows, grid, journal.codec)
            known = HookArray.parse(self.files, spec.name, document, complete=True)
            self._geometry[spec.name, rows] = known
        return known


def _written(array: JournalArray | None, first: int) -> int:
    """Number of rows of the chunk that begins at `first`, or of final samples from `first` on; 0 if there are none."""
    if array is None or first not in array.counts:
        return 0
    if not array.spec.per_sample:
        return array.counts[first]
    known = array.counts.keys()
    end = next(at for at in range(first, first + len(known) + 1) if at not in known)
    return max(0, end - schema.SAMPLES_AGAIN - first)
