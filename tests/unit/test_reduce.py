# SPDX-License-Identifier: Apache-2.0
"""Each reduction compared with a plain reference, and its guarantees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from dmi_connector.reduce import KINDS, ReduceError, from_settings, parse
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.base import Reduction
from dmi_connector.reduce.basis import METADATA, Basis
from dmi_connector.reduce.countsketch import CountSketch, table
from dmi_connector.reduce.fp8 import Fp8
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.pca import Pca, fit
from dmi_connector.reduce.projection import DISTRIBUTIONS, RandomProjection, matrix
from dmi_connector.reduce.topk import MOST, TopK
from tests.fittedkit import basis_tensors

SPECS = [
    "int8",
    "int8(affine)",
    "int8(32)",
    "fp8",
    "round(4)",
    "topk(8)",
    "topk(8,exact)",
    "topk(8,exact,sample=0)",
    "rp(16)",
    "rp(16,sign,seed=7)",
    "rp(3,group=10)",
    "cs(16)",
    "cs(16,exact,seed=7)",
]
"""Every kind of reduction that needs no file and no specific hook."""
IN_PART = ("int8(32)", "round", "topk", "cs(16,exact")
"""Reductions that decode only the value, its group or its bucket as NaN if a value is not finite, not the row."""


def rows(tokens: int = 9, width: int = 50, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of very different scales. One has only zeros, one is constant."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-6, 6, tokens)[:, None]
    x[1], x[2] = 0, 3.5
    return x.to(dtype)


def numpy_rows(stored: torch.Tensor, dtype: str) -> np.ndarray:
    return (stored.float() if stored.dtype.is_floating_point else stored).numpy()


def roundtrip(reduction: Reduction, x: torch.Tensor) -> np.ndarray:
    dtype = str(x.dtype).removeprefix("torch.")
    stored = reduction.encode(x)
    assert stored.shape == (x.shape[0], reduction.stored_width(x.shape[1], dtype))
    assert str(stored.dtype) == f"torch.{reduction.stored_dtype(dtype)}"
    return reduction.decode(numpy_rows(stored, dtype), x.shape[1], dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_a_reduction_is_rebuilt_from_its_settings(spec: str) -> None:
    reduction = parse(spec)
    assert reduction is not None and from_settings(reduction.settings()) == reduction


def test_each_kind_is_in_the_list() -> None:
    found = {spec.partition("(")[0] for spec in SPECS}
    assert found == {kind for kind, reduction in KINDS.items() if not reduction.only} - {"pca", "pq"}


@pytest.mark.parametrize("spec", SPECS)
def test_no_rows_are_no_rows(spec: str) -> None:
    reduction = parse(spec)
    assert reduction is not None
    assert len(roundtrip(reduction, torch.zeros(0, 50))) == 0
    assert reduction.before_layers(torch.zeros(0, 2, 50), [0, 1]).shape[:2] == (0, 2)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_bytes_are_a_multiple_of_4_long(spec: str) -> None:
    reduction = parse(spec)
    assert reduction is not None
    if reduction.stored_dtype("float32") == "uint8":
        for width in range(20, 80, 10) if "group" in spec else range(16, 80):
            assert reduction.stored_width(width, "float32") % 4 == 0, width
            roundtrip(reduction, rows(width=width, dtype=torch.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", SPECS)
def test_a_row_that_is_not_finite_does_not_read_as_one_that_is(spec: str, value: float) -> None:
    """docs/REDUCTIONS.md says so. Other rows do not change."""
    reduction, x = parse(spec), rows(dtype=torch.float32)
    assert reduction is not None
    before = roundtrip(reduction, x)
    x[3, 7] = value
    read = roundtrip(reduction, x)
    assert np.isnan(read[3]).all() if not spec.startswith(IN_PART) else not np.isfinite(read[3]).all()
    assert np.array_equal(np.delete(read, 3, 0), np.delete(before, 3, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [50, 64, 1])
def test_int8_rounds_by_at_most_half_a_step(dtype: torch.dtype, width: int) -> None:
    x = rows(width=width, dtype=torch.float32)
    x = x.clamp(-60000, 60000).to(dtype)
    exact = x.float().numpy()
    step = np.abs(exact).max(1, keepdims=True) / 127
    assert (np.abs(roundtrip(parse("int8"), x) - exact) <= step * 0.5001).all()  # type: ignore[arg-type]
    span = (exact.max(1, keepdims=True) - exact.min(1, keepdims=True)) / 254
    error = np.abs(roundtrip(parse("int8(affine)"), x) - exact)  # type: ignore[arg-type]
    assert (error <= span * 0.51 + np.abs(exact) * 1e-6).all()


def test_int8_in_groups_keeps_the_direction_of_any_row() -> None:
    """Some rows have one value a thousand times as large as the others, some one in each group. In others, values grow
    along the row.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2050, generator=generator)
    x[10:20, 5] *= 1000
    x[20:30, ::32] *= 1000
    x[30:40] *= torch.logspace(-3, 3, 2050)
    x[40:50] = x[40:50] ** 5
    x[50:] = torch.nn.functional.silu(x[50:] * 4) * x[50:].roll(1, 1)
    exact, got = x.numpy(), roundtrip(parse("int8(32)"), x)  # type: ignore[arg-type]
    cosines = (exact * got).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(got, axis=1)
    assert cosines.min() > 0.9999, cosines.min()
    row = roundtrip(parse("int8"), x)  # type: ignore[arg-type]
    assert ((exact * row).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(row, axis=1))[50:].min() < 0.9999


def test_int8_and_fp8_keep_directions() -> None:
    x = rows(200, 512, torch.float32)[3:]
    for spec, least in (("int8", 0.9999), ("fp8", 0.999)):
        got = roundtrip(parse(spec), x)  # type: ignore[arg-type]
        cosine = (got * x.numpy()).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(x.numpy(), axis=1)
        assert cosine.min() >= least, (spec, cosine.min())


def test_fp8_decodes_every_bit_pattern_as_torch_does() -> None:
    bits = np.arange(256, dtype=np.uint8)
    stored = np.concatenate([bits, np.ones(1, "f4").view(np.uint8)])
    want = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(Fp8().decode(stored, 256, "bfloat16"), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_round_gives_the_nearest_value_with_that_many_mantissa_bits(dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0])
    got = parse(f"round({bits})").encode(x)  # type: ignore[union-attr]
    mantissa, exponent = np.frexp(x.double().numpy())
    finite = np.isfinite(x.double().numpy())
    with np.errstate(invalid="ignore"):
        want = np.where(
            finite, np.ldexp(np.rint(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent), x.double()
        )
    np.testing.assert_array_equal(got.double().numpy(), want)  # numpy's rint also rounds ties to even


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_round_makes_no_finite_value_infinite(dtype: torch.dtype, bits: int) -> None:
    """For example, the smallest finite value, which is used to mask logits."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest * (1 - 2.0 ** -(bits + 2)), -float("inf")], dtype=dtype)
    got = parse(f"round({bits})").encode(x).double()  # type: ignore[union-attr]
    exponent = int(np.frexp(largest)[1]) - 1
    kept = float(np.ldexp(2 - 2.0**-bits, exponent))
    assert got.tolist() == [kept, -kept, kept, -float("inf")]
    assert abs(kept / largest - 1) <= 2.0 ** -(bits + 1)


@pytest.mark.parametrize(("width", "index_bytes"), [(65_535, 2), (65_536, 2), (65_537, 4)])
def test_indexes_of_topk_take_two_bytes_up_to_a_width_of_65536(width: int, index_bytes: int) -> None:
    x = torch.zeros(2, width)
    x[0, [0, 9, -1]] = torch.tensor([1.0, -2.0, 4.0])
    x[1, [7, -2, -1]] = torch.tensor([3.0, 0.5, -0.25])
    reduction = TopK(3, exact=True)
    stored = reduction.encode(x).numpy()
    assert stored.shape[1] == reduction.stored_width(width, "float32") == -(-3 * index_bytes // 4) * 4 + 12
    kind = np.dtype(f"<u{index_bytes}")
    np.testing.assert_array_equal(
        stored[:, : 3 * index_bytes].copy().view(kind), [[0, 9, width - 1], [7, width - 2, width - 1]]
    )
    np.testing.assert_array_equal(reduction.decode(stored, width, "float32"), x.numpy())


def test_topk_keeps_a_whole_row_and_one_value() -> None:
    """These are the largest and the smallest k."""
    x = rows(6, 40)
    x[1] = 0
    whole, one = TopK(40, exact=True, sample=40), TopK(1, exact=True)
    for reduction in (whole, one):
        reduction.check(40)
    np.testing.assert_array_equal(whole.decode(whole.encode(x).numpy(), 40, "bfloat16"), x.float().numpy())
    places, values = whole.sampled(whole.encode(x).numpy(), 40, "bfloat16")
    np.testing.assert_array_equal(np.sort(places, axis=1), np.tile(np.arange(40), (6, 1)))
    np.testing.assert_array_equal(np.take_along_axis(x.float().numpy(), places, 1), values)
    kept = one.decode(one.encode(x).numpy(), 40, "bfloat16")
    assert np.count_nonzero(kept, axis=1).tolist() == [1, 0, 1, 1, 1, 1]
    np.testing.assert_array_equal(np.abs(kept).max(1), x.abs().amax(1).float().numpy())
    for most in (TopK(MOST), TopK(1, sample=MOST)):
        most.check(MOST)
    with pytest.raises(ReduceError, match="keeps more than the 39 values"):
        TopK(40).check(39)
    with pytest.raises(ReduceError, match="samples more than the 39 values"):
        TopK(1, sample=40).check(39)


@pytest.mark.parametrize("width", [40, 70_000])
@pytest.mark.parametrize("exact", [True, False])
def test_topk_keeps_the_largest_values_and_a_sample_of_the_row(width: int, exact: bool) -> None:
    x = rows(6, width)
    x[3] = x[3].round()  # many ties
    reduction = TopK(8, exact, sample=5)
    stored = reduction.encode(x).numpy()
    assert stored.shape[1] == reduction.stored_width(width, "bfloat16")
    magnitude = np.abs(x.float().numpy())
    want = np.sort(np.argsort(-magnitude, axis=1, kind="stable")[:, :8])
    np.testing.assert_array_equal(reduction.indexes(stored, width), want)
    got = np.take_along_axis(reduction.decode(stored, width, "bfloat16"), want, 1)
    kept = np.take_along_axis(x.float().numpy(), want, 1)
    allowed = np.zeros((6, 1)) if exact else magnitude.max(1, keepdims=True) / 127 * 0.5001
    assert (np.abs(got - kept) <= allowed).all()
    places, values = reduction.sampled(stored, width, "bfloat16")
    np.testing.assert_array_equal(np.diff(places, axis=1) % width, width // 5)
    taken = np.take_along_axis(x.float().numpy(), places, 1)
    known = np.abs(taken) > np.abs(kept).min(1, keepdims=True)
    largest = np.where(known, 0, np.abs(taken)).max(1, keepdims=True)
    if not exact:
        taken = np.clip(taken, -largest, largest)
    assert (np.abs(values - taken) <= (0 if exact else largest / 127 * 0.5001)).all()


def test_the_sample_takes_each_place_equally_often() -> None:
    """This also holds if all rows are equal, or if the same neurons are always the largest. Means are then correct."""
    tokens, width = 20_000, 96
    same = torch.randn(1, width, generator=torch.Generator().manual_seed(4)).bfloat16().expand(tokens, width)
    places, _ = TopK(8, sample=4).sampled(TopK(8, sample=4).encode(same).numpy(), width, "bfloat16")
    counts, expected = np.bincount(places.ravel(), minlength=width), tokens * 4 / width
    assert np.abs(counts / expected - 1).max() < 0.2, counts
    scales = torch.linspace(0.5, 1.5, width).index_fill(0, torch.arange(8), 50)
    x = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(3)) * scales).bfloat16()
    reduction = TopK(8, sample=4)
    stored = reduction.encode(x).numpy()
    places, _ = reduction.sampled(stored, width, "bfloat16")
    counts = np.bincount(places.ravel(), minlength=width)
    assert ((counts - expected) ** 2 / expected).sum() < 2 * width, counts
    tally = reduction.tally(stored, width, "bfloat16")
    np.testing.assert_array_equal(tally.kept_rows[:8] > 0.9 * tokens, True)
    np.testing.assert_allclose(tally.mean(), np.abs(x.float().numpy()).mean(0), rtol=0.12)
    without = TopK(8).tally(TopK(8).encode(x).numpy(), width, "bfloat16")
    assert without.mean()[8:].max() < 0.2 * tally.mean()[8:].min(), (
        "without a sample, the means of these neurons must be unknown"
    )


def test_topk_of_slices_is_topk_of_the_whole() -> None:
    x = rows(5, 64, torch.float32, seed=3)
    reduction = TopK(8, exact=True)
    parts = [reduction.decode(reduction.encode(p).numpy(), 32, "float32") for p in x.split(32, 1)]
    np.testing.assert_array_equal(reduction.merge(parts), roundtrip(reduction, x))


@pytest.mark.parametrize("exact", [True, False])
def test_a_nan_in_one_slice_is_read_as_of_the_whole_row(exact: bool) -> None:
    x = rows(6, 64, torch.float32, seed=3)
    x[1, 40], x[2, 3], x[3, 50] = float("nan"), float("-inf"), float("inf")
    x[4, [3, 50]] = torch.tensor([float("inf"), float("nan")])
    reduction = TopK(8, exact, sample=2)
    stored = [reduction.encode(p).numpy() for p in x.split(32, 1)]
    got = reduction.merge([reduction.decode(p, 32, "float32") for p in stored])
    want = roundtrip(reduction, x)
    if exact:
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.isnan(got).any(1), np.isnan(want).any(1))
    tally, finite = reduction.tally_slices(stored, 32, "float32"), [0, 5]
    good = reduction.tally_slices([p[finite] for p in stored], 32, "float32")
    for name, value in vars(good).items():
        np.testing.assert_array_equal(getattr(tally, name), value, err_msg=name)
    assert tally.rows == 2


def test_orthogonal_projections_have_orthogonal_columns_spread_over_a_row() -> None:
    basis = matrix(256, 64, 5, "orthogonal").astype(np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.eye(64) * 4, atol=0.02)  # the numbers are bfloat16
    whole = matrix(64, 64, 0, "orthogonal").astype(np.float64)
    np.testing.assert_allclose(whole @ whole.T, np.eye(64), atol=0.01)
    counts = sum((np.abs(matrix(96, 12, seed, "orthogonal")) > 0.05).sum(0) for seed in range(4))
    assert counts.min() > 200, "columns must be spread over the row"
    x = np.zeros((1, 2560), np.float32)
    x[0, 7] = 1
    norms = [np.linalg.norm(x @ matrix(2560, 512, seed, "orthogonal")) for seed in range(8)]
    assert np.abs(np.array(norms) - 1).max() < 0.1, "the norm of a single large value must be kept"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_projections_nearly_keep_angles_and_lengths(distribution: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, generator=generator) @ torch.randn(20, 2560, generator=generator)
    reduction = RandomProjection(512, distribution=distribution)
    y = roundtrip(reduction, x)
    exact = x.numpy()

    def cosines(v: np.ndarray) -> np.ndarray:
        unit = v / np.linalg.norm(v, axis=1, keepdims=True)
        return (unit @ unit.T)[np.triu_indices(len(v), 1)]

    assert np.corrcoef(cosines(y), cosines(exact))[0, 1] >= 0.97
    assert np.abs(np.linalg.norm(y, axis=1) / np.linalg.norm(exact, axis=1) - 1).max() < 0.15
    direction = exact[0] + exact[1]
    assert np.corrcoef(y @ reduction.project(direction), exact @ direction)[0, 1] >= 0.95


def test_a_projection_of_heads_keeps_each_head_by_itself() -> None:
    """It keeps norms of heads, and products of heads of two rows. Several ranks project as one rank does."""
    reduction, heads, size = RandomProjection(48, group=64), 6, 64
    x = torch.randn(40, heads * size, generator=torch.Generator().manual_seed(0))
    x.view(40, heads, size)[:, 2] *= 10
    y, exact = roundtrip(reduction, x), x.numpy().reshape(40, heads, size)
    assert y.shape == (40, heads * 48)
    mine = y.reshape(40, heads, 48)
    basis = matrix(size, 48, 0, "orthogonal")
    step = np.abs(exact @ basis).max((1, 2), keepdims=True) / 127
    assert (np.abs(mine - exact @ basis) <= 0.51 * step).all()
    for head in range(heads):
        products = [part[:, head] @ part[:, head].T for part in (exact, mine)]
        assert np.corrcoef(*(p[np.triu_indices(40, 1)] for p in products))[0, 1] > 0.8, head
    np.testing.assert_allclose(reduction.project(x[3].numpy()), (exact[3] @ basis).ravel(), rtol=1e-5)
    whole, halves = (reduction.project(x[3].numpy(), shards=shards) for shards in (1, 2))
    np.testing.assert_allclose(halves, whole, rtol=1e-5, atol=1e-6)
    layers = reduction.before_layers(x.view(20, 2, -1), [0, 1])
    np.testing.assert_allclose(layers.reshape(40, -1), reduction.before(x), rtol=1e-6)
    reduction.check(128)
    for width, k in ((100, 48), (32, 48), (128, 65)):
        with pytest.raises(ReduceError, match=f"group=64.* does not fit the {width} values of a row"):
            RandomProjection(k, group=64).check(width)


def test_settings_of_projections_without_groups_are_as_before() -> None:
    """Readers that do not support groups can open these stores."""
    assert RandomProjection(9).settings() == {"kind": "rp", "k": 9, "seed": 0, "distribution": "orthogonal"}
    assert parse("rp(9,group=64)").settings()["group"] == 64  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [2560, 2500])
def test_a_sketch_sums_each_dimension_in_one_bucket(width: int) -> None:
    """The reference is a matrix with one 1 or -1 in each row. Directions are projected in the same way."""
    reduction, k = parse("cs(512,exact,seed=3)"), 512
    assert isinstance(reduction, CountSketch)
    basis = _dense(width, k, 3)
    counts = np.abs(basis).sum(0)
    assert (
        (np.abs(basis).sum(1) == 1).all() and counts.max() - counts.min() <= 1 and 0.4 < (basis > 0).sum() / width < 0.6
    )
    x = torch.randn(60, 20, generator=torch.Generator().manual_seed(0)) @ torch.randn(20, width)
    exact, y = x.numpy(), roundtrip(reduction, x)
    np.testing.assert_allclose(y, exact @ basis, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(reduction.project(exact[3]), exact[3] @ basis, rtol=1e-4, atol=1e-4)
    halves = np.concatenate([half @ _dense(width // 2, k, 3) for half in np.split(exact[3], 2)])
    np.testing.assert_allclose(reduction.project(exact[3], shards=2), halves, rtol=1e-4, atol=1e-4)
    assert np.abs(np.linalg.norm(y, axis=1) / np.linalg.norm(exact, axis=1) - 1).max() < 0.15
    rounded = roundtrip(CountSketch(k, 3), x)
    assert (np.abs(rounded - y) <= 0.51 * np.abs(y).max(1, keepdims=True) / 127).all()


def test_a_value_that_is_not_finite_is_lost_in_its_bucket_alone() -> None:
    """This also holds if buckets are padded."""
    x = torch.ones(50, 50)
    x.fill_diagonal_(float("inf"))
    y = roundtrip(CountSketch(16, exact=True), x)
    assert (np.isfinite(y).sum(1) == 15).all()


def _dense(width: int, k: int, seed: int) -> np.ndarray:
    order, signs = table(width, k, seed)
    basis = np.zeros((width, k), np.float32)
    basis[order, np.arange(width) % k] = signs
    return basis


def test_sketches_never_change() -> None:
    """Old stores depend on them."""
    order, signs = table(12, 4, 7)
    assert (order.tolist(), signs.astype(int).tolist()) == SKETCH
    assert not np.array_equal(table(12, 4, 8)[0], order)


def test_projection_matrices_never_change() -> None:
    """Old stores depend on them."""
    import hashlib

    def digest(*args: int, distribution: str) -> str:
        return hashlib.sha256(matrix(*args, distribution).tobytes()).hexdigest()[:16]  # type: ignore[arg-type]

    assert digest(64, 16, 0, distribution="gaussian") != digest(64, 16, 1, distribution="gaussian")
    assert matrix(2560, 512, 0, "gaussian").var() == pytest.approx(1 / 512, rel=0.01)
    assert matrix(2560, 512, 0, "sign").var() == pytest.approx(1 / 512, rel=0.01)
    assert [digest(64, 16, 7, distribution=d) for d in DISTRIBUTIONS] == DIGESTS


SKETCH = ([0, 8, 6, 10, 11, 5, 9, 4, 2, 3, 7, 1], [1, -1, 1, -1, -1, 1, 1, -1, 1, -1, 1, 1])
DIGESTS = ["955a41009337fc32", "2961c6e7fcac72b7", "078c1c37c0023d58"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int4", "'int4' is unknown; use one of none, int8"),
        ("none(3)", r"'none\(3\)' is not valid; none takes no brackets, write 'none'"),
        ("full8()", "full8 takes no brackets, write 'full8'"),
        ("topk", None),
        ("topk(0)", "keep 1 value or more"),
        ("topk(k)", r"'k' in 'topk\(k\)' is unknown; topk takes exact, int8, a number \(k\), sample=NUMBER"),
        ("topk(8,sample=2000000)", "use at most 1048575 for both"),
        ("topk(64,32)", r"'topk\(64,32\)' sets k twice; leave '32' out"),
        ("topk(8,exact,int8)", "sets exact twice; leave 'int8' out"),
        (f"topk({'9' * 5000})", "is unknown; topk takes"),
        ("int8(4)", "the group size must be one of"),
        ("int8(32,affine)", "groups are symmetric"),
        ("fp8(4)", "fp8 takes no"),
        ("fp8(big)", "fp8 takes nothing"),
        ("round(99)", "1 to 23 mantissa bits"),
        ("rp(4,cauchy)", "'cauchy' in"),
        ("rp(4", "not valid"),
        ("cs(0)", r"cs\(0\) is not valid; project to 1 value or more"),
        ("cs(4,gaussian)", "'gaussian' in"),
        ("attn(0)", "keep 1 to 64 positions"),
        ("attn(few)", r"attn takes half, a number \(m\)"),
        (7, "not valid"),
    ],
)
def test_bad_reduction_specs_are_refused(spec: str, message: str | None) -> None:
    if message is None:
        assert parse(spec) == TopK(64, sample=16)
        return
    with pytest.raises(ReduceError, match=message):
        parse(spec)


@pytest.mark.parametrize("spec", ["topk(65)", "rp(65)", "cs(65)"])
def test_a_reduction_wider_than_the_row_is_refused(spec: str) -> None:
    reduction = parse(spec)
    assert reduction is not None
    with pytest.raises(ReduceError, match="the 64 values of a row; give a smaller k"):
        reduction.check(64)


def test_layers_that_are_projected_together_equal_each_alone() -> None:
    """In bfloat16 too, which has its own implementation only on a GPU."""
    x = rows(12, 30, torch.bfloat16).view(6, 2, 30) / 1e6
    reduction = parse("rp(4)")
    assert isinstance(reduction, RandomProjection)
    reduction.prepare(30, x.device, 0, 0)
    together = reduction.before_layers(x, [3, 5])
    assert together.shape == (6, 2, 4) and together.dtype == torch.float32
    for i in range(2):
        alone = x[:, i].float() @ torch.tensor(matrix(30, 4, reduction.seed, reduction.distribution))
        torch.testing.assert_close(reduction.before(x[:, i]), alone)
        torch.testing.assert_close(together[:, i], alone)
        torch.testing.assert_close(reduction.encode(x[:, i]), Int8().encode(alone))


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 16), ("float16", 16 + 120 + 60), ("float32", 16 + 240)])
def test_a_projection_needs_room_for_its_products_and_copies(dtype: str, nbytes: int) -> None:
    """Bytes per row of 30 values: 4 products in float32, the values in float32, and a copy that joins layers."""
    reduction = parse("rp(4)")
    assert reduction is not None and reduction.scratch(30, dtype) == nbytes


# ---- principal components ---------------------------------------------------------------------------------------


def structured(tokens: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows with a mean and a decreasing spectrum."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(width, width)))[0]
    return (rng.normal(size=(tokens, width)) * 0.8 ** np.arange(width) @ basis + 3).astype(np.float32)


@pytest.fixture
def basis_file(tmp_path: Path) -> Path:
    part, _ = fit([structured(300, 32)[:100], structured(300, 32)[100:]], 8)
    about = {"hooks": {"mlp_out": {"width": 32, "k": 8, "layers": [2]}}}
    save_file(basis_tensors("mlp_out.2", part), tmp_path / "b (1).safetensors", metadata={METADATA: json.dumps(about)})
    return tmp_path / "b (1).safetensors"


def test_a_fit_in_blocks_equals_a_fit_of_all_rows() -> None:
    x = structured(300, 32)
    part, variance = fit((x[i : i + 7] for i in range(0, 300, 7)), 8)
    values, vectors = np.linalg.eigh(np.cov(x.astype(np.float64).T))
    np.testing.assert_allclose(part.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(part.std**2, values[::-1][:8], rtol=1e-4)
    np.testing.assert_allclose(np.abs((part.components * vectors[:, ::-1][:, :8]).sum(0)), 1, atol=1e-4)
    assert abs(variance / values.sum() - 1) < 1e-5
    with pytest.raises(ValueError, match="8 rows are too few for rank 8"):
        fit([x[:8]], 8)
    with pytest.raises(ValueError, match="rank 33 is more than the 32 values"):
        fit([x], 33)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_no_basis_is_made_of_values_that_are_not_finite(value: float) -> None:
    x = structured(300, 32)
    x[7, 3] = value
    with pytest.raises(ValueError, match="values that are not finite, or too large for float32"):
        fit([x], 8)


@pytest.mark.parametrize("tensor", ["mean", "components", "std", "variance"])
@pytest.mark.parametrize("damage", ["not finite", "another shape", "missing"])
def test_a_basis_with_a_damaged_tensor_is_refused(basis_file: Path, tmp_path: Path, tensor: str, damage: str) -> None:
    tensors = load_file(basis_file)
    good = tensors.pop(f"mlp_out.2.{tensor}")
    if damage == "not finite":
        good.flat[-1] = np.nan
    if damage != "missing":
        tensors[f"mlp_out.2.{tensor}"] = good if damage == "not finite" else np.concatenate([good, good])
    about = {"hooks": {"mlp_out": {"width": 32, "k": 8, "layers": [2]}}}
    save_file(tensors, tmp_path / "bad.safetensors", metadata={METADATA: json.dumps(about)})
    with pytest.raises(ReduceError, match=rf"mlp_out\.2\.{tensor} has to be [\d x]* finite float32 numbers; make it"):
        parse(f"pca({tmp_path / 'bad.safetensors'})")


@pytest.mark.parametrize("shards", [1, 2])
def test_pca_scores_are_those_of_the_basis_and_restore_rows(basis_file: Path, shards: int) -> None:
    reduction = parse(f"pca({basis_file})")
    assert isinstance(reduction, Pca)
    bound = reduction.bind("mlp_out", [2], 32 // shards, shards)
    assert from_settings(bound.settings()) == bound and "source" not in bound.settings()
    x, part = structured(40, 32, seed=5), Basis.load(basis_file).of("mlp_out", 2, 8)
    parts = []
    for shard in range(shards):
        bound.prepare(32 // shards, torch.device("cpu"), 2, shard)
        mine = torch.from_numpy(np.split(x, shards, 1)[shard].copy())
        stored = bound.encode(mine, 2)
        assert stored.shape == (40, bound.stored_width(32 // shards, "float32"))
        parts.append(bound.decode(stored.numpy(), 32 // shards, "float32"))
    scores = bound.merge(parts)
    exact = (x - part.mean) @ part.components / part.std
    assert np.abs(scores - exact).max() < 0.02 * np.abs(exact).max() * shards
    best = (x - part.mean) @ part.components @ part.components.T + part.mean
    assert np.abs(bound.restore(scores, part) - best).max() < 0.05 * np.abs(best).max()


@pytest.fixture(scope="module")
def heads_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A basis file with 3 components for each 8 of 32 values."""
    basis, _ = fit([structured(300, 32)], 3, 8)
    tensors = basis_tensors("z.2", basis)
    about = {"hooks": {"z": {"width": 32, "k": 3, "group": 8, "layers": [2]}}}
    path = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    save_file(tensors, path, metadata={METADATA: json.dumps(about)})
    return path


def test_each_group_has_the_components_of_its_values_alone() -> None:
    x = structured(300, 32)
    both, variance = fit([x[:100], x[100:]], 3, 8)
    assert both.groups == 4 and both.components.shape == (32, 3) and both.std.shape == (12,)
    alone = [fit([part[:100], part[100:]], 3) for part in np.split(x, 4, 1)]
    assert variance == pytest.approx(sum(found for _, found in alone))
    for name in ("mean", "components", "std"):
        joined = np.concatenate([getattr(part, name) for part, _ in alone])
        np.testing.assert_allclose(getattr(both, name), joined, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="rank 9 is more than the 8 values of a group"):
        fit([x], 9, 8)
    with pytest.raises(ValueError, match="--group 7 does not divide the 32 values of a row"):
        fit([x], 3, 7)


@pytest.mark.parametrize(("shards", "k"), [(1, 3), (2, 3), (4, 2)])
def test_pca_of_heads_keeps_the_components_of_each(heads_file: Path, shards: int, k: int) -> None:
    """This holds for any number of ranks. Their slices have whole heads."""
    reduction = parse(f"pca({heads_file}, k={k})")
    assert isinstance(reduction, Pca)
    bound = reduction.bind("z", [2], 32 // shards, shards)
    assert from_settings(bound.settings()) == bound and (bound.group, bound.k) == (8, k)
    x, parts = structured(40, 32, seed=5), []
    for shard in range(shards):
        bound.prepare(32 // shards, torch.device("cpu"), 2, shard)
        mine = torch.from_numpy(np.split(x, shards, 1)[shard].copy())
        stored = bound.encode(mine, 2)
        assert stored.shape == (40, bound.stored_width(32 // shards, "float32"))
        layers = bound.before_layers(torch.stack([mine, mine], 1), [2, 2])
        assert torch.equal(layers[:, 1], bound.before(mine, 2))
        parts.append(bound.decode(stored.numpy(), 32 // shards, "float32"))
    scores, part = bound.merge(parts), Basis.load(heads_file).of("z", 2, k)
    assert scores.shape == (40, 4 * k)
    direction, restored, projected = structured(1, 32, seed=6)[0], bound.restore(scores, part), 0
    for head in range(4):
        mine, to = slice(8 * head, 8 * head + 8), slice(k * head, k * head + k)
        components, std = part.components[mine], part.std[to]
        exact = (x[:, mine] - part.mean[mine]) @ components / std
        assert np.abs(scores[:, to] - exact).max() < 0.02 * np.abs(exact).max() * 2
        best = scores[:, to] * std @ components.T + part.mean[mine]
        np.testing.assert_allclose(restored[:, mine], best, rtol=1e-4, atol=1e-5)
        projected = projected + scores[:, to] * std @ components.T @ direction[mine]
    np.testing.assert_allclose(scores @ bound.project(direction, part), projected, rtol=1e-3, atol=1e-4)


def test_slices_that_cut_a_head_are_refused(heads_file: Path) -> None:
    reduction = parse(f"pca({heads_file})")
    assert reduction is not None
    with pytest.raises(ReduceError, match="for each 8 values of z, which 8 tensor-parallel slices would cut; fit it"):
        reduction.bind("z", [2], 4, 8)


def test_bases_that_do_not_fit_are_refused(basis_file: Path, tmp_path: Path) -> None:
    reduction = parse(f"pca({basis_file}, k=5)")
    assert isinstance(reduction, Pca) and reduction.bind("mlp_out", [2], 32, 1).k == 5
    for hook, layers, width, spec, message in (
        ("q", [2], 32, "", "holds no basis of q, only of mlp_out"),
        ("mlp_out", [1, 2], 32, "", "no basis of mlp_out in layer 1"),
        ("mlp_out", [2], 64, "", "of another model: mlp_out has 64 values, not 32"),
        ("mlp_out", [2], 32, ", k=9", "k=9\\) of mlp_out: only 8 components were fitted; give a smaller k"),
    ):
        with pytest.raises(ReduceError, match=message):
            parse(f"pca({basis_file}{spec})").bind(hook, layers, width, 1)  # type: ignore[union-attr]
    with pytest.raises(ReduceError, match=r"cannot be read .No such file"):
        parse("pca(nowhere.safetensors)")
    (tmp_path / "text").write_text("{}")
    with pytest.raises(ReduceError, match="holds no basis"):
        parse(f"pca({tmp_path / 'text'})")
    for rest in ("rank=3", f"k={'9' * 5000}"):  # Python refuses to convert more than 4300 digits
        with pytest.raises(ReduceError, match=rf"'{rest}' in .* is unknown"):
            parse(f"pca({basis_file}, {rest})")


@pytest.mark.parametrize(("width", "k"), [(0, 0), (4, 0), (4, 5)])
def test_a_basis_of_an_impossible_size_is_refused(width: int, k: int, tmp_path: Path) -> None:
    shapes = {"mean": (width,), "components": (width, k), "std": (k,), "variance": (1,)}
    tensors = {f"q.0.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    about = {"hooks": {"q": {"width": width, "k": k, "layers": [0]}}}
    save_file(tensors, tmp_path / "basis", metadata={METADATA: json.dumps(about)})
    with pytest.raises(ReduceError, match=f"holds no basis .*{k} components of groups of {width} of {width} values"):
        Basis.load(tmp_path / "basis")


@pytest.mark.parametrize("spec", ["int8", "int8(affine)", "int8(16)", "fp8", "topk(4)", "topk(4, sample=2)", "rp(4)"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.filterwarnings("error")
def test_decoding_a_row_that_is_not_finite_gives_nan_without_a_warning(spec: str, value: float) -> None:
    reduction = parse(spec)
    assert reduction is not None
    reduction = reduction.bind("mlp_post", [0], 16, 1)
    rows = torch.arange(48.0).reshape(3, 16) - 20
    rows[1, 3] = value
    reduction.prepare(16, torch.device("cpu"), 0, 0)
    stored = reduction.encode(rows).numpy()
    decoded = reduction.decode(stored, 16, "float32")
    assert np.isnan(decoded).any(1).tolist() == [False, True, False] and not np.isinf(decoded).any()
    if isinstance(reduction, TopK):
        assert reduction.tally(stored, 16, "float32").rows == 2


def test_settings_of_attention_summaries_name_halves_only_where_they_are_kept() -> None:
    """Stores of earlier versions have no "half"."""
    assert AttentionSummary(5).settings() == {"kind": "attn", "m": 5}
    assert AttentionSummary(5, half=True).settings() == {"kind": "attn", "m": 5, "half": True}
    for half in (False, True):
        assert from_settings(AttentionSummary(5, half=half).settings()) == AttentionSummary(5, half=half)


@pytest.mark.parametrize(
    ("bits", "dtype", "kernel"),
    [
        (4, "bfloat16", ("round", 3)),
        (7, "bfloat16", ("copy", 0)),
        (4, "float16", ("round", 6)),
        (23, "float16", ("copy", 0)),
    ],
)
def test_rounding_drops_bits_only_of_dtypes_that_have_more(bits: int, dtype: str, kernel: tuple[str, int]) -> None:
    reduction = parse(f"round({bits})")
    assert reduction is not None and reduction.fused(dtype) == kernel


def test_only_reductions_without_a_kernel_need_room_for_copies() -> None:
    class Plain(Int8):
        def fused(self, dtype: str) -> None:  # type: ignore[override]
            return None

    assert Reduction.scratch(Plain(), 10, "bfloat16") == 160
    assert Int8().fused("bfloat16") is not None and Reduction.scratch(Int8(), 10, "bfloat16") == 0


@pytest.mark.parametrize(
    ("k", "group", "fits"), [(8, 8, True), (9, 8, False), (0, 8, False), (32, 0, True), (3, 7, False)]
)
def test_a_basis_has_at_most_as_many_components_as_values(k: int, group: int, fits: bool) -> None:
    about = {"width": 32, "k": k, "group": group}
    if not fits:
        with pytest.raises(ValueError, match=f"{k} components of groups of {group} of 32 values"):
            Basis.shapes(about)
        return
    assert Basis.shapes(about)["components"] == (32, k)
