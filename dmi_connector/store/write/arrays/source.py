# SPDX-License-Identifier: Apache-2.0
"""Reads encoded chunks from a store of this engine, finished or still being written, to copy them into a new store."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.locks import hold_source
from dmi_connector.store.format.shard_index import EMPTY
from dmi_connector.store.read.arrays.hook_array import HookArray
from dmi_connector.store.read.files.store_files import LocalFiles
from dmi_connector.store.read.journal import JournalArray, is_journal, read_journal
from dmi_connector.store.read.metadata import attrs_of
from dmi_connector.store.write.arrays.shard_writer import Encoded


class SourceStore:
    """Reads the encoded chunks of a store.

    final: final path of the store. chunk_tokens, segment_tokens: the settings of both stores. The directory is open and
    locked until the `with` block ends, even if it is renamed. Raises OSError or ValueError if the store is gone or
    cannot be read.
    """

    def __init__(self, final: str, chunk_tokens: int, segment_tokens: int) -> None:
        self.final, self._chunk, self._segment = final, chunk_tokens, segment_tokens
        self._fd = hold_source(final)
        self._files = LocalFiles(f"/proc/self/fd/{self._fd}")
        self._finished: dict[str, HookArray] = {}
        self._journals: dict[tuple[str, int], JournalArray] = {}
        try:
            self._load()
        except (OSError, ValueError):
            os.close(self._fd)
            raise

    def __enter__(self) -> SourceStore:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _load(self) -> None:
        """Find the chunks: in the metadata of a finished store, or in the journals of an unfinished one."""
        # A commit removes the journals one by one, after it has written the root document. So journals are only used if
        # there is no whole root document after they were read.
        try:
            self._read_journals()
        except FileNotFoundError:
            self._journals.clear()
        try:
            attrs = attrs_of(self._files)
        except ValueError:
            if self._journals:
                return
            raise
        self._journals.clear()
        for name in {hook["array"] for hook in attrs["hooks"].values()}:
            document = json.loads(self._files.read(f"{name}/zarr.json"))
            self._finished[name] = HookArray.parse(self._files, name, document, complete=False)

    def _read_journals(self) -> None:
        root = Path(self._files.root)
        for name in sorted(filter(is_journal, os.listdir(root))):
            with contextlib.suppress(ValueError):  # a rank is still writing the header of its journal
                for array in read_journal(root / name).arrays:
                    self._journals.setdefault((array.spec.name, array.spec.rank), JournalArray(array.spec)).add(array)

    def chunk(self, spec: ArraySpec, first: int) -> list[Encoded]:
        """The chunks of rows [first, first + chunk_tokens) of an array: one per layer that the rank of `spec` has.

        spec: the array in the new store. Raises OSError if a file cannot be read. Raises ValueError for a chunk that is
        missing or does not match its crc32c, and for a chunk of an unfinished store that has fewer rows.
        """
        places = self._of_finished(spec, first) if self._finished else self._of_journals(spec, first)
        found = []
        for path, offset, size in places:
            with self._files.open(path) as file:
                data = file.read(offset, size)
            body, crc = data[:-4], int.from_bytes(data[-4:], "little")
            if len(data) != size or crc32c(body) != crc:
                raise ValueError(f"{path}: the chunk of row {first} is damaged")
            found.append(Encoded(b"", body, 0, crc))
        return found

    def _of_finished(self, spec: ArraySpec, first: int) -> Iterator[tuple[str, int, int]]:
        array = self._finished.get(spec.name)
        if array is None or array.chunk_rows != self._chunk:
            raise _lacking(spec, first)
        segment, within = divmod(first, array.segment_rows)
        for layer in _layers(spec, array.layers, first):
            shard = layer // array.part_layers if array.by_layers else spec.rank
            path = array.path(segment, shard)
            with self._files.open(path) as file:
                index = array.index(file, segment, shard)
            place = index[layer - array.first_layer(shard), within // self._chunk]
            if place[0] == EMPTY:
                raise _lacking(spec, first)
            yield path, *place.tolist()

    def _of_journals(self, spec: ArraySpec, first: int) -> Iterator[tuple[str, int, int]]:
        known = next((array.spec for (name, _), array in self._journals.items() if name == spec.name), None)
        if known is None:
            raise _lacking(spec, first)
        for layer in _layers(spec, known.layers, first):
            rank = layer // known.part_layers if known.part_layers else spec.rank
            array = self._journals.get((spec.name, rank))
            if array is None or array.counts.get(first) != self._chunk:
                raise _lacking(spec, first)
            path = schema.shard_path(array.spec, first // self._segment)
            yield path, *array.places[first][layer - array.spec.first_layer].tolist()


def _layers(spec: ArraySpec, layers: tuple[int, ...], first: int) -> list[int]:
    """Indexes in `layers`, the layer numbers of the source, of the layers that the rank of `spec` has.

    [0] for a hook that exists once. Raises ValueError if the source lacks one of the layers.
    """
    if not spec.layers:
        return [0]
    mine = spec.layers[spec.first_layer : spec.first_layer + spec.local_layers]
    if not set(mine) <= set(layers):
        raise _lacking(spec, first)
    return [layers.index(layer) for layer in mine]


def _lacking(spec: ArraySpec, first: int) -> ValueError:
    return ValueError(f"{spec.name}: the chunk of row {first} is missing")
