# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a reduction: settings, an encoder in torch, and a decoder in numpy."""

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


MOST_DIGITS = 18
"""Maximum number of digits of a number in a setting."""


class Keeps(enum.Flag):
    """Properties of the hook's rows that decoded rows keep. An analysis refuses hooks without the properties it needs.

    VALUES: each decoded value approximates the hook's value at that place, or is 0 if the value was not kept.
    EVERY_VALUE: no value is left out. NORMS: norms and cosines of rows are kept, at least approximately. DIRECTIONS:
    means and differences of decoded rows are directions, in the hook's space or in the space of a projection.
    """

    NOTHING = 0
    VALUES = enum.auto()
    EVERY_VALUE = enum.auto()
    NORMS = enum.auto()
    DIRECTIONS = enum.auto()
    ALL = VALUES | EVERY_VALUE | NORMS | DIRECTIONS


class LinearHead(NamedTuple):
    """A linear head on a device.

    weight: float32 [outputs, width], contiguous. bias: float32 [outputs]. output: the output function, "none",
    "sigmoid" or "softmax".
    """

    weight: torch.Tensor
    bias: torch.Tensor
    output: str


@dataclass(frozen=True)
class FittedRef:
    """A reference to the file of a fitted reduction. source: path of the file, or "" if it was read from a store."""

    kind: type[FittedFile]
    sha256: str
    source: str


@dataclass(frozen=True)
class Reduction:
    """One reduction with its settings. A new reduction is a subclass in its own file, with an entry in `KINDS`.

    Rows of `width` values become rows of `stored_width(width, dtype)` values of `stored_dtype(dtype)`. Except for
    `round` and probes, the stored values are bytes, in the layout of the class (docs/FORMAT.md, section 11), and their
    number is a multiple of 4.

    A subclass has to define `kind`, `forms`, `stored_width`, `encode` and `decode`. The other members have defaults for
    a reduction that keeps every value of any hook approximately, and has no GPU kernel.
    """

    kind: ClassVar[str] = "none"
    """The name of the reduction, in settings and in stores."""
    forms: ClassVar[tuple[str, ...]] = ()
    """The forms of the reduction in settings, for help and docs/REDUCTIONS.md: ("int8", "int8(affine)", "int8(g)")."""
    example: ClassVar[str] = ""
    """A form with numbers, for messages. Reductions with `only` need it."""
    only: ClassVar[frozenset[str]] = frozenset()
    """The only hooks that the reduction takes. No other reduction takes these hooks, and no store has them in full.

    Empty: the reduction takes every other hook with a float dtype.
    """
    keeps: ClassVar[Keeps] = Keeps.ALL
    """The properties of the hook's rows that decoded rows keep."""
    projects: ClassVar[bool] = False
    """Whether decoded rows are projections, so that `project` works."""
    computes: ClassVar[bool] = False
    """Whether decoded rows are the outputs of a probe or an autoencoder. `keeps` is about the source hook."""
    compared: ClassVar[tuple[str, ...]] = ()
    """Forms that `dmi fidelity` measures by default."""
    measured: ClassVar[Mapping[str, str]] = OF_VALUES
    """{name: meaning} of the results of `measures`. A larger `error` is worse; other measures are worse if smaller."""
    needs_file: ClassVar[bool] = False
    """Whether reading rows needs the file of `fitted` (see `read`)."""
    at_end: ClassVar[bool] = False
    """Whether all layers are reduced together at the end of a small step, for kernels with more latency than work.

    Has no effect on reductions with `one_kernel`.
    """

    # ---- settings ---------------------------------------------------------------------------------------------------

    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    """{word in the brackets of a setting, such as "affine": (the field that it sets, the value)}."""
    number: ClassVar[str] = ""
    """The field that a number without a name sets, as in "topk(64)"; "" if no number is allowed."""
    named: ClassVar[tuple[str, ...]] = ()
    """Fields that are set only by name, as in "seed=7"."""

    @classmethod
    def from_text(cls, inside: str) -> Reduction:
        """Make the reduction from the text in the brackets of a setting. Raises ReduceError."""
        return cls(**cls.fields_of(inside))

    @classmethod
    def fields_of(cls, inside: str) -> dict[str, Any]:
        """The fields that the text in the brackets sets: words and numbers, separated by commas. Raises ReduceError."""
        found: dict[str, Any] = {}
        spec = f"{cls.kind}({inside})"
        for item in filter(None, (part.strip() for part in inside.split(","))):
            name, _, number = item.rpartition("=")
            value: Any
            if item in cls.flags:
                name, value = cls.flags[item]
            elif number.isdecimal() and len(number) <= MOST_DIGITS and name in ("", cls.number, *cls.named):
                if not (name or cls.number):
                    raise ReduceError(f"reduce: {cls.kind} takes no number, but {spec!r} gives {item!r}; leave it out")
                name, value = name or cls.number, int(number)
            else:
                known = [*cls.flags, *([f"a number ({cls.number})"] if cls.number else [])]
                takes = ", ".join([*known, *(f"{name}=NUMBER" for name in cls.named)]) or "nothing"
                raise ReduceError(f"reduce: {item!r} in {spec!r} is unknown; {cls.kind} takes {takes}")
            if name in found:
                raise ReduceError(f"reduce: {spec!r} sets {name} twice; leave {item!r} out")
            found[name] = value
        return found

    def settings(self) -> dict[str, Any]:
        """The settings that a store keeps, with `kind`. `from_settings` rebuilds the reduction."""
        return {"kind": self.kind, **asdict(self)}

    def check(self, width: int) -> None:
        """Check that rows of `width` values can be reduced. Raises ReduceError."""

    def check_context(self, tokens: int) -> None:
        """Check that requests of up to `tokens` tokens can be reduced. Raises ReduceError."""

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Reduction:
        """This reduction for one hook. width: values of one slice. shards: number of slices. Raises ReduceError."""
        self.check(width)
        return self

    # ---- encoding ---------------------------------------------------------------------------------------------------

    def stored_dtype(self, dtype: str) -> str:
        """The dtype of stored rows for values of `dtype`."""
        return "uint8"

    def stored_width(self, width: int, dtype: str) -> int:
        """Number of elements of a stored row for `width` values of `dtype`."""
        raise NotImplementedError

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        """Put the tensors that `encode` needs for slice `shard` on the device.

        `encode` may run in a CUDA graph, so `encode` must not create these tensors.
        """

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [tokens, width] of a float dtype -> [tokens, stored width] of the stored dtype, on the same device.

        slots: the slots of the rows, int64 [tokens]; None for the row numbers. An encoder that samples derives the
        start of the sample from them, so that equal rows get different samples.
        """
        raise NotImplementedError

    def fused(self, dtype: str) -> tuple[str, int] | None:
        """(mode, number) of the kernel in engine/kernels/reduce.py that encodes the result of `before`.

        None if there is no such kernel. A GPU then runs `encode`.
        """
        return None

    @property
    def one_kernel(self) -> bool:
        """Whether a GPU computes stored rows from the values and `head` in one kernel (engine/kernels/linear.py)."""
        return False

    def head(self, layer: int, device: torch.device) -> LinearHead:
        """The head of a layer, which `prepare` put on the device. Only for reductions with `one_kernel`."""
        raise NotImplementedError

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """The part of `encode` that torch computes before our kernel, such as a projection. values: [tokens, width]."""
        return values

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """`before` of several layers. values: [tokens, layers, width]."""
        return values

    def scratch(self, width: int, dtype: str) -> int:
        """Bytes that `before` (or `encode`, without a kernel) allocates on a GPU per row of `width` values."""
        return 4 * 4 * width if self.fused(dtype) is None else 0  # a few copies in float32

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Decode stored rows [..., stored width] to float32 [..., width], or [..., k] for projections."""
        raise NotImplementedError

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join the decoded rows of all tensor-parallel slices, in order, to rows of the whole hook."""
        return np.concatenate(parts, axis=-1)

    def fitted(self) -> FittedRef | None:
        """The file of a fitted reduction; None if it is not fitted. The server keeps a copy next to its stores."""
        return None

    def part(self, file: FittedFile, layer: int) -> Any:
        """The data of one layer in the file of `fitted`, for `read`, `project` and `restore`."""
        raise NotImplementedError

    def read(self, decoded: np.ndarray, part: Any) -> np.ndarray:
        """Convert decoded and merged rows to the rows that readers return. Only with `needs_file`. part: see `part`."""
        return decoded

    def read_width(self, decoded: int) -> int:
        """Width of the rows that `read` returns for rows of width `decoded`."""
        return decoded

    def project(self, direction: np.ndarray, basis: LayerBasis | None = None, shards: int = 1) -> np.ndarray:
        """Project a direction [width] in the hook's space to the space of decoded rows, float32 [k].

        basis: the basis of the layer, for a fitted reduction. shards: number of slices that were reduced separately.
        """
        raise NotImplementedError

    def restore(self, decoded: np.ndarray, basis: LayerBasis) -> np.ndarray:
        """Map decoded rows [..., k] of a fitted reduction back to the hook's space, float32 [..., width]."""
        raise NotImplementedError

    # ---- analysis ---------------------------------------------------------------------------------------------------

    def tally_slices(self, slices: Sequence[np.ndarray], width: int, dtype: str, part: Any = None) -> Tally:
        """Sums of |x| per neuron, for `importance`. slices: the stored rows of each rank, [rows, stored width].
        width: width of one slice. part: see `part`; None without `needs_file`.
        """
        return Tally.of(self.read(self.merge([self.decode(rows, width, dtype) for rows in slices]), part))

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        """The measures of `dmi fidelity`, by the names of `measured`."""
        return of_values(rows)

    def restored(self, rows: ReducedRows) -> np.ndarray | None:
        """Decoded rows in the hook's space, float32 [n, width], for the logit lens; None if that is impossible."""
        return rows.decoded if Keeps.VALUES in self.keeps else None

    def statistics(self) -> tuple[Statistic, ...] | None:
        """The statistics of decoded rows, the default first. None for the statistics of ordinary rows."""
        return None


LEAST_SPAN = 2.0**-100
"""Rows and groups with a smaller span become zeros, so that no division overflows."""


def over(span: torch.Tensor, steps: float) -> torch.Tensor:
    """span / steps, with IEEE 754 rounding on every device. (torch multiplies by the reciprocal of a Python number.)"""
    import torch

    return span / torch.full_like(span, steps)


def steps_over(steps: float, span: torch.Tensor) -> torch.Tensor:
    """steps / span, or 0 if the span is below LEAST_SPAN."""
    import torch

    return torch.where(span >= LEAST_SPAN, torch.full_like(span, steps) / span, 0)


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Concatenate the bytes of parts [tokens, n] of any dtype, uint8 [tokens, total bytes]."""
    import torch

    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=1)


def unpack(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`count` values of `dtype` (a name of dtypes.py) from byte `start` of each row [..., bytes]."""
    kind = numpy_dtype(dtype)
    return np.ascontiguousarray(stored[..., start : start + count * kind.itemsize]).view(kind)


def unpack_floats(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """Like `unpack`, but converted to float32."""
    return unpack(stored, start, count, dtype).astype(np.float32)


def times_scale(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Encoded values times their scales, float32.

    The scale of a row that was not finite is infinite or NaN, so the row becomes NaN.
    """
    with np.errstate(invalid="ignore"):  # 0 * inf
        return np.multiply(values, scales, dtype=np.float32)


def pad(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4, where float32 fields begin."""
    return -(-nbytes // 4) * 4
