# SPDX-License-Identifier: Apache-2.0
"""The kernels that reduce values on their way into rows equal their torch twins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

pytest.importorskip("triton")
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.engine.kernels.reduce import reduce_layers_torch, reduce_layers_triton
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.reduce import Reduction, parse
from dmi_connector.reduce.basis import METADATA
from dmi_connector.reduce.codebooks import METADATA as CODEBOOKS
from dmi_connector.reduce.fp8 import Fp8
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.rounding import Round
from dmi_connector.reduce.scales import METADATA as SCALES
from tests import kernelkit as kit
from tests.shorter import soak

FAR = 60_000
"""A slot whose product with the hash factor of topk needs more than 32 bits."""
CASES = [
    ("float32", ["int8", "int8(affine)", "fp8", "round(4)", "none"], [64, 50, 33, 100, 7], 5),
    (
        kit.NARROW,
        ["int8", "topk(8)", "topk(5,exact,sample=9)", "round(3)", "none", "rp(16)"],
        [1030, 200, 77, 40, 20, 128],
        6,
    ),
    (
        "float32",
        ["topk(7)", "topk(3,exact,sample=5)", "topk(1)", "round(23)", "rp(9,sign)", "topk(2,sample=66)", "cs(9,exact)"],
        [100, 128, 5, 12, 64, 150, 60],
        4,
    ),
    ("float32", ["int8(32)", "int8(16)", "int8(1024)", "int8(64)", "int8(128)"], [2050, 17, 1030, 64, 500], 5),
    ("float32", ["topk(8)", "topk(5,exact)"], [40_001, 65_537], 3),  # wider counters, wider indexes
    ("float32", ["topk(5)"], [65_536], 3),  # the widest with narrow indexes
    (kit.NARROW, ["int8"] * 13, [32 + i for i in range(13)], 2),
]


@pytest.mark.parametrize(
    ("deferred", "dtype", "specs", "widths", "tokens"),
    [
        *((False, *case) for case in CASES),
        (True, *CASES[0]),
        (True, *CASES[-1]),
        *soak(*((True, *c) for c in CASES[1:-1])),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) and isinstance(value[0], str) else None,
)
def test_reduced_rows_equal_those_of_the_torch_twin(
    deferred: bool, dtype: str, specs: list[str], widths: list[int], tokens: int
) -> None:
    """Values have all magnitudes, with ties, zeros and a constant row. Padding is skipped.

    deferred: copy the second value and every third one after it to a buffer, without reducing them.
    """
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    reductions = [parse(spec) for spec in specs]
    values, sizes = [], []
    for width, reduction in zip(widths, reductions, strict=True):
        stored = (dtype, width)
        if reduction is not None:
            reduction.prepare(width, kit.DEVICE, 0, 0)
            stored = reduction.stored_dtype(dtype), reduction.stored_width(width, dtype)
        sizes.append(ITEMSIZE[stored[0]] * stored[1])
        scales = torch.logspace(-3, 3, tokens, device=kit.DEVICE)
        value = (torch.randn(tokens, width + 5, device=kit.DEVICE) * scales[:, None]).to(kind)[:, 2 : 2 + width]
        value[0] = value[0].round()
        value[-1] = (value[-1].float() * torch.logspace(-6, 0, width, device=kit.DEVICE)).to(kind)
        if tokens > 3:
            value[2], value[3] = 0, 2.5
        values.append(value)
    offsets, row_bytes = kit.side_by_side(sizes)
    slots = kit.random_slots(tokens)
    slots[0], slots[1] = FAR, -1
    places: list[int | None] = [None] * len(specs)
    end = 0
    if deferred:
        for i in range(1, len(specs), 3):
            places[i], end = end, end + -(-widths[i] * kind.itemsize // 16) * 16
    buffers = torch.full((2, tokens, end + 64), 5, dtype=torch.uint8, device=kit.DEVICE) if deferred else (None, None)
    twin, rows = kit.untouched(FAR + 1, row_bytes), kit.untouched(FAR + 1, row_bytes)
    writer = RowWriter(widths, kind, offsets, reductions, 0, places)
    writer.in_torch(twin, slots, values, buffers[0])
    for _ in range(2):  # the second launch uses the compiled kernel of the first
        rows.fill_(kit.UNTOUCHED)
        writer.in_triton(rows, slots, values, buffers[1])
    twin[0] = rows[0] = kit.UNTOUCHED
    if not torch.equal(rows, twin):
        for spec, (start, stop) in zip(specs, pairwise([*offsets, row_bytes]), strict=True):
            mine, other = rows[:, start:stop], twin[:, start:stop]
            off = mine != other
            assert torch.equal(mine, other), (spec, off.nonzero()[:9].tolist(), mine[off][:9], other[off][:9])
        raise AssertionError("bytes before the first value differ")
    for i, place in enumerate(places):
        if place is not None:
            written = rows[:, offsets[i] : offsets[i] + sizes[i]]
            assert (written == kit.UNTOUCHED).all()
            for buffer in buffers:
                put = buffer[:, place : place + widths[i] * kind.itemsize].contiguous().view(kind)
                real = slots >= 0  # padding may be written or not
                assert torch.equal(put[real], values[i][real])


# ---- one hook of many layers ------------------------------------------------------------------------------------

LAYERS_DTYPE = "bfloat16" if kit.NARROW == "bfloat16" else "float32"
LAYERS_CASES = [
    *(
        (spec, 200, 4, 5)
        for spec in (
            "topk(8)",
            "topk(5,exact,sample=9)",
            "rp(16)",
            "int8",
            "pca(8)",
            "pca(8,group=50)",
            "int8(channel)",
            "cs(16)",
            "pq(8)",
            "pq(4)",
            "rp(16,channel)",
        )
    ),
    ("cs(16,exact)", 200, 3, 5),
    ("rp(16,group=50)", 200, 3, 5),
    ("int8(channel)", 33, 3, 5),
    *((spec, 2050, 2, 4) for spec in ("topk(64)", "topk(7,exact,sample=9)", "topk(128)", "topk(129)")),
]


def pca(k: int, width: int, layers: list[int], folder: Path, group: int = 0) -> Reduction:
    """A pca whose basis is random."""
    rng, tensors = np.random.default_rng(0), {}
    for layer in layers:
        part = {
            "mean": rng.normal(size=width),
            "std": np.geomspace(2, 0.1, k * (width // group if group else 1)),
            "variance": np.array([9.0]),
        }
        part["components"] = np.linalg.qr(rng.normal(size=(width, k)))[0]
        tensors |= {f"mlp_out.{layer}.{name}": np.ascontiguousarray(a, "f4") for name, a in part.items()}
    about = {"mlp_out": {"width": width, "k": k, "layers": layers, "group": group}}
    save_file(tensors, folder / "basis", metadata={METADATA: json.dumps({"hooks": about, "stores": 1})})
    reduction = parse(f"pca({folder / 'basis'})")
    assert reduction is not None
    return reduction.bind("mlp_out", layers, width, 1)


def channel(width: int, layers: list[int], folder: Path) -> Reduction:
    """An int8 whose scales are random, so that some values lie beyond the range."""
    tensors = {f"mlp_out.{n}.scale": np.random.default_rng(n).uniform(0.01, 0.03, width).astype("f4") for n in layers}
    about = {"mlp_out": {"width": width, "layers": layers}}
    save_file(tensors, folder / "scales", metadata={SCALES: json.dumps({"hooks": about, "stores": 1})})
    reduction = parse(f"int8(channel={folder / 'scales'})")
    assert reduction is not None
    return reduction.bind("mlp_out", layers, width, 1)


def projected(width: int, layers: list[int], folder: Path) -> Reduction:
    """A projection to 16 values whose scales are random, so that some values lie beyond the range."""
    tensors = {f"mlp_out.{n}.scale": np.random.default_rng(n).uniform(0.01, 0.03, 16).astype("f4") for n in layers}
    projection = {"kind": "rp", "k": 16, "seed": 0, "distribution": "orthogonal"}
    about = {"mlp_out": {"width": width, "layers": layers, "projection": projection, "projected": 16}}
    save_file(tensors, folder / "scales", metadata={SCALES: json.dumps({"hooks": about, "stores": 1})})
    reduction = parse(f"rp(16,channel={folder / 'scales'})")
    assert reduction is not None
    return reduction.bind("mlp_out", layers, width, 1)


def pq(bits: int, width: int, layers: list[int], folder: Path) -> Reduction:
    """A pq whose centroids are random."""
    shape = (width // 8, 2**bits - 1, 8)
    tensors = {f"mlp_out.{n}.centroids": np.random.default_rng(n).normal(size=shape).astype("f4") for n in layers}
    about = {"mlp_out": {"width": width, "m": shape[0], "bits": bits, "layers": layers}}
    save_file(tensors, folder / "books", metadata={CODEBOOKS: json.dumps({"hooks": about, "stores": 1})})
    reduction = parse(f"pq({folder / 'books'})")
    assert reduction is not None
    return reduction.bind("mlp_out", layers, width, 1)


def fitted(spec: str, width: int, layers: list[int], folder: Path) -> Reduction | None:
    """The reduction of a setting, with its file if it needs one."""
    if spec.startswith("pca"):
        k, _, group = spec[4:-1].partition(",group=")
        return pca(int(k), width, layers, folder, int(group or 0))
    if spec == "rp(16,channel)":
        return projected(width, layers, folder)
    if spec.startswith("pq"):
        return pq(int(spec[3:-1]), width, layers, folder)
    return channel(width, layers, folder) if spec == "int8(channel)" else parse(spec)


@pytest.mark.parametrize(
    ("spec", "width", "count", "tokens"), LAYERS_CASES, ids=[f"{spec}-{width}" for spec, width, *_ in LAYERS_CASES]
)
def test_layers_reduced_at_once_equal_those_of_the_torch_twin(
    spec: str, width: int, count: int, tokens: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers = [2 * i + 1 for i in range(count)]
    reduction = fitted(spec, width, layers, tmp_path)
    assert reduction is not None
    for layer in layers:
        reduction.prepare(width, kit.DEVICE, layer, 0)
    wide = torch.randn(tokens, 3 + (count + 1) * width, device=kit.DEVICE).to(getattr(torch, LAYERS_DTYPE))
    wide[1] = wide[1].round()  # ties
    wide[2] = 0
    if spec == "int8(channel)":
        wide[3, 5:9] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
    values = wide[:, 2 : 2 + count * width].unflatten(1, (count, width))
    step = -(-reduction.stored_width(width, LAYERS_DTYPE) // 16) * 16
    offsets = 64 + step * torch.randperm(count, device=kit.DEVICE)
    slots = kit.random_slots(tokens)
    slots[0] = -1
    twin, rows = kit.untouched(kit.ROWS, 64 + step * count), kit.untouched(kit.ROWS, 64 + step * count)
    reduce_layers_torch(twin, slots, values, offsets, reduction, layers)
    reduce_layers_triton(rows, slots, values, offsets, reduction, layers)
    twin[0] = rows[0] = kit.UNTOUCHED
    if spec.startswith("rp"):  # many layers may be summed in another order than one
        assert (rows != twin).float().mean() < 0.01
    else:
        assert torch.equal(rows, twin), (rows != twin).nonzero()[:10].tolist()
    assert len(rows.unique(dim=0)) == tokens, "padding has no row; untouched rows are alike"


class WithoutKernel(Reduction):
    """A reduction that has no kernel, so a GPU runs its torch encoder."""

    def fused(self, dtype: str) -> None:
        return None


@dataclass(frozen=True)
class PlainInt8(WithoutKernel, Int8):
    pass


@dataclass(frozen=True)
class PlainRound(WithoutKernel, Round):
    """Rows of floats. The other reductions store bytes."""


@dataclass(frozen=True)
class AtTheEnd(WithoutKernel, Fp8):
    at_end: ClassVar[bool] = True


def test_a_reduction_without_a_kernel_gives_the_rows_of_its_torch_encoder() -> None:
    """It is tested with other reductions in one tap, and with many layers. Padding is skipped, and memory for the
    encoder is planned.
    """
    torch.manual_seed(0)
    tokens, width = 6, 44
    plain = [PlainInt8(), None, PlainRound(3), AtTheEnd(), Int8()]
    dtype = getattr(torch, LAYERS_DTYPE)
    values = [torch.randn(tokens, width, device=kit.DEVICE).to(dtype) for _ in plain]
    offsets, row_bytes = kit.side_by_side([4 * width] * len(plain))
    slots = kit.random_slots(tokens)
    slots[1] = -1
    twin, rows = kit.untouched(kit.ROWS, row_bytes), kit.untouched(kit.ROWS, row_bytes)
    writer = RowWriter([width] * len(plain), dtype, offsets, plain)
    writer.in_torch(twin, slots, values)
    writer.in_triton(rows, slots, values)
    twin[0] = rows[0] = kit.UNTOUCHED
    assert torch.equal(rows, twin) and len(rows.unique(dim=0)) == tokens
    layers = torch.randn(tokens, 3, width, device=kit.DEVICE).to(dtype)
    at = torch.tensor([64, 256, 160], device=kit.DEVICE)
    for reduction, kernel in ((PlainInt8(), Int8()), (PlainRound(3), Round(3)), (AtTheEnd(), Fp8())):
        found = []
        for one in (reduction, kernel):
            found.append(kit.untouched(kit.ROWS, row_bytes))
            reduce_layers_triton(found[-1], slots, layers, at, one, [0, 1, 2])
        assert torch.equal(*found), "as with a kernel"
        assert reduction.scratch(width, "float32") > 0 == kernel.scratch(width, "float32")


NOT_FINITE = ("int8", "int8(affine)", "int8(32)", "fp8", "round(4)", "topk(8)", "topk(5,exact)", "topk(8,sample=9)")


@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("spec", NOT_FINITE)
def test_a_value_that_is_not_finite_reads_as_nan(spec: str, value: str) -> None:
    """The kernel gives NaN at the same places as the torch twin, in the first and in the last values of a row. Other
    rows do not change.
    """
    torch.manual_seed(0)
    width, tokens = 100, 4
    reduction = parse(spec)
    assert reduction is not None
    values = torch.randn(tokens, 1, width, device=kit.DEVICE)
    values[1, 0, 3] = values[2, 0, width - 1] = float(value)
    if "nan" in value:  # the NaN that a GPU computes has all bits set
        values.view(torch.int32)[2, 0, width - 1] = 0x7FFFFFFF if value == "nan" else -1
    offsets = torch.tensor([64], device=kit.DEVICE)
    size = reduction.stored_width(width, "float32") * ITEMSIZE[reduction.stored_dtype("float32")]
    read = []
    for reduce in (reduce_layers_torch, reduce_layers_triton):
        rows = kit.untouched(kit.ROWS, 64 + -(-size // 16) * 16)
        reduce(rows, torch.arange(1, tokens + 1, device=kit.DEVICE), values, offsets, reduction, [0])
        stored = rows[1 : tokens + 1, 64 : 64 + size].cpu().numpy()
        stored = np.ascontiguousarray(stored).view(reduction.stored_dtype("float32"))
        read.append(reduction.decode(stored, width, "float32"))
    finite = [np.isfinite(rows) for rows in read]
    assert np.array_equal(*finite)
    assert np.array_equal(*(rows[~whole] for rows, whole in zip(read, finite, strict=True)), equal_nan=True)
    assert finite[0].all(axis=1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_values_round_as_in_the_torch_twin(dtype: torch.dtype) -> None:
    """None of them becomes infinite."""
    reduction, top = parse("round(3)"), torch.finfo(dtype).max
    assert reduction is not None
    values = torch.tensor([[[top, -top, top * 0.96, top * 0.9]], [[1.0, -top * 0.99, 0.0, top]]], device=kit.DEVICE)
    offsets, read = torch.tensor([64], device=kit.DEVICE), []
    for reduce in (reduce_layers_torch, reduce_layers_triton):
        rows = kit.untouched(kit.ROWS, 64 + 16)
        reduce(rows, torch.arange(1, 3, device=kit.DEVICE), values.to(dtype), offsets, reduction, [0])
        read.append(rows[1:3, 64:80].contiguous().cpu())
    assert torch.equal(*read) and read[0].view(dtype)[:, :4].isfinite().all()
