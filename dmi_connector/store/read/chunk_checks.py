# SPDX-License-Identifier: Apache-2.0
"""Checks every chunk of the hook arrays of a store. Part of `verify.verify_store`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np

from dmi_connector.dtypes import FLOATS
from dmi_connector.hooks import ALWAYS
from dmi_connector.store.format.checksum import file_checksum
from dmi_connector.store.format.shard_index import EMPTY
from dmi_connector.store.read.arrays.hook_array import HookArray, Slot
from dmi_connector.store.read.arrays.shard_reader import ShardReader
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.thread_pool import each_of

Found = tuple[str, str, bool]
"""(where, what, whether it is damage) of a problem, see `verify.Problem`."""
_FED_BY = {"attn_out": ("v", "z"), "mlp_out": ("mlp_pre", "mlp_pre_linear", "mlp_post")}
"""{output of a block: other hooks of the block that are zero too if the weights of the layer are zero}."""


def is_old(attrs: Mapping[str, Any]) -> bool:
    """Whether a store has format 1.0, in which the checksum of a file is the crc32c of all its bytes.

    The crc32c of data that ends in its own crc32c is constant, and chunks end in theirs. So the checksum of most files
    depends only on sizes, and adds nothing to the checks of the chunks.
    """
    return str(attrs["format_version"]) == "1.0"


def shards_of(array: HookArray) -> list[tuple[int, int]]:
    """(segment, shard) of each file of an array."""
    return [(segment, shard) for segment in range(array.segments) for shard in range(array.shards)]


class ChunkChecks:
    """Checks the chunks of arrays, and finds layers that are constant.

    threads: number of threads that check the files of an array.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._constant: dict[tuple[str, int], bytes | None] = {}  # by hook and layer: its only value, or None
        self._lock = threading.Lock()  # for changes of `_constant`

    def of_array(self, attrs: dict[str, Any], array: HookArray, reduced: StoredReduction | None) -> list[Found]:
        """The problems of an array, in the order of its files. reduced: its reduction, if it has one."""

        def check(place: tuple[int, int]) -> list[Found]:
            return list(self._shard(attrs, array, reduced, *place))

        return [found for each in each_of(check, shards_of(array), self._threads) for found in each]

    def constant_layers(
        self, arrays: Mapping[str, HookArray], summed: Set[tuple[str, int]]
    ) -> Iterator[tuple[str, str]]:
        """Yield (where, what) of layers with only one value.

        arrays: the arrays that were checked. summed: (hook, layer) pairs for which the sums of the residual stream
        hold. These pairs, and hooks of the same block, may be all zeros.
        """
        excused = {(hook, layer) for output, layer in summed for hook in (output, *_FED_BY.get(output, ()))}
        for hook, layer in ((name, layer) for name, array in arrays.items() for layer in array.layers or (0,)):
            value, array = self._constant.get((hook, layer)), arrays[hook]
            if value is None or (not any(value) and (hook, layer) in excused):
                continue
            where = f"{hook} layer {layer}" if array.layers else hook
            shown = np.frombuffer(value, array.dtype)[0]
            if array.dtype.name in FLOATS and not np.isfinite(shown):
                continue  # reported for each chunk
            yield where, f"suspect: every value is {shown}, as in memory that no tap wrote"

    def _shard(
        self, attrs: dict[str, Any], array: HookArray, reduced: StoredReduction | None, segment: int, shard: int
    ) -> Iterator[Found]:
        """The problems of one file."""
        path = array.path(segment, shard)
        if path not in attrs["files"]:
            first = segment * array.segment_rows
            if not self._excused(attrs, array, first, min(array.shape[1], first + array.segment_rows)):
                yield path, "the shard was never written", True
            return
        try:
            reader = ShardReader.open(array, segment, shard)
            if not is_old(attrs) and file_checksum(path, reader.content()) != attrs["files"][path][1]:
                yield path, "the file does not match its checksum", True
        except (OSError, ValueError) as error:
            yield path, str(error), True
            return
        chunks = list(array.chunks(segment, shard))
        for slot, first, stop in chunks:
            where = self._where(array, shard, slot, first, stop)
            if reader.index[slot][0] == EMPTY:
                if not self._excused(attrs, array, first, stop):
                    yield where, f"the chunk is missing in {path}", True
                continue
            try:
                values = reader.chunk(slot)
            except ValueError as error:
                yield where, f"{error} in {path}", True
                continue
            self._note(array, array.first_layer(shard) + slot[0], values[: stop - first])
            try:
                bad = _not_finite(array, reduced, values[: stop - first])
            except (ValueError, IndexError, TypeError) as error:
                yield where, f"the values cannot be decoded ({error})", True
                continue
            if bad:
                yield where, f"{bad} values are not finite (the model computed them)", False
        yield from self._surplus(path, reader, {slot for slot, *_ in chunks})

    def _surplus(self, path: str, reader: ShardReader, known: set[tuple[int, ...]]) -> Iterator[Found]:
        """Check chunks past the end of the array.

        They exist if the engine sampled once more before it learned that the request had ended.
        """
        for slot in np.ndindex(reader.index.shape[:-1]):
            if slot not in known and reader.index[slot][0] != EMPTY:
                try:
                    reader.chunk(slot)
                except ValueError as error:
                    yield path, str(error), True

    def _note(self, array: HookArray, index: int, values: np.ndarray) -> None:
        """Record whether a layer has only one value. For integers and experts' weights, only the value 0 counts.

        index: index along the layer axis.
        """
        if array.per_sample or not values.size:
            return
        key = array.name, array.layers[index] if array.layers else 0
        one = values.reshape(-1)[0].tobytes()
        wide = array.columns > 1 and array.name not in ALWAYS  # M-RoPE positions of a first token are all 0
        wide &= not any(one) or (array.dtype.name in FLOATS and array.name != "topk_weights")
        same = wide and self._constant.get(key, one) == one and bool((values == values.flat[0]).all())
        with self._lock:
            self._constant[key] = one if same and self._constant.get(key, one) == one else None

    @staticmethod
    def _excused(attrs: dict[str, Any], array: HookArray, first: int, stop: int) -> bool:
        if attrs["complete"]:
            return False
        return array.per_sample or any(a < stop and first < b for a, b in attrs["missing"])

    @staticmethod
    def _where(array: HookArray, shard: int, slot: Slot, first: int, stop: int) -> str:
        if array.per_sample:
            return f"{array.name} sample {first}"
        layer = f" layer {array.layers[array.first_layer(shard) + slot[0]]}" if array.layers else ""
        return f"{array.name}{layer} tokens {first} to {stop - 1}"


def _not_finite(array: HookArray, reduced: StoredReduction | None, values: np.ndarray) -> int:
    """Number of values that are not finite; for a reduced hook, of decoded values.

    A logit of minus infinity is allowed: it is a masked token. Raises ValueError, IndexError or TypeError for values
    that cannot be decoded.
    """
    if reduced is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            values = reduced.reduction.decode(values, reduced.width, reduced.dtype)
    elif array.dtype.name not in FLOATS:
        return 0
    wide: np.ndarray = values.astype(np.float64 if values.dtype == np.float64 else np.float32)
    bad = np.isnan(wide) | (wide == np.inf) if array.per_sample else ~np.isfinite(wide)
    return int(bad.sum())
