# SPDX-License-Identifier: Apache-2.0
"""rp(k,channel=file): from `dmi fit-scales --project` to decoded float values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.analysis.fidelity import fidelity
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import ReduceError, from_settings, parse
from dmi_connector.reduce.channel_projection import ChannelProjection
from dmi_connector.reduce.projection import RandomProjection
from dmi_connector.reduce.scales import STEPS, Scales
from dmi_connector.store.read.verify import verify_store
from tests import fittedkit
from tests import storekit as kit

WIDTH, TOKENS, LAYERS = 48, 40, (1, 4)
WHOLE, GROUPED = "rp(14,seed=3)", "rp(6,group=12)"


def rows(seed: int) -> np.ndarray:
    """Rows, float32 [layers, TOKENS, WIDTH]."""
    return np.random.default_rng(seed).normal(size=(2, TOKENS, WIDTH)).astype(np.float32) * np.float32([[[1]], [[30]]])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with unreduced z."""
    path, owner = tmp_path_factory.mktemp("full") / "a.zarr", kit.Store(4 << 20)
    spec = ArraySpec("z", "float32", LAYERS, WIDTH)
    owner.write(path, [spec], TOKENS, values={"z": kit.bits(rows(0))}, attrs={"num_layers": 6})
    assert owner.shutdown(kit.PATIENCE)
    return path


@pytest.fixture(scope="module")
def files(full: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{projection: file of scales}. The projection "" is of unprojected rows."""
    folder = tmp_path_factory.mktemp("scales")
    found = {spec: folder / f"{number}.safetensors" for number, spec in enumerate((WHOLE, GROUPED, ""))}
    for spec, path in found.items():
        words = ["--project", spec] if spec else []
        assert main(["fit-scales", str(full), "--hook", "z", "--margin", "1", *words, "-o", str(path)]) == 0
    return found


def bound(spec: str, path: Path, shards: int = 1) -> ChannelProjection:
    reduction = parse(f"{spec[:-1]}, channel={path})")
    assert isinstance(reduction, ChannelProjection)
    return reduction.bind("z", LAYERS, WIDTH // shards, shards)


def store(path: Path, spec: str, scales: Path, values: np.ndarray, shards: int = 1) -> ChannelProjection:
    """Write a store of z, and copy the scales next to it."""
    reduction = bound(spec, scales, shards)
    fittedkit.write(path, reduction, values, LAYERS, shards)
    return reduction


def projected(spec: str, values: np.ndarray) -> np.ndarray:
    projection = parse(spec)
    assert isinstance(projection, RandomProjection)
    return np.stack([projection.rows_projected(one) for one in values])


@pytest.mark.parametrize("spec", [WHOLE, GROUPED])
def test_projections_are_read_to_half_a_step(files: dict[str, Path], tmp_path: Path, spec: str) -> None:
    reduction = store(tmp_path / "a.zarr", spec, files[spec], rows(0))
    capture, exact = open_capture(tmp_path / "a.zarr", timeout=0), projected(spec, rows(0))
    assert verify_store(tmp_path / "a.zarr") == []
    info = capture.attrs["hooks"]["z"]["reduce"]
    settings = {name: value for name, value in info.items() if name not in ("dtype", "width")}
    assert capture.reduction("z") == from_settings(settings) == reduction and "source" not in settings
    steps = np.stack([Scales.load(files[spec]).of("z", layer) for layer in LAYERS])
    np.testing.assert_allclose(steps * STEPS, np.abs(exact).max(1), rtol=1e-5)
    got = capture.numpy("z")
    assert got.shape == exact.shape == capture.shape("z")
    assert (np.abs(got - exact) <= 0.5001 * steps[:, None]).all()
    direction = rows(5)[0, 0]
    want = exact[1] @ capture.project("z", direction)
    assert np.corrcoef(capture.numpy("z", 4) @ capture.project("z", direction), want)[0, 1] > 0.999
    with pytest.raises(ValueError, match="was not stored as principal components"):
        capture.restore("z", 4)


def test_two_ranks_that_project_by_head_read_as_one(files: dict[str, Path], tmp_path: Path) -> None:
    store(tmp_path / "one.zarr", GROUPED, files[GROUPED], rows(0))
    store(tmp_path / "two.zarr", GROUPED, files[GROUPED], rows(0), shards=2)
    two = open_capture(tmp_path / "two.zarr", timeout=0)
    two.attrs["hooks"]["z"]["shards"] = 2
    np.testing.assert_array_equal(two.numpy("z"), open_capture(tmp_path / "one.zarr", timeout=0).numpy("z"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_read_as_nan(files: dict[str, Path], tmp_path: Path, value: float) -> None:
    """The value changes every projected value, or with groups every projected value of its group."""
    for spec, lost in ((WHOLE, slice(None)), (GROUPED, slice(6, 12))):
        values = rows(0)
        values[1, 2, 13] = value
        path = tmp_path / f"{spec}.zarr"
        store(path, spec, files[spec], values)
        got = np.isnan(open_capture(path, timeout=0).numpy("z"))
        assert got[1, 2, lost].all() and got.sum() == got[1, 2, lost].sum()
        assert main(["verify", str(path)]) == 3


def test_fidelity_measures_it(full: Path, files: dict[str, Path]) -> None:
    row, channel = fidelity([full], [WHOLE, f"{WHOLE[:-1]},channel={files[WHOLE]})"], "z", [4])
    assert channel.measures["in_range"] == 1 and "in_range" not in row.measures
    assert abs(channel.measures["pairs"] - row.measures["pairs"]) < 0.01


def test_scales_that_do_not_fit_are_refused(files: dict[str, Path]) -> None:
    for spec, hook, shards, message in (
        (
            f"rp(14,channel={files[WHOLE]})",
            "z",
            1,
            r"for rows projected by rp\(14, seed 3, .*\), not for rows projected by rp\(14, seed 0, .*\)",
        ),
        (
            f"rp(14,channel={files['']})",
            "z",
            1,
            "for rows that were not projected, not for rows .* by rp.*; fit it with --project",
        ),
        (
            f"rp(14,seed=3,channel={files[WHOLE]})",
            "z",
            2,
            r"projected whole, but 2 tensor-parallel ranks .*; use rp.14.",
        ),
        (f"rp(14,seed=3,channel={files[WHOLE]})", "q", 1, "holds no scales of q, only of z"),
        (
            f"int8(channel={files[WHOLE]})",
            "z",
            1,
            r"for rows projected by rp\(14\); use rp\(14,channel=FILE\), or fit",
        ),
    ):
        reduction = parse(spec)
        assert reduction is not None
        with pytest.raises(ReduceError, match=message):
            reduction.bind(hook, LAYERS, WIDTH // shards, shards)
    for spec, message in (
        ("rp(14,channel)", r"rp.k,channel. names no scales; give their file, as in rp\(k,channel=FILE\)"),
        ("rp(14,channel=nowhere)", "nowhere.* cannot be read"),
        (f"rp(14,blue,channel={files[WHOLE]})", "'blue' in .* is unknown; rp takes"),
    ):
        with pytest.raises(ReduceError, match=message):
            parse(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int8", "--project int8 is not valid; give a projection, such as rp(512)"),
        ("none", "--project none is not valid"),
        ("rp(99)", "rp(99) is wider than the 48 values"),
        ("rp(6,group=13)", "rp(6,group=13) does not fit the 48 values"),
    ],
)
def test_projections_that_cannot_be_fitted_are_refused(
    full: Path, tmp_path: Path, spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit-scales", str(full), "--hook", "z", "--project", spec, "-o", str(tmp_path / "x")]) == 2
    assert re.search(re.escape(message), capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
