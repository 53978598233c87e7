# SPDX-License-Identifier: Apache-2.0
"""Stores with scores of probes: every command and view reads them as rows of numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_capture, open_captures
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.probe import Probe
from tests import storekit as kit

ROWS = 40
RISK = Probe("resid_pre", (1,), ("yes", "no"), "0" * 64, output="softmax")
MANY = Probe("z", (0, 2), ("on",), "1" * 64, output="sigmoid")


def spec(name: str, probe: Probe, layers: tuple[int, ...], shards: int = 1, rank: int = 0) -> ArraySpec:
    about = {**probe.settings(), "dtype": "bfloat16", "width": 64}
    return ArraySpec(name, "float32", layers, len(probe.outputs) * shards, shards, rank, reduce=about)


def write(path: Path, seed: int = 0) -> kit.Values:
    """Two ranks, of which each has a slice of z; the first scored the residual stream."""
    owner = kit.Store(1 << 20)
    rng = np.random.default_rng(seed)
    hooks = [
        ArraySpec("resid_pre", "float32", (1,), 64),
        spec("probe.risk", RISK, ()),
        spec("probe.many", MANY, (0, 2)),
    ]
    values = {
        "resid_pre": rng.standard_normal((1, ROWS, 64)).astype("f4").view("u4"),
        "probe.risk": rng.dirichlet((1, 1), (1, ROWS)).astype("f4").view("u4"),
        "probe.many": rng.standard_normal((2, ROWS, 1)).astype("f4").view("u4"),
    }
    owner.write(path, hooks, ROWS, values=values, attrs={"num_layers": 3, "dtype": "bfloat16"}, chunk=16, segment=32)
    assert owner.shutdown(kit.PATIENCE)
    return {name: array.view("f4") for name, array in values.items()}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures")
    for number in range(2):
        write(folder / f"{number}.zarr", number)
    return folder


def test_scores_have_the_shape_of_the_probe(stores: Path, tmp_path: Path) -> None:
    want = write(tmp_path / "a.zarr")
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    np.testing.assert_array_equal(cap.numpy("probe.risk"), want["probe.risk"][0])
    np.testing.assert_array_equal(cap["probe.many@2"], want["probe.many"][1])
    assert cap.numpy("probe.many").shape == (2, ROWS, 1) and cap.layers["probe.risk"] == []
    assert cap.reduction("probe.risk") == RISK
    view = open_captures(stores).rows("probe.risk")
    assert view.shape == (2 * ROWS, 2)
    np.testing.assert_array_equal(view[:ROWS], want["probe.risk"][0])
    assert cap.xarray().sizes["probe.risk_width"] == 2
    with pytest.raises(ValueError, match=r"hook 'probe\.risk' holds no latents of an autoencoder"):
        cap.latents("probe.risk")
    with pytest.raises(ValueError, match=r"'probe\.risk' was stored as probe, which this cannot be worked out from"):
        cap.tally("probe.risk")


def test_commands_take_stores_with_scores(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = str(stores / "0.zarr"), str(stores / "1.zarr")
    assert main(["verify", str(stores)]) == 0 and main(["info", one]) == 0
    assert "probe.risk" in capsys.readouterr().out
    assert main(["fidelity", one, "--reduce", "int8"]) == 0
    assert "resid_pre" in capsys.readouterr().out
    assert main(["diff", one, other, "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)
    compared = [(hook["hook"], hook["layer"]) for hook in found["hooks"]]
    assert {("resid_pre", 1), ("probe.risk", None), ("probe.many", 0), ("probe.many", 2)} == set(compared)
    assert main(["diff", one, one, "--hooks", "probe.*"]) == 0
    out = tmp_path / "text.svg"
    assert main(["plot", one, "--kind", "text", "--hook", "probe.risk", "-o", str(out)]) == 0
    assert "score of output 0" in out.read_text()
