# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a store that is still being written. Its journals say which chunks are in its files."""

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
    """The directory of a store while it is written."""
    return final.with_name(final.name + schema.PARTIAL_SUFFIX)


class PartialStore:
    """One store that is being written.

    Writers may remove and rename its files at any time: every method raises FileNotFoundError once they have.
    """

    def __init__(self, final: Path) -> None:
        self.path = partial_of(final)
        self._files = LocalFiles(str(self.path))
        self._tails: dict[str, JournalTail] = {}
        self._arrays: dict[tuple[str, int], JournalArray] = {}
        self._geometry: dict[tuple[str, int], HookArray] = {}

    def refresh(self) -> None:
        """Read what was added to the journals since the last call."""
        for name in filter(is_journal, os.listdir(self.path)):
            self._tails.setdefault(name, JournalTail(self.path / name)).read()
        self._arrays.clear()
        for array in (array for journal in self._journals for array in journal.arrays):
            self._arrays.setdefault((array.spec.name, array.spec.rank), JournalArray(array.spec)).add(array)

    @property
    def _journals(self) -> list[JournalContent]:
        return [tail.content for tail in self._tails.values() if tail.content is not None]

    def attrs(self) -> dict[str, Any] | None:
        """The root attributes that are known, `hooks` among them; None until the first journal is there."""
        abouts = [journal.about for journal in self._journals if journal.about]
        first = next((about for about in abouts if not about.get("rank")), None)
        if first is None:
            return None
        known = [ArraySpec(**spec) for about in [first, *abouts] for spec in about.get("arrays", [])]
        hooks = schema.hooks_attribute(list({spec.name: replace(spec, rank=0) for spec in known}.values()))
        return {**known_attrs(first), "hooks": hooks}

    def token_ids(self, first: int) -> np.ndarray | None:
        """int32 [rows of a chunk], of the chunk that begins at row `first`; None where it is not written yet."""
        return next((j.token_ids[first] for j in self._journals if first in j.token_ids), None)

    def rows(self, sources: Sequence[Source], first: int) -> np.ndarray | None:
        """Decoded rows [sources, n, width] of the chunk that begins at row `first`, or of the samples from there on.

        None where a writer has yet to write it. Each chunk is checked: raises ValueError for one that is damaged.
        """
        values = [self._values(source, first) for source in sources]
        return None if any(rows is None for rows in values) else np.stack(values)  # type: ignore[arg-type]

    def _values(self, source: Source, first: int) -> np.ndarray | None:
        spec = next((array.spec for (name, _), array in self._arrays.items() if name == source.array), None)
        if spec is None:
            return None
        ranks = [source.index // spec.part_layers] if spec.part_layers else range(spec.shards)
        arrays = [self._arrays.get((source.array, rank)) for rank in ranks]
        count = min((_written(array, first) for array in arrays), default=0)
        if not count:
            return None
        parts = [self._part(array, source.index, first, count) for array in arrays if array is not None]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
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
            with self._files.open(path) as file:
                read_piece(geometry, file, offset, size, Piece((), every, out, every))
        except ValueError as error:
            raise ValueError(f"{self.path}/{path}: {error}") from error
        return out.view(geometry.dtype)

    def _array(self, spec: ArraySpec, only: int | None) -> HookArray:
        """The geometry of an array's chunks. only: rows of the first chunk, which is shorter if it is the only one."""
        journal = self._journals[0]
        rows = min(journal.chunk_tokens, only or journal.chunk_tokens)
        known = self._geometry.get((spec.name, rows))
        if known is None:
            grid = schema.Grid(rows, rows)
            document = schema.hook_document(spec, rows, grid, journal.codec)
            known = HookArray.parse(self._files, spec.name, document, complete=True)
            self._geometry[spec.name, rows] = known
        return known


def _written(array: JournalArray | None, first: int) -> int:
    """Rows of the chunk that begins at `first`, or final samples from there on. 0: none yet."""
    if array is None or first not in array.counts:
        return 0
    if not array.spec.per_sample:
        return array.counts[first]
    known = array.counts.keys()
    end = next(at for at in range(first, first + len(known) + 1) if at not in known)
    return max(0, end - schema.SAMPLES_AGAIN - first)
