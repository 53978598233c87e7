# SPDX-License-Identifier: Apache-2.0
"""Stores with scores of probes: every command and view reads scores as rows of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector import open_capture, open_captures
from dmi_connector.analysis.neurons import top_tokens
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.probe import Probe
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.metadata import read_attrs
from tests import storekit as kit
from tests.probekit import save_encoder

ROWS = 40
RISK = Probe("resid_pre", (1,), ("yes", "no"), "0" * 64, output="softmax")
MANY = Probe("z", (0, 2), ("on",), "1" * 64, output="sigmoid")


def spec(name: str, probe: Probe, layers: tuple[int, ...], shards: int = 1, rank: int = 0) -> ArraySpec:
    about = {**probe.settings(), "dtype": "bfloat16", "width": 64}
    return ArraySpec(name, "float32", layers, len(probe.outputs) * shards, shards, rank, reduce=about)


def write(path: Path, seed: int = 0, losses: Sequence[Loss] = (), lost: float | None = None) -> kit.Values:
    """Write a store. lost: the value in the rows of `losses`."""
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
    if lost is not None:
        for loss in losses or [Loss.of(Cause.FELL_BEHIND, [(3, 4)])]:
            for start, stop in loss.rows:
                values["probe.risk"].view("f4")[:, start:stop] = lost
    attrs = {"num_layers": 3, "dtype": "bfloat16"}
    owner.write(path, hooks, ROWS, values=values, attrs=attrs, chunk=16, segment=32, losses=losses)
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
    with pytest.raises(ValueError, match=r"'probe\.risk' was stored as probe, from which this cannot be computed"):
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
    assert main(["plot", one, "--kind", "text", "--hook", "probe.risk", "--neuron", "1", "-o", str(out)]) == 0
    assert "score of output 1" in out.read_text()
    best = tmp_path / "best.svg"
    command = ["plot", str(stores), "--kind", "neuron", "--hook", "probe.risk", "--neuron", "1"]
    assert main([*command, "-o", str(best)]) == 0 and "probe.risk, output 1" in best.read_text()


def test_the_index_tells_scores_without_a_store(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [write(tmp_path / f"{number}.zarr", number) for number in range(2)]
    captures = open_captures(tmp_path)

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a store was opened")

    monkeypatch.setattr("dmi_connector.captures.captures.open_capture", opened)
    monkeypatch.setattr("dmi_connector.captures.filters.read_attrs", opened)
    risk = np.stack([values["probe.risk"][0] for values in both])
    many = np.stack([values["probe.many"] for values in both])
    found = {what: captures.scores("risk", what) for what in ("max", "min", "mean", "last", "at")}
    assert found["max"].dtype == np.float32 and found["max"].shape == (2, 2)
    np.testing.assert_array_equal(found["max"], risk.max(1))
    np.testing.assert_array_equal(captures.scores("probe.risk"), risk.max(1))
    np.testing.assert_array_equal(found["min"], risk.min(1))
    np.testing.assert_allclose(found["mean"], risk.mean(1), rtol=1e-6)
    np.testing.assert_array_equal(found["last"], risk[:, -1])
    np.testing.assert_array_equal(found["at"], risk.argmax(1))
    np.testing.assert_array_equal(captures.scores("many"), many.max(2))
    assert captures.scores("many", "last").shape == (2, 2, 1)
    with pytest.raises(KeyError, match="none of 2 stores has scores of a probe 'rsk': did you mean 'risk'"):
        captures.scores("rsk")
    with pytest.raises(ValueError, match="what 'median' is not valid; use 'max', 'at', 'min'"):
        captures.scores("risk", "median")


def test_scores_of_missing_rows_are_left_out(tmp_path: Path) -> None:
    lost = [Loss.of(Cause.FELL_BEHIND, [(16, 32)])]
    want = write(tmp_path / "a.zarr", 0, lost, lost=9.0)["probe.risk"][0]
    there = np.r_[0:16, 32:ROWS]
    found = open_captures(tmp_path, incomplete=True)
    np.testing.assert_array_equal(found.scores("risk"), want[there].max(0)[None])
    np.testing.assert_array_equal(found.scores("risk", "at"), there[want[there].argmax(0)][None])
    assert found.infos[0].scores == read_attrs(tmp_path / "a.zarr")["scores"]
    (tmp_path / "index.jsonl").unlink()
    np.testing.assert_array_equal(open_captures(tmp_path, incomplete=True).scores("risk"), found.scores("risk"))


def test_scores_that_are_not_finite_are_nan_and_other_stores_have_none(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", 0, lost=float("nan"))
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "b.zarr", [ArraySpec("resid_pre", "float32", (1,), 64)], ROWS, attrs={"num_layers": 3})
    assert owner.shutdown(kit.PATIENCE)
    found = open_captures(tmp_path)
    assert np.isnan(found.scores("risk")).all() and np.isfinite(found.scores("many")[0]).all()
    assert np.isfinite(found.scores("risk", "last")[0]).all()
    assert "scores" not in read_attrs(tmp_path / "b.zarr") and np.isnan(found.scores("many")[1]).all()
    pytest.importorskip("pandas")
    assert "scores" not in found.table().columns


def test_latents_and_scores_have_top_tokens(stores: Path, tmp_path: Path) -> None:
    latents = Latents.load(str(save_encoder(tmp_path / "sae", 64, 50)), "resid_mid", 1, 6).bind(
        "resid_mid", (1,), 64, 1
    )
    latents.prepare(64, torch.device("cpu"), 1, 0)
    rows = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0))
    stored = latents.encode(rows, 1).numpy()
    about = {**latents.settings(), "dtype": "float32", "width": 64}
    spec = ArraySpec("probe.sae", "uint8", (), stored.shape[1], reduce=about)
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [spec], ROWS, values={"probe.sae": stored[None]}, attrs={"num_layers": 3})
    assert owner.shutdown(kit.PATIENCE)
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    dense = cap.numpy("probe.sae")
    assert dense.shape == (ROWS, 50) and ((dense > 0).sum(1) <= 6).all()
    ids, values = cap.latents("probe.sae", tokens=[3, 5])
    np.testing.assert_array_equal(values, -np.sort(-dense[[3, 5]], 1)[:, :6])
    np.testing.assert_array_equal(np.take_along_axis(dense[[3, 5]], ids, 1), values)
    latent = int((dense > 0).sum(0).argmax())
    out = tmp_path / "text.svg"
    for option, said in ((["--neuron", str(latent)], f"value of latent {latent}"), ([], "active latents")):
        command = ["plot", str(tmp_path / "a.zarr"), "--kind", "text", "--hook", "probe.sae", *option, "-o", str(out)]
        assert main(command) == 0 and said in out.read_text()
    found = top_tokens(cap, "probe.sae", latent, count=3)
    np.testing.assert_allclose([one.value for one in found], -np.sort(-dense[:, latent])[:3])
    risk = np.concatenate([capture.numpy("probe.risk")[:, 1] for capture in open_captures(stores)])
    best = top_tokens(open_captures(stores), "probe.risk", 1, count=5)
    np.testing.assert_allclose([one.value for one in best], -np.sort(-risk)[:5])
