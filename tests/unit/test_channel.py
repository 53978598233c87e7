# SPDX-License-Identifier: Apache-2.0
"""int8(channel=file): from `dmi fit-scales` to decoded float values."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from dmi_connector import TokenDataset, open_capture, open_captures
from dmi_connector.analysis.fidelity import fidelity, markdown
from dmi_connector.analysis.fit_scales import fit_scales
from dmi_connector.analysis.importance import importance
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import ReduceError, from_settings, parse
from dmi_connector.reduce.channel import ChannelInt8
from dmi_connector.reduce.scales import METADATA, STEPS, Scales, scales_of
from dmi_connector.store.format.kept_files import BASES
from dmi_connector.store.read.verify import verify_store
from tests import fittedkit
from tests import storekit as kit

WIDTH, TOKENS, LAYERS = 50, 40, (1, 4)
SIZES = np.geomspace(1e-3, 1e3, WIDTH).astype(np.float32)
"""Scales of the dimensions. They differ so much that one scale per row would round most values to zero."""


def rows(seed: int) -> np.ndarray:
    """Rows, float32 [layers, TOKENS, WIDTH]."""
    found = np.random.default_rng(seed).uniform(-1, 1, (len(LAYERS), TOKENS, WIDTH)).astype(np.float32) * SIZES
    return found * np.float32([[[1]], [[3]]])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores with unreduced resid_pre, and resid_final."""
    folder, owner = tmp_path_factory.mktemp("full"), kit.Store(4 << 20)
    specs = [ArraySpec("resid_pre", "float32", LAYERS, WIDTH), ArraySpec("resid_final", "float32", (), WIDTH)]
    for seed in range(2):
        values = {"resid_pre": kit.bits(rows(seed)), "resid_final": kit.bits(rows(seed)[:1])}
        owner.write(folder / f"{seed}.zarr", specs, TOKENS, values=values, attrs={"num_layers": 6})
    assert owner.shutdown(kit.PATIENCE)
    return [folder / f"{seed}.zarr" for seed in range(2)]


@pytest.fixture(scope="module")
def scales(full: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scales") / "a b.safetensors"
    command = ["fit-scales", *map(str, full), "--hook", "resid_pre", "--hook", "resid_final", "--margin", "1"]
    assert main([*command, "-o", str(out)]) == 0
    return out


def store(path: Path, scales: Path, values: np.ndarray, shards: int = 1, copy: bool = True) -> ChannelInt8:
    """Write a store of resid_pre. copy: whether to copy the scales next to it, as servers do."""
    reduction = parse(f"int8(channel={scales})")
    assert isinstance(reduction, ChannelInt8)
    reduction = reduction.bind("resid_pre", LAYERS, WIDTH // shards, shards)
    fittedkit.write(path, reduction, values, LAYERS, shards, copy)
    return reduction


def test_a_file_may_be_in_the_home_directory(scales: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the files of `probes` may be."""
    monkeypatch.setenv("HOME", str(scales.parent))
    reduction = parse(f"int8(channel=~/{scales.name})")
    assert isinstance(reduction, ChannelInt8) and reduction.source == str(scales)


@pytest.fixture
def captured(tmp_path: Path, scales: Path) -> Path:
    """A store of the first calibration rows."""
    store(tmp_path / "a.zarr", scales, rows(0))
    return tmp_path / "a.zarr"


def test_scales_are_the_largest_magnitudes_of_each_dimension(full: list[Path], scales: Path) -> None:
    found = Scales.load(scales)
    assert found.hooks == {
        "resid_pre": {"width": WIDTH, "layers": [*LAYERS]},
        "resid_final": {"width": WIDTH, "layers": [0]},
    }
    largest = np.abs(np.concatenate([rows(0), rows(1)], 1)).max(1)
    for layer, want in zip(LAYERS, largest, strict=True):
        np.testing.assert_allclose(found.of("resid_pre", layer) * STEPS, want, rtol=1e-6)
    with pytest.raises(ReduceError, match="holds no scales of resid_pre in layer 2"):
        found.of("resid_pre", 2)


def test_values_are_read_as_floats_to_half_a_step(captured: Path, scales: Path) -> None:
    exact, capture = rows(0), open_capture(captured, timeout=0)
    assert verify_store(captured) == []
    info = capture.attrs["hooks"]["resid_pre"]
    assert info["width"] == 52 and info["reduce"]["sha256"] == Scales.load(scales).sha256
    assert capture.reduction("resid_pre") == from_settings(
        {k: v for k, v in info["reduce"].items() if k not in ("dtype", "width")}
    )
    step = np.stack([Scales.load(scales).of("resid_pre", layer) for layer in LAYERS])[:, None]
    got = capture.numpy("resid_pre")
    assert got.dtype == np.float32 and got.shape == exact.shape == capture.shape("resid_pre")
    assert (np.abs(got - exact) <= 0.5001 * step).all()
    np.testing.assert_array_equal(capture.numpy("resid_pre", 4, slice(3, 9)), got[1, 3:9])
    np.testing.assert_array_equal(capture.numpy("resid_pre", [4, 1]), got[::-1])
    np.testing.assert_array_equal(capture.numpy("resid_post", 3), got[1])  # the stream after layer 3
    np.testing.assert_array_equal(capture.torch("resid_pre", -2).numpy(), got[1])
    cosines = (got * exact).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert cosines.min() > 0.9999


def test_rows_of_many_stores_are_read_as_floats(captured: Path, scales: Path) -> None:
    store(captured.with_name("b.zarr"), scales, rows(1))
    data = open_captures(captured.parent).rows("resid_pre", 4)
    want = [open_capture(captured.with_name(name), timeout=0).numpy("resid_pre", 4) for name in ("a.zarr", "b.zarr")]
    assert sorted(map(bytes, data.read(slice(None)))) == sorted(map(bytes, np.concatenate(want)))
    both = open_captures(captured.parent).rows("resid_pre", [4, 1]).read(slice(None))
    np.testing.assert_array_equal(both[0], data.read(slice(None)))
    np.testing.assert_array_equal(both[1], open_captures(captured.parent).rows("resid_pre", 1).read(slice(None)))
    batches = torch.cat(list(TokenDataset(captured.parent, "resid_pre@4", 16, shuffle=False)))
    np.testing.assert_array_equal(batches, data.read(slice(None)))


def test_two_ranks_store_what_one_does(captured: Path, scales: Path) -> None:
    """Each rank has the scales of its slice."""
    other = captured.with_name("b.zarr")
    store(other, scales, rows(0), shards=2)
    two = open_capture(other, timeout=0)
    two.attrs["hooks"]["resid_pre"]["shards"] = 2  # the same bytes as of two ranks
    np.testing.assert_array_equal(two.numpy("resid_pre"), open_capture(captured, timeout=0).numpy("resid_pre"))


def test_a_capture_that_is_followed_gives_floats(captured: Path) -> None:
    whole, owner = open_capture(captured, timeout=0), kit.Store(4 << 20)
    info, source = whole.attrs["hooks"]["resid_pre"], whole.sources("resid_pre")
    spec = ArraySpec("resid_pre", "uint8", LAYERS, info["width"], reduce={**info["reduce"]})
    values = {"resid_pre": np.stack([whole.stored(one)[0] for one in source])}
    record = owner.open(captured.with_name("b.zarr"), spec, attrs={"prompt_len": 8, "num_layers": 6})
    with open_capture(captured.with_name("b.zarr"), kit.PATIENCE, follow=True) as capture:
        rows = capture.follow("resid_pre@4")
        owner.put(record, values, 0, TOKENS)
        np.testing.assert_array_equal(next(rows)[1], whole.numpy("resid_pre", 4))
        owner.close(record, TOKENS)
        assert list(rows) == []
    assert owner.shutdown(kit.PATIENCE)


def test_a_store_without_its_scales_says_where_to_put_them(tmp_path: Path, scales: Path) -> None:
    path = tmp_path / "deep" / "a.zarr"
    path.parent.mkdir()
    sha256 = store(path, scales, rows(0), copy=False).sha256
    place = path.parent / BASES / f"{sha256}.safetensors"
    said = f"the scales file of {path} is not beside it; copy the file with SHA-256 {sha256}.* to {place}"
    with pytest.raises(FileNotFoundError, match=said):
        open_capture(path, timeout=0).numpy("resid_pre")
    [problem] = verify_store(path)
    assert problem.where == "resid_pre" and "is not beside it" in problem.what
    place.parent.mkdir()
    shutil.copy(scales, place)
    want = open_capture(path, timeout=0).numpy("resid_pre")
    assert verify_store(path) == []
    shutil.move(place.parent, tmp_path / BASES)  # in the parent of the store's folder
    np.testing.assert_array_equal(open_capture(path, timeout=0).numpy("resid_pre"), want)
    (tmp_path / BASES / place.name).write_bytes(other_file(scales, tmp_path).read_bytes())
    with pytest.raises(ValueError, match=r"holds another scales file: its SHA-256 is .*, .* names"):
        open_capture(path, timeout=0).numpy("resid_pre")


def other_file(scales: Path, folder: Path, **changed: object) -> Path:
    """Write the file with other tensors or other metadata."""
    found = Scales.load(scales)
    tensors = {name: 2 * tensor for name, tensor in load_file(scales).items()} | changed
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},  # type: ignore[misc]
        folder / "other.safetensors",
        metadata={METADATA: json.dumps({"hooks": found.hooks, "stores": 1})},
    )
    return folder / "other.safetensors"


def test_values_beyond_the_range_are_clipped_and_counted(tmp_path: Path, scales: Path) -> None:
    values = rows(0)
    values[0, :10, 7] = 3 * SIZES[7]
    values[1, 5, :] = -100 * SIZES
    reduction = store(tmp_path / "a.zarr", scales, values)
    capture = open_capture(tmp_path / "a.zarr", timeout=0)
    step = Scales.load(scales).of("resid_pre", LAYERS[0])
    np.testing.assert_array_equal(capture.numpy("resid_pre", 1, range(10))[:, 7], 127 * step[7])
    np.testing.assert_array_equal(capture.numpy("resid_pre", 4, [5])[0], -127 * Scales.load(scales).of("resid_pre", 4))
    first, second = capture.tally("resid_pre", 1), capture.tally("resid_pre", 4)
    assert first.clipped.nonzero()[0].tolist() == [7] and first.clipped[7] == 10
    np.testing.assert_array_equal(second.clipped, 1)
    np.testing.assert_array_equal((first + first).clipped, 2 * first.clipped)
    exact = np.abs(capture.numpy("resid_pre", 1)).mean(0)
    np.testing.assert_allclose(importance([capture], "resid_pre", 1), exact, rtol=1e-5)
    found = capture.reduction("resid_pre")
    assert found is not None and found == reduction and found.fitted() is not None


def test_a_dimension_that_was_always_zero_is_seen_to_be_beyond_its_range() -> None:
    found = scales_of(np.array([0, 1, 1000], np.float32))
    np.testing.assert_allclose(found, [1000e-6 / STEPS, 1 / STEPS, 1000 / STEPS], rtol=1e-6)
    assert (scales_of(np.zeros(3)) > 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reads_as_nan(tmp_path: Path, captured: Path, scales: Path, value: float) -> None:
    values = rows(0)
    values[1, 2, 3] = value
    store(tmp_path / "nan.zarr", scales, values)
    capture = open_capture(tmp_path / "nan.zarr", timeout=0)
    got, before = capture.numpy("resid_pre"), open_capture(captured, timeout=0).numpy("resid_pre")
    assert np.argwhere(np.isnan(got)).tolist() == [[1, 2, 3]]
    np.testing.assert_array_equal(got[0], before[0])
    assert main(["verify", str(tmp_path / "nan.zarr")]) == 3


def test_fidelity_measures_it(full: list[Path], scales: Path, tmp_path: Path) -> None:
    narrow = other_file(scales, tmp_path, **{"resid_final.0.scale": Scales.load(scales).of("resid_final", 0) / 2})
    specs = ["int8", f"int8(channel={scales})", f"int8(channel={narrow})"]
    row, channel, clipped = (f.measures for f in fidelity(full, specs, "resid_final"))
    assert channel["cosine_least"] > 0.9999 and channel["in_range"] == 1 and "in_range" not in row
    assert 0.4 < clipped["in_range"] < 0.6 and clipped["error"] > 0.1
    table = markdown(fidelity(full, specs, "resid_final"))
    assert "- in range: share of the values within the range" in table
    small = fidelity(full, specs[:2], "resid_pre", [4])
    assert small[1].size == 52 / 200


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int8(channel)", r"int8\(channel\) names no scales; give their file, as in int8\(channel=FILE\)"),
        ("int8(channel=)", "names no scales"),
        ("int8(channel=nowhere)", "cannot be read .No such file.*; give a file that dmi fit-scales made"),
        ("int8(channel={folder}/text)", "holds no scales .*; give a file that dmi fit-scales made"),
        ("int8(channel={folder})", "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "text").write_text("{}")
    with pytest.raises(ReduceError, match=message):
        parse(spec.replace("{folder}", str(tmp_path)))


@pytest.mark.parametrize(
    "bad", [np.zeros(WIDTH, "f4"), np.full(WIDTH, np.nan, "f4"), np.ones(3, "f4"), np.ones(WIDTH, "f8"), None]
)
def test_scales_that_give_no_step_are_refused(scales: Path, tmp_path: Path, bad: np.ndarray | None) -> None:
    path = other_file(scales, tmp_path, **{"resid_pre.4.scale": bad})
    with pytest.raises(ReduceError, match=r"resid_pre\.4\.scale has to be 50 finite float32 numbers above 0"):
        parse(f"int8(channel={path})")


@pytest.mark.parametrize("hooks", [[], "z", 3])
def test_metadata_of_another_form_is_refused(tmp_path: Path, hooks: object) -> None:
    path = tmp_path / "s.safetensors"
    save_file({"z.0.scale": np.ones(2, "f4")}, path, metadata={METADATA: json.dumps({"hooks": hooks})})
    with pytest.raises(ReduceError, match=r"holds no scales .*; give a file that dmi fit-scales made"):
        Scales.load(path)
    with pytest.raises(ReduceError, match="holds no scales"):
        Scales.parse(path.read_bytes(), str(path))


def test_a_file_that_changed_since_the_start_is_noticed(scales: Path, tmp_path: Path) -> None:
    """Stores would name another file than the one that reduced their rows."""
    path = Path(shutil.copy(scales, tmp_path / "s.safetensors"))
    reduction = parse(f"int8(channel={path})")
    assert reduction is not None
    bound = reduction.bind("resid_pre", LAYERS, WIDTH, 1)
    other = other_file(scales, tmp_path, **{"resid_pre.4.scale": np.ones(WIDTH, "f4")})
    os.utime(other, ns=(0, 0))  # timestamps of file systems may be too coarse to distinguish the files
    other.replace(path)
    with pytest.raises(ReduceError, match=r"s\.safetensors has changed since the engine started; start it again"):
        bound.prepare(WIDTH, torch.device("cpu"), 4, 0)


def test_scales_that_do_not_fit_are_refused(scales: Path) -> None:
    reduction = parse(f"int8(channel={scales})")
    assert reduction is not None
    for hook, layers, width, message in (
        ("q", [1], WIDTH, "holds no scales of q, only of resid_pre, resid_final; fit q with dmi fit-scales"),
        ("resid_pre", [1, 2], WIDTH, "no scales of resid_pre in layer 2"),
        ("resid_pre", [1], 60, "of another model: resid_pre has 60 values, not 50"),
    ):
        with pytest.raises(ReduceError, match=message):
            reduction.bind(hook, layers, width, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hook", "resid_pre", "--margin", "0.5"], "--margin 0.5 is not valid; give a factor of 1 or more"),
        (["--hook", "resid_pre", "--margin", "nan"], "--margin nan is not valid"),
        (["--hook", "z"], "holds no z; it holds"),
        (["--hook", "logits"], "--hook logits cannot be reduced"),
        (["--hook", "resid_pre", "--layer", "9"], "layer 9"),
        (["--hook", "resid_pre", "--model", "m"], "fit-scales: no store is of the model m"),
    ],
)
def test_fits_that_cannot_be_made_are_refused(
    full: list[Path], tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit-scales", *map(str, full), *words, "-o", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("project", [None, "rp(4)"])
def test_stores_with_rows_of_different_widths_are_refused(tmp_path: Path, project: str | None) -> None:
    """Projected rows have equal widths, but their projections differ."""
    owner = kit.Store(1 << 20)
    for width in (8, 16):
        spec = ArraySpec("resid_final", "float32", (), width)
        values = {"resid_final": kit.bits(np.ones((1, TOKENS, width), "f4"))}
        owner.write(tmp_path / f"{width}.zarr", [spec], TOKENS, values=values, attrs={"num_layers": 6})
    assert owner.shutdown(kit.PATIENCE)
    stores = [tmp_path / "8.zarr", tmp_path / "16.zarr"]
    with pytest.raises(ValueError, match="stores hold 8 and 16 values of resid_final; give stores of one model"):
        fit_scales(stores, ["resid_final"], tmp_path / "s.safetensors", project=project)


@pytest.mark.parametrize("margin", [1.0, 1.25, 3.0])
def test_a_margin_widens_every_scale(margin: float, full: list[Path], tmp_path: Path) -> None:
    fit_scales(full, ["resid_final"], tmp_path / "s.safetensors", margin=margin)
    (found,) = load_file(tmp_path / "s.safetensors").values()
    largest = np.maximum(*(np.abs(rows(seed)[0]).max(0) for seed in range(2))).astype("f8")
    np.testing.assert_allclose(found, largest * margin / STEPS, rtol=1e-6)
