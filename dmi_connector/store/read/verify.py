# SPDX-License-Identifier: Apache-2.0
"""Verifies every byte of a store against docs/FORMAT.md, without zarr-python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.layout import DRAFT_INDEX, DRAFT_UNKNOWN, ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c, file_checksum
from dmi_connector.store.format.locks import hold_shared
from dmi_connector.store.format.paths import leaves_store
from dmi_connector.store.format.remote_path import Given, Place, RemotePath, is_gone, place_of
from dmi_connector.store.format.schema import Grid
from dmi_connector.store.read.arrays.hook_array import HookArray
from dmi_connector.store.read.arrays.shard_reader import decode_plain
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.chunk_checks import ChunkChecks, is_old, shards_of
from dmi_connector.store.read.files.fetched_files import FetchedFiles
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.files.remote_index import finished_below, list_prefix
from dmi_connector.store.read.files.store_files import LocalFiles, StoreFiles
from dmi_connector.store.read.index import check_not_above
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.read.metadata import invalid
from dmi_connector.store.read.residual_sums import check_identities, equations, for_text, stated


@dataclass(frozen=True)
class Problem:
    """One problem of a store. where: a file, or an array with layer and tokens. what: a description.

    damage: whether the store differs from what was written. If False, the bytes are right, but the model computed
    values that are not finite. Such a store is worth keeping, because it shows where these values come from.
    """

    store: Place
    where: str
    what: str
    damage: bool = True

    def __str__(self) -> str:
        return f"{self.store}: {self.where}: {self.what}"


def stores_of(directory: Given) -> list[Place]:
    """All finished stores directly in a directory or below a prefix, by name. Raises ValueError if there are none."""
    place = place_of(directory)
    if isinstance(place, RemotePath):
        listed = list_prefix(place)
        stores = finished_below(place, listed.stores)
        found: list[Place] = [place / name for name in sorted(stores | listed.zips)]
    else:
        found = [*sorted(place.glob("*.zarr"))]
    if not found:
        if isinstance(place, Path):
            check_not_above(place)
        raise ValueError(f"{directory} holds no finished store (*.zarr); give a store or a directory of stores")
    return found


def verify_dir(directory: Given) -> list[Problem]:
    """Problems of the finished stores of a directory, except those removed meanwhile. Raises like `stores_of`."""
    stores, begun = stores_of(directory), begun_stores(directory)
    found = [(store, verify_store(store, begun)) for store in stores]
    return [problem for store, problems in found if not is_gone(store) for problem in problems]


def verify_store(path: Given, begun: Mapping[str, dict[str, Any]] | None = None, threads: int = 1) -> list[Problem]:
    """Verify one store. Returns its problems, [] for an intact store.

    This checks the file list, sizes and checksums, shard indexes, every inner chunk, metadata against shapes, and token
    arrays. It checks that stored and decoded values are finite, and that no layer of a hook is constant, as unwritten
    memory would be. With the attribute `identities` it checks the sums of the residual stream. It also checks that the
    directory's index has the same request for the name of the store. An incomplete store may lack the rows that it
    lists as missing.

    begun: the result of `begun_stores` for the directory, so that the index is read once for many stores. threads:
    number of threads that check segments.
    """
    place = place_of(path)
    if begun is None:
        begun = begun_stores(place.absolute().parent)
    with hold_shared(place):
        files = files_of(place)
        return list(_Check(place, FetchedFiles(files) if files.remote else files, threads).run(begun))


def begun_stores(directory: Given) -> dict[str, dict[str, Any]]:
    """The index line of each store that was begun in a directory, {name: line}."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_index(directory):
        if line["event"] == "start" or (line["event"] == "finish" and line["store"] not in found):
            found[line["store"]] = line  # indexes in an object store have no start lines
    return found


def damaged_files(path: str | os.PathLike[str], attrs: dict[str, Any]) -> list[Problem]:
    """Damage in the files that a store lists; [] if the files are as written. attrs: its checked attributes."""
    return [problem for problem in _Check(Path(path), LocalFiles(path)).contents(attrs) if problem.damage]


def unseen(attrs: dict[str, Any]) -> str | None:
    """The damage that cannot be detected in a store of an old format version; None if all can."""
    if not is_old(attrs):
        return None
    return f"format {attrs['format_version']}: swapped files of equal size are not detected"


class _Check:
    """Checks one store. arrays: the hook arrays that could be opened. chunks: checks their chunks.

    threads: number of threads that check chunks and sums.
    """

    def __init__(self, store: Place, files: StoreFiles, threads: int = 1) -> None:
        self.store, self.files, self.threads = store, files, threads
        self.arrays: dict[str, HookArray] = {}
        self.chunks = ChunkChecks(threads)

    def problem(self, where: str, what: str, damage: bool = True) -> Problem:
        return Problem(self.store, where, what, damage)

    def run(self, begun: Mapping[str, dict[str, Any]]) -> Iterator[Problem]:
        try:
            raw = self.files.load("zarr.json")
        except OSError as error:
            yield self.problem("zarr.json", f"the file cannot be read: {error}")
            return
        attrs = self._attributes(raw)
        if attrs is None:
            yield self.problem("zarr.json", f"it has no readable {schema.ATTR_KEY!r} attribute")
            return
        if crc32c(schema.canonical(attrs)) != attrs.get("checksum"):
            yield self.problem("zarr.json", "the attributes do not match their checksum")
            return
        if wrong := invalid(attrs):
            yield self.problem("zarr.json", f"its {schema.ATTR_KEY!r} attribute has no valid {', '.join(wrong)}")
            return
        if raw is None or bytes(raw) != schema.dump(schema.root_document(attrs)):
            yield self.problem("zarr.json", "the document differs from the one that was written")
        problems = [*self._place(attrs, begun), *self._unlisted(attrs), *self.contents(attrs)]
        yield from problems
        # The sums of damaged data would only repeat the problems found so far.
        summed = stated(attrs) and not any(problem.damage for problem in problems)
        sums = check_identities(attrs, self.arrays, self.threads) if summed else []
        yield from (self.problem(where, what) for where, what in sums)
        right = equations(attrs, self.arrays) if summed and not sums else []
        confirmed = {term for equation in right if not for_text(attrs, equation) for term in equation}
        yield from (self.problem(where, what) for where, what in self.chunks.constant_layers(self.arrays, confirmed))

    def contents(self, attrs: dict[str, Any]) -> Iterator[Problem]:
        """Yield the problems of the listed files."""
        own = {name for name, hook in attrs["hooks"].items() if hook["array"] == name}
        in_shards = {path for path in attrs["files"] if path.split("/")[1:2] == ["c"] and path.split("/")[0] in own}
        yield from self._media(attrs)
        yield from self._files(attrs, own, in_shards)
        yield from self._token_arrays(attrs)
        for name, hook in attrs["hooks"].items():
            if hook["array"] != name:
                if hook["array"] not in list(own):  # a list, because values of a forged store may not be hashable
                    yield self.problem(name, f"its array {hook['array']!r} is not a hook")
                continue
            try:
                array, reduced = self._open(attrs, name, hook), StoredReduction.of(hook, self.store)
                if reduced is not None:
                    reduced.check_files()
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                yield self.problem(name, f"the array cannot be read: {error}")
                continue
            self.arrays[name] = array
            yield from (self.problem(*found) for found in self.chunks.of_array(attrs, array, reduced))
            of_array = {path for path in in_shards if path.split("/")[0] == name}
            for path in sorted(of_array - {array.path(*place) for place in shards_of(array)}):
                yield self.problem(path, "the file lies outside its array")

    def _place(self, attrs: dict[str, Any], begun: Mapping[str, dict[str, Any]]) -> Iterator[Problem]:
        """Check that the directory's index has the same request for the store's name."""
        line = begun.get(self.store.name, {})
        for name in ("request_id", "key", "created"):
            if name in line and line[name] != attrs.get(name):
                what = f"{name} is {attrs.get(name)!r}, but the directory's index has {line[name]!r}"
                yield self.problem("zarr.json", what)
                return

    @staticmethod
    def _attributes(raw: bytes | np.ndarray | None) -> dict[str, Any] | None:
        try:
            attrs = json.loads(b"" if raw is None else bytes(raw))["attributes"][schema.ATTR_KEY]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return attrs if isinstance(attrs, dict) else None

    def _unlisted(self, attrs: dict[str, Any]) -> Iterator[Problem]:
        for path in sorted(self.files.names() - set(attrs["files"]) - {"zarr.json"}):
            yield self.problem(path, "the file is not listed")

    def _files(self, attrs: dict[str, Any], own: set[str], in_shards: set[str]) -> Iterator[Problem]:
        """Check names and sizes of all files, and checksums except of shards, which are checked chunk by chunk.

        own: hooks that have their own arrays. in_shards: shard files of these arrays.
        """
        plain = {*schema.token_arrays(attrs), *(f"{hook}_positions" for hook in own)}
        chunks = {f"{name}/c/0" for name in plain}
        listed: dict[str, list[int]] = attrs["files"]
        for path, (size, checksum) in sorted(listed.items()):
            if leaves_store(path):
                yield self.problem("zarr.json", f"the file {path!r} lies outside the store")
                continue
            if path.split("/")[0] not in own | plain:
                yield self.problem(path, "the file belongs to no array")
                continue
            try:
                data = self.files.load(path)
            except OSError as error:
                yield self.problem(path, f"the file cannot be read: {error}")
                continue
            if data is None:
                yield self.problem(path, "the file is missing")
            elif len(data) != size:
                yield self.problem(path, f"the file has {len(data)} bytes, {size} were written")
            elif is_old(attrs):
                if crc32c(data) != checksum:
                    yield self.problem(path, "the file does not match its checksum")
            elif path not in in_shards and file_checksum(path, data[:-4] if path in chunks else data) != checksum:
                yield self.problem(path, "the file does not match its checksum")

    def _media(self, attrs: dict[str, Any]) -> Iterator[Problem]:
        """Check that media are in order, within the prompt, or within the last prompt of a session."""
        before, end = 0, attrs.get("last_prompt_len", attrs["prompt_len"])
        for start, stop in (span for item in attrs.get("media", ()) for span in item["positions"]):
            if not before <= start < stop <= end:
                yield self.problem("zarr.json", f"media: positions {start} to {stop} are not in order in the prompt")
            before = stop

    def _token_arrays(self, attrs: dict[str, Any]) -> Iterator[Problem]:
        length, start = attrs["num_tokens"], attrs["start"]
        values: dict[str, np.ndarray] = {}
        for name, dtype in schema.token_arrays(attrs).items():
            try:
                values[name] = decode_plain(self.files, name, dtype)
                document = json.loads(self.files.read(f"{name}/zarr.json"))
            except (OSError, ValueError, RecursionError) as error:
                yield self.problem(name, str(error))
                continue
            if len(values[name]) != length:
                yield self.problem(name, f"it has {len(values[name])} values for {length} tokens")
            if document != schema.plain_document(dtype, length, "token"):
                yield self.problem(name, "zarr.json does not describe a token array of this length")
        positions = values.get("positions")
        if positions is None or len(positions) != length:
            return
        wrong = np.flatnonzero(positions != np.arange(start, start + length))
        if len(wrong):
            yield self.problem("positions", f"row {wrong[0]} is position {positions[wrong[0]]}, not {start + wrong[0]}")
        phase = values.get("phase")
        if phase is not None and len(phase) == length and not np.array_equal(phase, positions >= attrs["prompt_len"]):
            yield self.problem("phase", f"it does not change from 0 to 1 at prompt_len {attrs['prompt_len']}")
        drafted, most = values.get(DRAFT_INDEX), attrs.get("speculative", {}).get("num_speculative_tokens", 0)
        if drafted is not None and len(drafted) == length:
            known = (drafted <= most) | (drafted == DRAFT_UNKNOWN)
            wrong = np.flatnonzero(~known | ((drafted > 0) & (positions < attrs["prompt_len"])))
            if len(wrong):
                yield self.problem(DRAFT_INDEX, f"row {wrong[0]} is draft token {drafted[wrong[0]]} of {most}")

    def _open(self, attrs: dict[str, Any], name: str, hook: dict[str, Any]) -> HookArray:
        document = json.loads(self.files.read(f"{name}/zarr.json"))
        per_sample = len(document["shape"]) == 2
        length = document["shape"][-2]
        layers, reduce = tuple(hook["layers"]), hook.get("reduce")
        part = int(hook.get("part_layers", 0))
        shards = -(-max(1, len(layers)) // part) if part else hook["shards"]
        spec = ArraySpec(name, hook["dtype"], layers, hook["width"], shards, 0, per_sample, reduce, part)
        grid = Grid(attrs["chunk_tokens"], attrs["segment_tokens"])
        if document != schema.hook_document(spec, length, grid, attrs["codec"], str(attrs["format_version"])):
            raise ValueError("zarr.json does not agree with the root attributes")
        if not per_sample and length != attrs["num_tokens"]:
            raise ValueError(f"its shape has {length} tokens, the store has {attrs['num_tokens']}")
        if per_sample:
            plain = f"{name}_positions"
            if len(decode_plain(self.files, plain, "int32")) != length:
                raise ValueError(f"{plain} does not have {length} values")
            positions = json.loads(self.files.read(f"{plain}/zarr.json"))
            if positions != schema.plain_document("int32", length, "sample"):
                raise ValueError(f"zarr.json of {plain} does not describe {length} samples")
        return HookArray.parse(self.files, name, document, complete=True)
