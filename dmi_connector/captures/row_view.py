# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of one hook in many stores as one array."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from dmi_connector.captures.finite import FiniteCheck, not_finite
from dmi_connector.captures.row_choice import RowChoice, Runs
from dmi_connector.captures.token_fields import DTYPES, IN_STORE, store_fields
from dmi_connector.dtypes import as_torch
from dmi_connector.option_values import whole_number
from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.arrays.chunk_reader import read_pieces
from dmi_connector.store.read.arrays.hook_array import HookArray, ShardPieces
from dmi_connector.store.read.arrays.indexing import each_of, row_numbers, split_index
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.files.thread_pool import in_fetch_threads, in_threads
from dmi_connector.store.read.hook_names import HookTable, Layers
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.store.read.metadata import attrs_of, read_array
from dmi_connector.store.read.reader import StoreReader, open_reader
from dmi_connector.wording import suggest

if TYPE_CHECKING:
    import torch

_ITERATED = 16 << 20
"""Number of bytes that a loop over a view reads at a time."""
_MOST_OPEN = 4096
"""Maximum number of arrays whose metadata and shard indexes are kept, some kilobytes each."""


def check_some(infos: Sequence[CaptureInfo], hook: str, why: str = "") -> None:
    """Raise ValueError if there is no store to read a hook from. why: the reason, as in `Captures.why_empty`."""
    if not infos:
        raise ValueError(f"no store to read {hook!r} from; {why or 'none of them was kept'}")


class RowView:
    """The rows of one hook in many stores as an array [rows, width], or [layers, rows, width] for several layers.

    Made by `Captures.rows`.

    `view[5]`, `view[10:20]`, `view[[7, 3, 7]]` and `view[mask, :10]` read rows as float32; integer hooks keep their
    dtype. Indexing works as for a numpy array of this shape, except that None and masks over several axes are refused.
    Rows may be given in any order, and each chunk is read once. `numpy.asarray` and numpy functions read all rows. A
    loop over the view reads many rows at a time. `dask.array.from_array` reads only the rows that are computed. A view
    holds no lock on its stores, so retention and `dmi prune` must not remove them meanwhile.

    `view.tokens([5])` returns token ids, positions, phases, stores and keys of rows.

    shape, dtype: shape and dtype of the array. layers: numbers of the layers that are read; [] for a hook that exists
    once. stores: the stores of the rows. sampled: whether there is one row per sampled token, as for logits, instead of
    one per token.
    """

    def __init__(
        self,
        infos: Sequence[CaptureInfo],
        hook: str,
        layer: Layers = None,
        choice: RowChoice | None = None,
        beside: RowView | None = None,
    ) -> None:
        check_some(infos, hook)
        self.stores = tuple(info.store for info in infos)
        self.hook, self.layer = hook, layer
        self._keys = np.array([info.key for info in infos], object)
        self._complete = [info.state == "complete" for info in infos]
        self._open: OrderedDict[int, tuple[HookArray, list[int]]] = OrderedDict()
        self._lock = threading.Lock()
        with open_reader(self.stores[0], timeout=0, allow_incomplete=True) as first:
            self._array, self._layers, self.layers = _source(first, hook, layer)
            self._reduced = StoredReduction.of(first.attrs["hooks"][self._array], first.path)
            counted = hook == "resid_post" or (layer is not None and np.min(layer) < 0)
            self._depth = HookTable.of(first.attrs).num_layers if counted else None
        array, _ = self._of(0)
        self.sampled = array.per_sample
        self._stored_width, self.stored_dtype, self._settings = array.shape[2], array.dtype, array.reduce
        self.width = self._stored_width if self._reduced is None else self._reduced.decoded_width
        self.runs: Runs
        if beside is not None and beside.sampled == self.sampled:
            self.runs = beside.runs
        else:
            self.runs = (choice or RowChoice()).of(infos, self._counts(infos), self.sampled)

    def _counts(self, infos: Sequence[CaptureInfo]) -> list[int]:
        """The number of rows of each store. For logits the stores are read, because the index lacks the number."""
        counts = [info.num_tokens or 0 for info in infos]

        def look(number: int) -> None:
            counts[number] = self._of(number)[0].shape[1]

        if self.sampled:
            (in_threads if isinstance(self.stores[0], Path) else in_fetch_threads)(look, range(len(infos)))
        return counts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view as an array."""
        return (len(self.layers), self._rows, self.width) if self._stacked else (self._rows, self.width)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return 3 if self._stacked else 2

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of indexed values: float32, or that of an integer hook."""
        whole = self._reduced is None and self.stored_dtype.kind in "iu"
        return self.stored_dtype if whole else np.dtype(np.float32)

    @property
    def _rows(self) -> int:
        return self.runs.rows

    @property
    def _stacked(self) -> bool:
        return bool(self.layers) and (self.layer is None or np.ndim(self.layer) == 1)

    def __repr__(self) -> str:
        which = self.hook if self.layer is None else f"{self.hook} layer {self.layer}"
        return f"RowView({which}, {self.shape}, {len(self.stores)} stores)"

    def __getitem__(self, index: Any) -> Any:
        axes = {"layer": len(self.layers), "row": self._rows} if self._stacked else {"row": self._rows}
        (*layers, rows), rest = split_index(index, axes, f"the view of {self.hook!r}")
        values = self._read(each_of(rows), [*each_of(layers[0])] if layers else [0], convert=True)
        return (values if self._stacked else values[0])[rest]

    def __iter__(self) -> Iterator[np.ndarray]:
        if self._stacked:
            for layer in range(len(self)):
                yield self[layer]
            return
        for rows in self.batches(max(1, _ITERATED // (self.width * self.dtype.itemsize))):
            yield from rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"the view of {self.hook!r} is in files: an array of it is a copy; leave copy=False out")
        return np.asarray(self.read(slice(None)), dtype)

    def read(self, rows: slice | Sequence[int] | np.ndarray, convert: bool = True) -> np.ndarray:
        """Read rows [n, width] as float32, or with convert=False in the stored dtype; see `Capture.numpy`.

        rows: a slice, a list of integers, or a mask with one boolean per row of the view. With several layers the
        result is [layers, n, width].

        Raises IndexError for rows that do not exist and for a mask of another length. Raises ValueError for damaged
        values, naming the file, and for a store whose rows have another width or dtype. Raises KeyError for a store
        that did not capture the hook or layer.
        """
        values = self._read(self._numbers(rows), range(len(self._layers)), convert)
        return values if self._stacked else values[0]

    def _read(self, numbers: np.ndarray, layers: Sequence[int], convert: bool) -> np.ndarray:
        """Read rows of some of the view's layers, [layers, n, width]. layers: indexes into `self.layers`."""
        dtype = self.stored_dtype
        widened = convert and self._reduced is None and dtype.kind not in "iu" and dtype != np.float32
        out = np.empty(
            (len(layers), len(numbers), self._stored_width),
            np.float32 if widened else np.dtype(f"<u{dtype.itemsize}"),
        )
        if out.size:
            read_pieces(self._plan(numbers, out, layers))
        values = out if widened else out.view(dtype)
        return values if self._reduced is None else self._reduced.decode(values, [self._layers[i] for i in layers])

    def torch(self, rows: slice | Sequence[int] | np.ndarray) -> torch.Tensor:
        """Like `read`, as a torch tensor in the stored dtype."""
        return as_torch(self.read(rows, convert=False))

    @overload
    def batches(self, size: int, finite: str = "keep") -> Iterator[np.ndarray]: ...
    @overload
    def batches(self, size: int, finite: str = "keep", *, tokens: bool) -> Iterator[Any]: ...
    def batches(self, size: int, finite: str = "keep", *, tokens: bool = False) -> Iterator[Any]:
        """Yield all rows in order, `size` at a time. The last batch may be smaller.

        finite: handling of rows with a NaN or an infinity. "keep" yields them, and "skip" leaves them out, both with a
        RuntimeWarning that counts them. "fail" raises NotFinite. tokens: yield pairs (batch, result of `tokens` for its
        rows). Raises ValueError for a size below 1.
        """
        check = FiniteCheck(finite)
        if (whole_number(size) or 0) < 1:
            raise ValueError(f"size {size!r} is not valid; use 1 row or more")
        for first in range(0, self._rows, size):
            numbers = np.arange(first, min(first + size, self._rows))
            rows = self.read(slice(first, first + size))
            bad = not_finite(rows.swapaxes(0, -2), minus_infinity=self.hook == "logits")
            check.see_all(self.stores, *self.origins(numbers[bad]))
            check.warn()
            if finite == "skip" and len(bad):
                rows, numbers = np.delete(rows, bad, axis=-2), np.delete(numbers, bad)
            if len(numbers):
                yield (rows, self.tokens(numbers)) if tokens else rows
        check.warn_all()

    def origins(self, rows: slice | Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The origins of rows: (index in `stores`, row in that store), both int64 [n]."""
        return self.runs.origins(self._numbers(rows))

    def tokens(
        self, rows: slice | Sequence[int] | np.ndarray = slice(None), fields: Collection[str] = tuple(DTYPES)
    ) -> dict[str, np.ndarray]:
        """Fields of the tokens of rows, {field: array [n]}. Reads the token arrays of the stores.

        fields: some of these. token_ids: int32. next_token_ids: int32, id of the next token, -1 if the store does not
        have it. positions: int32, position in the request. phase: uint8, 0 for prompt tokens, 1 for all later ones.
        store: int64, index in `stores`. row: int64, row in that store; for logits, the sample. key: key of the request,
        or None.

        Raises ValueError for another field and for a damaged store. Raises IndexError like `read`.
        """
        unknown = [name for name in fields if name not in DTYPES]
        if unknown:
            raise ValueError(f"fields: {unknown[0]!r} is not known{suggest(unknown[0], DTYPES) or ';'} use {[*DTYPES]}")
        stores, places = self.origins(rows)
        found = {name: np.empty(len(stores), DTYPES[name]) for name in fields}
        for name, values in (("store", stores), ("row", places), ("key", self._keys[stores])):
            if name in found:
                found[name] = values
        read = [name for name in fields if name in IN_STORE]
        order = np.argsort(stores, kind="stable")
        ends = np.flatnonzero(np.diff(stores[order], append=-1)) + 1
        parts = np.split(order, ends[:-1]) if len(order) and read else []

        def look(part: np.ndarray) -> None:
            for name, values in self.store_tokens(int(stores[part[0]]), read).items():
                found[name][part] = values[places[part]]

        (in_threads if isinstance(self.stores[0], Path) else in_fetch_threads)(look, parts)
        return found

    def store_tokens(self, store: int, fields: Collection[str]) -> dict[str, np.ndarray]:
        """Fields of all rows of one store; see `tokens`. fields: only those in IN_STORE."""
        return store_fields(self.stores[store], fields, self._complete[store], self.sampled)

    def keys(self, stores: np.ndarray) -> np.ndarray:
        """The keys of stores, object [n]. stores: indexes in `stores`."""
        return np.asarray(self._keys[stores])

    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Split the view into parts that each lie in one chunk.

        Returns int64 arrays (index in `stores`, first row in the store, number of rows) of the parts. The rows of a
        part are in ascending order, but need not be consecutive.

        The chunk length is taken from the store with the largest row number in the view, because a short store may
        have a single, shorter chunk.
        """
        ends = self.runs.firsts + np.diff(self.runs.begins)
        chunk = self._of(int(self.runs.stores[np.argmax(ends)]))[0].chunk_rows if len(ends) else 1
        return self.runs.blocks(chunk)

    def buffer(self, rows: int) -> np.ndarray:
        """Memory for `rows` stored rows, [layers, rows, stored width], for `plan_block`."""
        return np.empty((len(self._layers), rows, self._stored_width), f"<u{self.stored_dtype.itemsize}")

    def plan_block(self, store: int, begin: int, places: np.ndarray, out: np.ndarray) -> Iterator[ShardPieces]:
        """Yield the pieces, for `read_pieces`, of `len(places)` rows of the view, starting at row `begin`.

        store: index of the store that has all these rows. places: indexes of the rows in `out`, which is a `buffer`.
        """
        array, layers = self._of(store)
        return array.plan(layers, self.runs.span(begin, len(places)), out, places)

    def decoded(self, rows: np.ndarray) -> np.ndarray:
        """Decode rows of a `buffer`, [layers, n, stored width], to the stored dtype; reduced hooks to float32."""
        values = rows.view(self.stored_dtype)
        values = values if self._reduced is None else self._reduced.decode(values, self._layers)
        return values if self._stacked else values[0]

    def _numbers(self, rows: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        return each_of(row_numbers(rows, self._rows, f"the view of {self.hook!r}"))

    def _plan(self, numbers: np.ndarray, out: np.ndarray, layers: Sequence[int]) -> list[ShardPieces]:
        """The pieces to read, grouped by store. layers: indexes into `self.layers`."""
        stores, rows = self.origins(numbers)
        order = np.lexsort((rows, stores))
        ends = (np.flatnonzero(np.diff(stores[order], append=-1)) + 1).tolist()
        used = stores[order[np.array(ends, np.int64) - 1]].tolist()
        unknown = [store for store in used if store not in self._open]
        (in_threads if isinstance(self.stores[0], Path) else in_fetch_threads)(self._of, unknown)
        planned: list[ShardPieces] = []
        start = 0
        for store, end in zip(used, ends, strict=True):
            array, known = self._of(store)
            places = order[start:end]
            planned += array.plan([known[i] for i in layers], array.rows(rows[places]), out, places)
            start = end
        return planned

    def _of(self, store: int) -> tuple[HookArray, list[int]]:
        """(array of a store, indexes of the view's layers along its layer axis)."""
        with self._lock:
            found = self._open.get(store)
            if found is not None:
                self._open.move_to_end(store)
                return found
        path = self.stores[store]
        files = files_of(path)
        try:
            document = read_array(files, self._array)
        except ValueError as error:
            if self._array not in attrs_of(files)["hooks"]:
                raise self._not_captured(path, ()) from error
            raise
        depth = None if self._depth is None else HookTable.of(attrs_of(files)).num_layers
        if depth != self._depth:
            raise ValueError(
                f"{path} is of a model with {depth} layers, {self.stores[0]} of one with {self._depth}: layers of"
                f" {self.hook!r} differ; name one model with open_captures(model=...)"
            )
        array = HookArray.parse(files, self._array, document, self._complete[store])
        if not set(self._layers) <= {*array.layers, None}:
            raise self._not_captured(path, array.layers)
        layers = [array.layers.index(layer) for layer in self._layers if layer is not None] or [0]
        if store and (array.shape[2], array.dtype, array.reduce) != (
            self._stored_width,
            self.stored_dtype,
            self._settings,
        ):
            raise ValueError(f"{path} holds rows of {self.hook!r} of another width, dtype or reduction; leave it out")
        with self._lock:
            self._open[store] = array, layers
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return array, layers

    def _not_captured(self, path: Place, held: Collection[int]) -> KeyError:
        """The error for a store that lacks the hook or layers. held: layers that the store has."""
        names = [f"{self.hook}@{layer}" for layer in self.layers] or [self.hook]
        lacking = [name for name, layer in zip(names, self._layers, strict=True) if layer not in held]
        return KeyError(f"{path} did not capture {lacking}; leave such stores out with open_captures(hooks={names})")


def _source(capture: StoreReader, hook: str, layer: Layers) -> tuple[str, list[int | None], list[int]]:
    """(array that stores a hook, layer numbers in the array, layer numbers of the hook), for the wanted layers."""
    sources = capture.sources(hook, layer)
    names = {source.array for source in sources}
    if len(names) > 1:
        raise ValueError(f"hook {hook!r} lies in several arrays {sorted(names)}; name one layer")
    array = names.pop()
    stored = capture.attrs["hooks"][array]["layers"]
    inside: list[int | None] = [stored[source.index] if stored else None for source in sources]
    return array, inside, [source.layer for source in sources if source.layer is not None]
