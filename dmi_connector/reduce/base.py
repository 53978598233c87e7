# SPDX-License-Identifier: Apache-2.0
"""The interface of a reduction: its settings, what it keeps, an encoder in torch, and a decoder in numpy. The encoder
runs on the device of the values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.measures import OF_VALUES, ReducedRows, of_values
from dmi_connector.reduce.statistic import Statistic
from dmi_connector.reduce.tally import Tally

if TYPE_CHECKING:
    import torch

    from dmi_connector.reduce.basis import LayerBasis
    from dmi_connector.reduce.fitted_file import FittedFile


class Keeps(enum.Flag):
    """What decoded rows keep of the hook's rows. An analysis refuses hooks whose reduction lacks what it needs.

    VALUES: each decoded value is the hook's value at that place, or 0 where the value was not kept. EVERY_VALUE: no
    value is left out. NORMS: norms and cosines of rows, at least approximately. DIRECTIONS: means and differences of
    decoded rows are directions, in the hook's space or in the one that it was projected to.
    """

    NOTHING = 0
    VALUES = enum.auto()
    EVERY_VALUE = enum.auto()
    NORMS = enum.auto()
    DIRECTIONS = enum.auto()
    ALL = VALUES | EVERY_VALUE | NORMS | DIRECTIONS


class LinearHead(NamedTuple):
    """A linear head on a device.

    weight: float32 [outputs, width], contiguous. bias: float32 [outputs]. output: the output function: "none",
    "sigmoid" or "softmax".
    """

    weight: torch.Tensor
    bias: torch.Tensor
    output: str


@dataclass(frozen=True)
class FittedRef:
    """The file of a fitted reduction. source: its path; "" if the reference was read from a store."""

    kind: type[FittedFile]
    sha256: str
    source: str


@dataclass(frozen=True)
class Reduction:
    """One reduction with its settings. A new reduction is a subclass in its own file, with an entry in `KINDS`.

    Rows of `width` values become rows of `stored_width(width, dtype)` values of `stored_dtype(dtype)`: except for
    `round` these are bytes, in the layout of the class (docs/FORMAT.md, section 11). The bytes of a row are a multiple
    of 4.

    A subclass has to define `kind`, `forms`, `stored_width`, `encode` and `decode`. The other defaults are for a
    reduction that keeps every value of any hook approximately, and has no kernel of its own.
    """

    kind: ClassVar[str] = "none"
    """Its name, in settings and in stores."""
    forms: ClassVar[tuple[str, ...]] = ()
    """Its forms in settings, for help and docs/REDUCTIONS.md: ("int8", "int8(affine)", "int8(g)")."""
    example: ClassVar[str] = ""
    """One of its forms with numbers, for messages. Reductions with `only` need it."""
    only: ClassVar[frozenset[str]] = frozenset()
    """The only hooks that it reduces. No other reduction takes these hooks, and no store has them in full.

    Empty: it takes every other hook of floats.
    """
    keeps: ClassVar[Keeps] = Keeps.ALL
    """What decoded rows keep of the hook's rows."""
    projects: ClassVar[bool] = False
    """Whether decoded rows are projections, so that `project` works."""
    computes: ClassVar[bool] = False
    """Whether it computes a probe. Decoded rows are then the probe's own values. `keeps` is about the source."""
    compared: ClassVar[tuple[str, ...]] = ()
    """Forms that `dmi fidelity` measures by default."""
    measured: ClassVar[Mapping[str, str]] = OF_VALUES
    """Name of each of `measures` -> its meaning. A larger `error` is worse. For other measures a smaller value is
    worse.
    """
    needs_file: ClassVar[bool] = False
    """Whether reading rows needs the file of `fitted` (see `read`)."""
    at_end: ClassVar[bool] = False
    """Whether small steps reduce all layers together at their end. It is for kernels with more latency than
    computation.

    Reductions with `one_kernel` do not do this.
    """

    # ---- settings ---------------------------------------------------------------------------------------------------

    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    """Word in the brackets of a setting, such as "affine" -> (the field that it sets, the value)."""
    number: ClassVar[str] = ""
    """The field that a number without a name sets, as in "topk(64)"; "": it takes none."""
    named: ClassVar[tuple[str, ...]] = ()
    """Fields that are set by name only, as in "seed=7"."""

    @classmethod
    def from_text(cls, inside: str) -> Reduction:
        """The reduction that the text in the brackets of a setting names. Raises ReduceError."""
        return cls(**cls.fields_of(inside))

    @classmethod
    def fields_of(cls, inside: str) -> dict[str, Any]:
        """The fields that the text in the brackets sets: words and numbers, separated by commas. Raises ReduceError."""
        found: dict[str, Any] = {}
        spec = f"{cls.kind}({inside})"
        for item in filter(None, (part.strip() for part in inside.split(","))):
            name, _, number = item.rpartition("=")
            if item in cls.flags:
                name, value = cls.flags[item]
                found[name] = value
            elif number.isdecimal() and name in ("", cls.number, *cls.named):
                if not (name or cls.number):
                    raise ReduceError(f"reduce: {cls.kind} takes no number, but {spec!r} gives {item!r}; leave it out")
                found[name or cls.number] = int(number)
            else:
                known = [*cls.flags, *([f"a number ({cls.number})"] if cls.number else [])]
                takes = ", ".join([*known, *(f"{name}=NUMBER" for name in cls.named)]) or "nothing"
                raise ReduceError(f"reduce: {item!r} in {spec!r} is unknown; {cls.kind} takes {takes}")
        return found

    def settings(self) -> dict[str, Any]:
        """The settings that a store keeps, with `kind`. `from_settings` rebuilds the reduction."""
        return {"kind": self.kind, **asdict(self)}

    def check(self, width: int) -> None:
        """Check that rows of `width` values can be reduced. Raises ReduceError."""

    def check_context(self, tokens: int) -> None:
        """Check that requests of up to `tokens` tokens can be reduced. Raises ReduceError."""

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Reduction:
        """This reduction for one hook. shards: slices of its width. width: values of one slice. Raises ReduceError."""
        self.check(width)
        return self

    # ---- encoding ---------------------------------------------------------------------------------------------------

    def stored_dtype(self, dtype: str) -> str:
        """Dtype of stored rows for values of `dtype`."""
        return "uint8"

    def stored_width(self, width: int, dtype: str) -> int:
        """Elements of a stored row for `width` values of `dtype`."""
        raise NotImplementedError

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        """Put the tensors that `encode` needs for slice `shard` on the device.

        `encode` may run in a CUDA graph, so it must not do this.
        """

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [tokens, width] of a float dtype -> [tokens, stored width] of the stored dtype, on the same device.

        slots: the slots of the rows, int64 [tokens]; None: the order of the rows. An encoder that samples derives
        the start from them, so that equal rows get different samples.
        """
        raise NotImplementedError

    def fused(self, dtype: str) -> tuple[str, int] | None:
        """(mode, number) of the kernel in engine/kernels/reduce.py that encodes the result of `before`.

        None: there is no such kernel, and a GPU runs `encode`.
        """
        return None

    @property
    def one_kernel(self) -> bool:
        """Whether a GPU computes stored rows from the values in one kernel (engine/kernels/linear.py), from `head`."""
        return False

    def head(self, layer: int, device: torch.device) -> LinearHead:
        """The head of a layer, which `prepare` put on the device. For reductions with `one_kernel`."""
        raise NotImplementedError

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """The part that library operations compute before our kernel, such as a projection. values: [tokens, width]."""
        return values

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """The same for all of `layers`. values: [tokens, layers, width]."""
        return values

    def scratch(self, width: int, dtype: str) -> int:
        """Bytes that `before` allocates on a GPU per row of `width` values; without a kernel, those of `encode`."""
        return 4 * 4 * width if self.fused(dtype) is None else 0  # a few copies in float32

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Stored rows [..., stored width] -> float32 [..., width], or [..., k] for projections."""
        raise NotImplementedError

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """Decoded rows of all tensor-parallel slices, in order -> rows of the whole hook."""
        return np.concatenate(parts, axis=-1)

    def fitted(self) -> FittedRef | None:
        """The file of a fitted reduction; None if it is not fitted. The server keeps a copy beside its stores."""
        return None

    def part(self, file: FittedFile, layer: int) -> Any:
        """The data of one layer in the file of `fitted`, which `read`, `project` and `restore` need."""
        raise NotImplementedError

    def read(self, decoded: np.ndarray, part: Any) -> np.ndarray:
        """Decoded and merged rows -> the rows that readers return. For a reduction with `needs_file`; see `part`."""
        return decoded

    def read_width(self, decoded: int) -> int:
        """Width of the rows that `read` returns for decoded and merged rows of this width."""
        return decoded

    def project(self, direction: np.ndarray, basis: LayerBasis | None = None, shards: int = 1) -> np.ndarray:
        """Project a direction [width] of the hook's space to the space of decoded rows, float32 [k].

        basis: the basis of the layer, for a fitted reduction. shards: number of slices that were reduced separately.
        """
        raise NotImplementedError

    def restore(self, decoded: np.ndarray, basis: LayerBasis) -> np.ndarray:
        """Decoded rows [..., k] of a reduction that is fitted -> float32 [..., width], in the hook's space."""
        raise NotImplementedError

    # ---- analysis ---------------------------------------------------------------------------------------------------

    def tally_slices(self, slices: Sequence[np.ndarray], width: int, dtype: str, part: Any = None) -> Tally:
        """Sums of |x| of each neuron, for `importance`. slices: the stored rows of each rank, [rows, stored width].
        width: of one slice. part: see `part`; None without `needs_file`.
        """
        return Tally.of(self.read(self.merge([self.decode(rows, width, dtype) for rows in slices]), part))

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        """The measures of `dmi fidelity`, by the names of `measured`."""
        return of_values(rows)

    def restored(self, rows: ReducedRows) -> np.ndarray | None:
        """Decoded rows in the hook's own space, float32 [n, width], for the logit lens; None if that is lost."""
        return rows.decoded if Keeps.VALUES in self.keeps else None

    def statistics(self) -> tuple[Statistic, ...] | None:
        """The statistics of decoded rows, the default first. None: the statistics of any rows of numbers."""
        return None


LEAST_SPAN = 2.0**-100
"""Rows and groups with a smaller span become zeros, so that no quotient overflows."""


def over(span: torch.Tensor, steps: float) -> torch.Tensor:
    """span / steps, rounded as IEEE 754 says on every device. (torch divides by a number through its reciprocal.)"""
    import torch

    return span / torch.full_like(span, steps)


def steps_over(steps: float, span: torch.Tensor) -> torch.Tensor:
    """steps / span; 0 where the span is below LEAST_SPAN."""
    import torch

    return torch.where(span >= LEAST_SPAN, torch.full_like(span, steps) / span, 0)


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [tokens, n] of any dtype -> their concatenated bytes, uint8 [tokens, sum]."""
    import torch

    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=1)


def unpack(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`count` values of `dtype` (a name of dtypes.py) from byte `start` of each row [..., bytes]."""
    kind = numpy_dtype(dtype)
    return np.ascontiguousarray(stored[..., start : start + count * kind.itemsize]).view(kind)


def unpack_floats(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`unpack`, then float32."""
    return unpack(stored, start, count, dtype).astype(np.float32)


def pad(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4, where float32 fields begin."""
    return -(-nbytes // 4) * 4
