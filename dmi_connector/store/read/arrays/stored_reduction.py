# SPDX-License-Identifier: Apache-2.0
"""Decodes the stored rows of a reduced hook."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.dtypes import ITEMSIZE, numpy_dtype
from dmi_connector.reduce import ReduceError, Reduction, from_settings
from dmi_connector.reduce.fitted_file import FittedFile
from dmi_connector.reduce.tally import Tally
from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.fitted_files import find_fitted

_OF_VALUES = ("dtype", "width")
"""Entries of a `reduce` attribute that describe the values before reduction."""


@dataclass(frozen=True)
class StoredReduction:
    """The reduction of an array.

    width, dtype: width and dtype of one slice before the reduction. shards: number of tensor-parallel slices, which
    were reduced separately. stored_width, stored_dtype: width and dtype of a whole stored row. store: path of the
    store, where `find_fitted` begins to search for the fitted file (scales or codebooks) that decoding may need.
    """

    reduction: Reduction
    width: int
    dtype: str
    shards: int
    stored_width: int
    stored_dtype: str
    store: Place

    @classmethod
    def of(cls, hook: Mapping[str, Any], store: Place) -> StoredReduction | None:
        """The reduction of an entry in the attribute `hooks`, or None.

        Raises ReduceError for an unknown reduction, and ValueError for a damaged entry.
        """
        settings = hook.get("reduce")
        if settings is None:
            return None
        try:
            reduction = from_settings({k: v for k, v in settings.items() if k not in _OF_VALUES})
            shards = int(hook["shards"])
            for dtype in (hook["dtype"], settings["dtype"]):
                ITEMSIZE[dtype]  # raises KeyError or TypeError for an unknown one
            return cls(
                reduction,
                int(settings["width"]) // shards,
                str(settings["dtype"]),
                shards,
                int(hook["width"]),
                str(hook["dtype"]),
                store,
            )
        except ReduceError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{store}: the reduction of {hook.get('array')!r} is damaged ({error!r})") from error

    def slices(self, rows: np.ndarray) -> list[np.ndarray]:
        """The parts of rows [..., stored width] that each tensor-parallel rank stored."""
        return np.split(rows, self.shards, axis=-1)

    def decode(self, rows: np.ndarray, layers: Sequence[int | None]) -> np.ndarray:
        """Decode stored rows [layers, tokens, stored width] to float32 [layers, tokens, decoded width].

        layers: the model's layer numbers, None for a hook that exists once. Raises FileNotFoundError if the fitted
        file is missing, and ValueError for damaged values.
        """
        decoded = self._decoded(rows)
        if not self.reduction.needs_file:
            return decoded
        shape = (*decoded.shape[:-1], self.decoded_width)
        read = decoded if decoded.shape == shape else np.empty(shape, np.float32)
        for number, layer in enumerate(layers):
            read[number] = self.reduction.read(decoded[number], self._part(layer))
        return read

    def tally(self, rows: np.ndarray, layer: int | None) -> Tally:
        """Sums of |x| over stored rows [tokens, stored width] of one layer. Raises like `decode`."""
        with self._named():
            return self.reduction.tally_slices(self.slices(rows), self.width, self.dtype, self._part(layer))

    def check_files(self) -> None:
        """Raise the error of `decode` if the fitted file is missing or damaged."""
        self.file()

    def file(self) -> FittedFile | None:
        """The fitted file; None if decoding needs none. Raises FileNotFoundError and ValueError."""
        ref = self.reduction.fitted() if self.reduction.needs_file else None
        return None if ref is None else find_fitted(ref.kind, ref.sha256, self.store)

    def _part(self, layer: int | None) -> Any:
        """The data of a layer in the fitted file; None if decoding needs no file."""
        file = self.file()
        return None if file is None else self.reduction.part(file, layer or 0)

    def _decoded(self, rows: np.ndarray) -> np.ndarray:
        with self._named():
            parts = [self.reduction.decode(part, self.width, self.dtype) for part in self.slices(rows)]
        return self.reduction.merge(parts).astype(np.float32, copy=False)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error in decoding, as of a stored index beyond the width, into a ValueError that names the store."""
        try:
            yield
        except ReduceError:  # names the fault of the store's settings
            raise
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.store}: values of {self.reduction.kind} cannot be decoded ({error}); dmi verify says which"
            ) from error

    @functools.cached_property
    def decoded_width(self) -> int:
        """Width of a decoded row, which for a projection or a summary is not the width of the hook."""
        one = np.zeros((1, self.stored_width), numpy_dtype(self.stored_dtype))
        return int(self.reduction.read_width(self._decoded(one).shape[-1]))
