# SPDX-License-Identifier: Apache-2.0
"""pq(file): from `dmi fit-pq` to decoded values."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.analysis.fidelity import fidelity
from dmi_connector.analysis.fit_pq import k_means
from dmi_connector.analysis.importance import importance
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import ReduceError, from_settings, parse
from dmi_connector.reduce.codebooks import Codebooks
from dmi_connector.reduce.pq import ProductQuantisation
from dmi_connector.reduce.scales import Scales
from dmi_connector.store.read.verify import verify_store
from tests import fittedkit
from tests import storekit as kit

WIDTH, TOKENS, LAYERS = 48, 400, (1, 4)
PARTS = {8: 12, 4: 6}
"""{bits per code: sub-vectors per row}."""


def rows(seed: int, layers: int = 2) -> np.ndarray:
    """Rows, float32 [layers, TOKENS, WIDTH], each close to one of 40 centres."""
    centres = np.random.default_rng(7).normal(size=(2, 40, WIDTH))[:layers]
    draw = np.random.default_rng(seed)
    found = centres[:, draw.integers(0, 40, TOKENS)] + 0.02 * draw.normal(size=(layers, TOKENS, WIDTH))
    return found.astype(np.float32)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores with unreduced mlp_out."""
    folder, owner = tmp_path_factory.mktemp("full"), kit.Store(4 << 20)
    spec = ArraySpec("mlp_out", "float32", LAYERS, WIDTH)
    for seed in range(2):
        owner.write(
            folder / f"{seed}.zarr", [spec], TOKENS, values={"mlp_out": kit.bits(rows(seed))}, attrs={"num_layers": 6}
        )
    assert owner.shutdown(kit.PATIENCE)
    return [folder / f"{seed}.zarr" for seed in range(2)]


@pytest.fixture(scope="module")
def books(full: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """{bits per code: file of codebooks}."""
    folder = tmp_path_factory.mktemp("books")
    for bits, parts in PARTS.items():
        words = ["--hook", "mlp_out", "--subvectors", str(parts), "--bits", str(bits)]
        assert main(["fit-pq", *map(str, full), *words, "-o", str(folder / f"{bits}.safetensors")]) == 0
    return {bits: folder / f"{bits}.safetensors" for bits in PARTS}


def bound(path: Path, shards: int = 1) -> ProductQuantisation:
    reduction = parse(f"pq({path})")
    assert isinstance(reduction, ProductQuantisation)
    return reduction.bind("mlp_out", LAYERS, WIDTH // shards, shards)


def store(path: Path, books: Path, values: np.ndarray, shards: int = 1) -> ProductQuantisation:
    """Write a store of mlp_out, and copy the codebooks next to it."""
    reduction = bound(books, shards)
    fittedkit.write(path, reduction, values, LAYERS, shards)
    return reduction


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", "0", "has sub-vectors of 0 values and codes of 8 bits"),
        ("bits", "5", "has sub-vectors of 4 values and codes of 5 bits"),
        ("size", "6", "has 8 sub-vectors, its codebooks 12"),
    ],
)
def test_damaged_settings_are_named(
    books: dict[int, Path], tmp_path: Path, name: str, value: str, message: str
) -> None:
    """Somebody may have changed the store, or it may be damaged."""
    store(tmp_path / "a.zarr", books[8], rows(9))
    document = tmp_path / "a.zarr/zarr.json"
    text = document.read_text()
    changed = re.sub(rf'"{name}": ?\d+', f'"{name}": {value}', text)
    assert changed != text
    document.write_text(changed)
    with pytest.raises(ReduceError, match=f"reduction pq {message}; the store is damaged"):
        open_capture(tmp_path / "a.zarr", 0).numpy("mlp_out")
    [problem] = verify_store(tmp_path / "a.zarr")
    assert problem.where == "zarr.json" and problem.damage


def nearest(values: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Rows [tokens, width] with each sub-vector replaced by its nearest centroid, in float64."""
    cut = values.reshape(len(values), len(centroids), 1, -1).astype(np.float64)
    chosen = ((cut - centroids) ** 2).sum(-1).argmin(-1)
    return centroids[np.arange(len(centroids)), chosen].reshape(values.shape)


@pytest.mark.parametrize("bits", PARTS)
def test_sub_vectors_are_read_as_their_nearest_centroids(books: dict[int, Path], tmp_path: Path, bits: int) -> None:
    exact = rows(9)
    reduction = store(tmp_path / "a.zarr", books[bits], exact)
    capture = open_capture(tmp_path / "a.zarr", timeout=0)
    assert verify_store(tmp_path / "a.zarr") == []
    info = capture.attrs["hooks"]["mlp_out"]
    assert info["width"] == {8: 12, 4: 4}[bits] and info["reduce"]["sha256"] == Codebooks.load(books[bits]).sha256
    settings = {name: value for name, value in info["reduce"].items() if name not in ("dtype", "width")}
    assert capture.reduction("mlp_out") == from_settings(settings) == reduction and "source" not in settings
    got = capture.numpy("mlp_out")
    assert got.shape == exact.shape == capture.shape("mlp_out") and got.dtype == np.float32
    for number, layer in enumerate(LAYERS):
        want = nearest(exact[number], Codebooks.load(books[bits]).of("mlp_out", layer))
        cut = [x.reshape(TOKENS, PARTS[bits], -1) for x in (exact[number], got[number], want)]
        far, least = (((cut[0] - x) ** 2).sum(-1) for x in cut[1:])
        assert (far <= least + 2**-20 * (cut[0] ** 2).sum(-1)).all(), (
            "sub-vectors must be nearest centroids within the rounding of float32"
        )
        assert (got[number] == want).mean() > 0.99
    np.testing.assert_array_equal(capture.numpy("mlp_out", 4, slice(3, 9)), got[1, 3:9])
    np.testing.assert_allclose(importance([capture], "mlp_out", 4), np.abs(got[1]).mean(0), rtol=1e-5)
    if bits == 8:
        assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.05, (
            "rows must be decoded closely, because each is close to one of 40 centres"
        )


def test_the_content_of_a_file_is_what_the_file_is(books: dict[int, Path], tmp_path: Path) -> None:
    """An object store returns only the content."""
    path, content = books[8], books[8].read_bytes()
    found = Codebooks.parse(content, "s3://bucket/books")
    assert found == replace(Codebooks.load(path), path="s3://bucket/books")
    np.testing.assert_array_equal(found.of("mlp_out", 4), Codebooks.load(path).of("mlp_out", 4))
    with pytest.raises(ReduceError, match=r"s3.* holds no codebooks .*; give a file that dmi fit-pq made"):
        Codebooks.parse(content[:100], "s3://bucket/books")
    with pytest.raises(ReduceError, match=r"holds no scales .*KeyError"):
        Scales.load(path)


@pytest.mark.parametrize("bits", PARTS)
def test_two_ranks_read_as_one(books: dict[int, Path], tmp_path: Path, bits: int) -> None:
    store(tmp_path / "one.zarr", books[bits], rows(9))
    store(tmp_path / "two.zarr", books[bits], rows(9), shards=2)
    two = open_capture(tmp_path / "two.zarr", timeout=0)
    two.attrs["hooks"]["mlp_out"]["shards"] = 2
    np.testing.assert_array_equal(two.numpy("mlp_out"), open_capture(tmp_path / "one.zarr", timeout=0).numpy("mlp_out"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", PARTS)
def test_a_sub_vector_that_is_not_finite_reads_as_nan(
    books: dict[int, Path], tmp_path: Path, bits: int, value: float
) -> None:
    values, size = rows(9), WIDTH // PARTS[bits]
    store(tmp_path / "a.zarr", books[bits], values)
    values[1, 2, size + 1] = value
    store(tmp_path / "b.zarr", books[bits], values)
    before, got = (open_capture(tmp_path / name, timeout=0).numpy("mlp_out") for name in ("a.zarr", "b.zarr"))
    lost = np.zeros(before.shape, bool)
    lost[1, 2, size : 2 * size] = True
    np.testing.assert_array_equal(np.isnan(got), lost)
    np.testing.assert_array_equal(got[~lost], before[~lost])
    assert main(["verify", str(tmp_path / "b.zarr")]) == 3


def test_k_means_finds_the_groups_that_there_are() -> None:
    """This also holds if the first centroids are all in one group and rows repeat."""
    draw = np.random.default_rng(3)
    centres = 10 * draw.normal(size=(3, 2, 5)).astype(np.float32)
    group = np.repeat(np.arange(3), (400, 20, 20))
    x = centres[group] + 0.01 * draw.normal(size=(440, 2, 5)).astype(np.float32)
    found, error = k_means(x, 3)
    for part in range(2):
        gaps = np.abs(found[part][:, None] - centres[:, part]).max(-1)
        assert (gaps.min(0) < 0.02).all() and sorted(gaps.argmin(0)) == [0, 1, 2]
    assert error == pytest.approx(
        sum(((x[:, p] - nearest(x[:, p], found[p][None])) ** 2).sum() for p in (0, 1)), rel=0.01
    )
    again, _ = k_means(x, 3)
    np.testing.assert_array_equal(found, again)
    same, none = k_means(np.ones((300, 2, 5), np.float32), 255)
    assert none == 0 and (same == 1).all()


def test_fidelity_measures_it(full: list[Path], books: dict[int, Path]) -> None:
    eight, four = fidelity(full, [f"pq({books[8]})", f"pq({books[4]})"], "mlp_out", [4])
    assert eight.size == 12 / (4 * WIDTH) and four.size == 4 / (4 * WIDTH)
    assert eight.measures["cosine_median"] > 0.99 > four.measures["cosine_median"] > 0.3


def test_codebooks_that_do_not_fit_are_refused(books: dict[int, Path], tmp_path: Path) -> None:
    reduction = parse(f"pq({books[8]})")
    assert reduction is not None
    for hook, layers, width, shards, message in (
        ("q", [1], WIDTH, 1, "holds no codebooks of q, only of mlp_out; fit q with dmi fit-pq"),
        ("mlp_out", [1, 2], WIDTH, 1, "no codebooks of mlp_out in layer 2; fit it for this layer too"),
        ("mlp_out", [1], 60, 1, "of another model: mlp_out has 60 values, not 48"),
        ("mlp_out", [1], 6, 8, "into 12 sub-vectors, which 8 tensor-parallel slices cannot share; fit it with"),
    ):
        with pytest.raises(ReduceError, match=message):
            reduction.bind(hook, layers, width, shards)
    (tmp_path / "text").write_text("{}")
    for spec, message in (
        ("pq", "pq names no codebooks; give their file, as in pq.FILE."),
        ("pq(nowhere)", "pq.nowhere. cannot be read .No such file.*; give a file that dmi fit-pq made"),
        (f"pq({tmp_path}/text)", "holds no codebooks .*; give a file that dmi fit-pq made"),
    ):
        with pytest.raises(ReduceError, match=message):
            parse(spec)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--subvectors", "7"], "--subvectors 7 does not divide the 48 values of mlp_out; give a divisor"),
        (["--subvectors", "0"], "--subvectors 0 is not valid"),
        (["--subvectors", "12", "--bits", "5"], "--bits 5 is not valid; give 4 or 8"),
        (["--subvectors", "12", "--rows", "254"], "--rows 254 is fewer than the 255 centroids of --bits 8"),
        (["--subvectors", "12", "--layer", "9"], "layer 9"),
    ],
)
def test_fits_that_cannot_be_made_are_refused(
    full: list[Path], tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit-pq", *map(str, full), "--hook", "mlp_out", *words]
    assert main([*command, "-o", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not list(tmp_path.iterdir())


def test_fewer_rows_than_centroids_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = kit.Store(4 << 20)
    spec = ArraySpec("mlp_out", "float32", LAYERS, WIDTH)
    owner.write(tmp_path / "a.zarr", [spec], 20, values={"mlp_out": kit.bits(rows(0)[:, :20])}, attrs={"num_layers": 6})
    assert owner.shutdown(kit.PATIENCE)
    command = ["fit-pq", str(tmp_path / "a.zarr"), "--hook", "mlp_out", "--subvectors", "12", "-o", str(tmp_path / "x")]
    assert main(command) == 2
    assert "20 rows of mlp_out are fewer than the 255 centroids of --bits 8; capture more" in capsys.readouterr().err
    assert main([*command, "--bits", "4"]) == 0
