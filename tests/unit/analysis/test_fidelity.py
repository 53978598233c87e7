# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pca` and `dmi fidelity` on stores whose rows have a known structure."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors import SafetensorError

from dmi_connector import open_capture
from dmi_connector.analysis import fit_pca, fit_rows
from dmi_connector.analysis.fidelity import fidelity, markdown
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.basis import Basis
from dmi_connector.reduce.pca import fit
from dmi_connector.store.format.kept_files import BASES, keep_copy
from dmi_connector.store.read.fitted_files import find_fitted
from tests import storekit as kit

WIDTH, RANK, TOKENS = 96, 5, 150
RESID = ArraySpec("resid_mid", "float32", (0, 1), WIDTH)
NEURONS = ArraySpec("mlp_post", "float32", (0,), 700)
FINAL = ArraySpec("resid_final", "float32", (), WIDTH)
INT8 = ArraySpec("q", "uint8", (0,), 68, reduce={"kind": "int8", "affine": False, "dtype": "float32", "width": 64})


def rows(seed: int, layers: int) -> np.ndarray:
    """Rows with five directions of decreasing strength, a mean, and a little noise: [layers, TOKENS, WIDTH] as bits."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))[0][:RANK]
    found = [
        rng.normal(size=(TOKENS, RANK)) * 0.7 ** np.arange(RANK) @ directions
        + rng.normal(size=(TOKENS, WIDTH)) * 0.001
        + 2 * (layer + 1)
        for layer in range(layers)
    ]
    return np.stack(found).astype("<f4").view("u4")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, owner = tmp_path_factory.mktemp("stores"), kit.Store(4 << 20)
    paths = [folder / f"{i}.zarr" for i in range(3)]
    for i, path in enumerate(paths):
        values = {spec.name: kit.random_bits(spec, TOKENS, seed=i) for spec in (NEURONS, INT8)}
        owner.write(path, [RESID, NEURONS, INT8], TOKENS, values={"resid_mid": rows(i, 2), **values})
    assert owner.shutdown(kit.PATIENCE)
    return paths


@pytest.fixture(scope="module")
def basis(stores: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    command = ["fit-pca", *map(str, stores[:2]), "--hook", "resid_mid", "--rank", str(RANK), "-o", str(out)]
    assert main(command) == 0
    return out


def test_a_fitted_basis_finds_the_directions_of_the_rows(basis: Path) -> None:
    assert Basis.load(basis).hooks == {"resid_mid": {"width": WIDTH, "k": RANK, "layers": [0, 1]}}
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))[0][:RANK]
    for layer in (0, 1):
        part = Basis.load(basis).of("resid_mid", layer, RANK)
        overlap = np.linalg.svd(directions @ part.components, compute_uv=False)
        assert overlap.min() > 0.9999 and abs(part.mean.mean() - 2 * (layer + 1)) < 0.1
        np.testing.assert_allclose(part.std, 0.7 ** np.arange(RANK), rtol=0.15)


def test_each_group_has_its_own_basis(stores: list[Path], tmp_path: Path) -> None:
    """All groups have the same few directions, so a basis per group keeps as much as one for all groups."""
    out = tmp_path / "heads.safetensors"
    words = ["--hook", "resid_mid", "--rank", "8", "--group", "24", "-o", str(out)]
    assert main(["fit-pca", *map(str, stores[:2]), *words]) == 0
    assert Basis.load(out).hooks == {"resid_mid": {"width": WIDTH, "k": 8, "group": 24, "layers": [0, 1]}}
    one, part = fidelity(stores[2:], [f"pca({out})", f"pca({out},k=2)"], "resid_mid", [1])
    assert one.measures["variance"] > 0.9 > part.measures["variance"]
    assert (one.size, part.size) == ((4 * 8 + 4) / (4 * WIDTH), (4 * 2 + 4) / (4 * WIDTH))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hook", "resid_mid", "--rank", "0"], "--rank 0 is not valid; keep 1 component or more"),
        (["--hook", "resid_mid", "--rank", "97"], "rank 97 is more than the 96 values"),
        (
            ["--hook", "resid_mid", "--rank", "2", "--group", "-1"],
            "--group -1 is not valid; give the number of values in a group",
        ),
        (["--hook", "resid_mid", "--rank", "2", "--group", "7"], "--group 7 does not divide the 96 values"),
        (["--hook", "resid_mid", "--rank", "9", "--group", "8"], "rank 9 is more than the 8 values of a group"),
        (["--hook", "z", "--rank", "2"], "holds no z; it holds"),
        (["--hook", "q", "--rank", "2"], "q of .* is stored reduced"),
        (["--hook", "mlp_post", "--rank", "600"], "450 rows are too few for rank 600"),
        (["--hook", "resid_mid", "--rank", "2", "--layer", "7"], "layer 7"),
        (["--hook", "resid_mid", "--rank", "2", "--layer", "-3"], r"has no layer -3 in this store; it has \[0, 1\]"),
        (["--hook", "logits", "--rank", "2"], "--hook logits cannot be reduced: it has a row only for each"),
        (["--hook", "topk_ids", "--rank", "2"], "--hook topk_ids cannot be reduced: it holds integers"),
    ],
)
def test_fits_that_cannot_be_made_are_refused(
    stores: list[Path], tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.safetensors"
    assert main(["fit-pca", *map(str, stores), *words, "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not list(tmp_path.iterdir())


def test_a_basis_is_not_overwritten(stores: list[Path], basis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-pca", str(stores[0]), "--hook", "resid_mid", "--rank", "2", "-o", str(basis)]) == 2
    assert "exists; give a new name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "why"), [("nowhere/b.st", "does not exist; create it"), ("x" * 255, "cannot be written")]
)
def test_a_place_that_cannot_be_written_is_named_before_the_fit(
    stores: list[Path],
    tmp_path: Path,
    name: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits: list[object] = []
    monkeypatch.setattr(fit_pca, "fit", lambda *args: fits.append(args) or fit(*args))
    command = ["fit-pca", str(stores[0]), "--hook", "resid_mid", "--rank", "2", "-o"]
    assert main([*command, str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert f"dmi: fit-pca: {tmp_path / name}" in error and why in error and "give another -o" in error
    assert not fits and not list(tmp_path.iterdir())


def test_a_full_disk_under_a_basis_is_named(
    stores: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"part")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    command = ["fit-pca", str(stores[0]), "--hook", "resid_mid", "--rank", "2", "-o", str(tmp_path / "b")]
    assert main(command) == 2
    assert "the basis cannot be written (No space left on device); give another -o" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def spoilt(path: Path, where: slice, value: float) -> Path:
    """A store of resid_mid. Its rows `where` have `value` in layer 0."""
    owner, values = kit.Store(4 << 20), rows(0, 2).view("f4").copy()
    values[0, where, 3] = value
    owner.write(path, [RESID], TOKENS, values={"resid_mid": kit.bits(values)})
    assert owner.shutdown(kit.PATIENCE)
    return path


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_rows_that_are_not_finite_are_left_out_of_a_fit(
    stores: list[Path], tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    store, out = spoilt(tmp_path / "nan.zarr", slice(0, 40), value), tmp_path / "basis.safetensors"
    kept = fit_pca.fit_pca([store, stores[1]], ["resid_mid"], RANK, out)
    assert 0.99 < kept["resid_mid.0"] <= 1
    wanted, _ = fit([rows(0, 1)[0, 40:].view("f4"), rows(1, 1)[0].view("f4")], RANK)
    np.testing.assert_allclose(Basis.load(out).of("resid_mid", 0, RANK).mean, wanted.mean, rtol=1e-4)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"fit-pca: 40 of {2 * TOKENS} rows of resid_mid layer 0 hold a value that is not finite; they are left out"
    ]


def test_a_fit_reads_each_row_once(stores: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_rows, "_ROWS", 40)
    blocks = list(fit_rows.finite_rows(stores, "resid_mid", 1, "fit"))
    assert len(blocks) == 3 * -(-TOKENS // 40)
    held = [open_capture(store, 0).numpy("resid_mid", 1) for store in stores]
    np.testing.assert_array_equal(np.concatenate(blocks), np.concatenate(held))


def test_integer_hooks_cannot_be_reduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, experts = kit.Store(1 << 20), ArraySpec("topk_ids", "int32", (0, 1), 4)
    store.write(tmp_path / "a.zarr", [experts, FINAL], 20)
    assert store.shutdown(kit.PATIENCE)
    assert main(["fidelity", str(tmp_path / "a.zarr"), "--reduce", "int8", "--json"]) == 0
    assert "topk_ids" not in capsys.readouterr().out


def test_a_fit_without_a_finite_row_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = spoilt(tmp_path / "nan.zarr", slice(None), np.nan), tmp_path / "basis.safetensors"
    assert main(["fit-pca", str(store), "--hook", "resid_mid", "--rank", "2", "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"each of the {TOKENS} rows of resid_mid layer 0 holds a value that is not finite" in error, error
    assert not out.exists()


def test_a_negative_layer_is_fitted_under_its_number(stores: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "basis.safetensors"
    command = ["fit-pca", *map(str, stores[:2]), "--hook", "resid_mid", "--rank", str(RANK), "-o", str(out)]
    assert main([*command, "--layer", "-1", "--layer", "1"]) == 0
    assert Basis.load(out).hooks == {"resid_mid": {"width": WIDTH, "k": RANK, "layers": [1]}}
    assert abs(Basis.load(out).of("resid_mid", 1, RANK).mean.mean() - 4) < 0.1
    assert fidelity(stores[2:], [f"pca({out})"], "resid_mid", [1])[0].measures["variance"] > 0.99


def test_fidelity_gives_the_known_measures_of_each_reduction(stores: list[Path], basis: Path) -> None:
    specs = ["int8", "fp8", "round(23)", "topk(64)", "topk(8,sample=512)", "rp(32)", f"pca({basis})", "rp(512)", "none"]
    found = {(f.hook, f.layer, f.reduction): f for f in fidelity(stores[2:], specs, "resid_mid")}
    assert {layer for _, layer, _ in found} == {0, 1}
    assert not any("512" in spec or spec == "none" for _, _, spec in found), (
        "reductions wider than the row, and none, must be left out"
    )
    at = {spec: found["resid_mid", 1, spec] for _, _, spec in found}
    assert at["int8"].measures["cosine_least"] > 0.9999 > at["fp8"].measures["cosine_least"] > 0.999
    assert at["round(23)"].measures["error"] == 0 and at["round(23)"].size == 1
    assert at["int8"].size == pytest.approx((96 + 4) / 384)
    assert at["topk(64)"].measures["recall"] == 1
    assert at[f"pca({basis})"].measures["variance"] > 0.99
    assert at["rp(32)"].measures["pairs"] > 0.5
    neurons = {f.reduction: f for f in fidelity(stores, ["topk(64,exact)"], "mlp_*")}["topk(64,exact)"]
    assert neurons.measures["recall"] == 1 and neurons.tokens == 3 * TOKENS and neurons.width == 700


def test_the_error_of_topk_is_the_share_of_the_values_it_drops(stores: list[Path]) -> None:
    """Half of the values of each row are kept. The expected error is computed here."""
    [one] = fidelity(stores[:1], ["topk(48,exact)"], "resid_mid", [0])
    assert one.measures["recall"] == 1
    share = one.measures["error"] ** 2
    exact = rows(0, 1)[0].view("f4").astype(np.float64)
    lost = np.sort(exact**2, axis=1)[:, :48].sum() / (exact**2).sum()
    assert share == pytest.approx(lost, rel=1e-3)


def test_dmi_fidelity_prints_a_table_or_json(stores: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fidelity", str(stores[0]), "--hooks", "resid_*", "--reduce", "int8", "--reduce", "fp8"]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert table.startswith("| hook | width | reduction | size | cosine least |")
    assert table.count("| resid_mid | 96 |") == 2 and "- cosine least: lowest cosine between a row" in table
    assert main([*command, "--layer", "1", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["layer"], one["reduction"]) for one in listed] == [(1, "int8"), (1, "fp8")]
    worst = min(one.measures["cosine_least"] for one in fidelity(stores[:1], ["int8"], "resid_mid"))
    assert f"{worst:.5f}" in markdown(fidelity(stores[:1], ["int8"], "resid_mid"))
    assert main(["fidelity", str(stores[0]), "--hooks", "q"]) == 2
    assert "holds no hook in full that matches 'q'" in capsys.readouterr().err
    assert main(["fidelity", str(stores[0]), "--reduce", "int9"]) == 2
    assert "'int9' is unknown" in capsys.readouterr().err


def test_measures_that_are_not_finite_are_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no NaN, and other programs cannot read Python's."""
    store = spoilt(tmp_path / "nan.zarr", slice(3, 4), np.nan)
    assert main(["fidelity", str(store), "--hooks", "resid_mid", "--layer", "0", "--reduce", "int8", "--json"]) == 0
    out = capsys.readouterr().out
    assert "NaN" not in out and json.loads(out)[0]["measures"]["error"] is None


def test_stores_without_rows_are_left_out_or_named(
    stores: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    owner, empty = kit.Store(), tmp_path / "empty.zarr"
    owner.write(empty, [RESID, NEURONS, INT8], 0)
    assert owner.shutdown(kit.PATIENCE)
    assert main(["fidelity", str(empty)]) == 2
    assert f"dmi: fidelity: {empty} hold no rows; give a store with rows" in capsys.readouterr().err
    assert fidelity([empty, stores[0]], ["int8(32)"], "resid_mid") == fidelity(stores[:1], ["int8(32)"], "resid_mid")
    assert caplog.messages == [f"fidelity: {empty} holds no rows; it is left out"]


def test_fidelity_checks_the_model_and_the_rows_of_every_store(
    stores: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, other, reduced = kit.Store(4 << 20), tmp_path / "other.zarr", tmp_path / "reduced.zarr"
    owner.write(other, [RESID], TOKENS, attrs={"model": "another"})
    settings = {"kind": "rp", "k": WIDTH, "distribution": "orthogonal", "seed": 0, "dtype": "float32", "width": WIDTH}
    owner.write(reduced, [ArraySpec("resid_mid", "uint8", (0, 1), WIDTH + 4, reduce=settings)], TOKENS)
    assert owner.shutdown(kit.PATIENCE)
    for store, said in (
        (other, f"{other} is of the model another, {stores[0]} of tiny: their rows cannot be mixed; name one"),
        (reduced, f"fidelity: resid_mid of {reduced} is stored reduced; give stores that hold it in full, or name"),
    ):
        assert main(["fidelity", str(stores[0]), str(store), "--hooks", "resid_mid", "--reduce", "int8"]) == 2
        assert said in capsys.readouterr().err


def test_more_stores_than_files_may_be_open(stores: list[Path], tmp_path: Path) -> None:
    many, (soft, hard) = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(120):
        many.append(tmp_path / f"{number}.zarr")
        shutil.copytree(stores[number % 3], many[-1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    try:
        found = fidelity(many, ["int8(32)"], "resid_mid", [0])
        fit_pca.fit_pca(many, ["resid_mid"], 2, tmp_path / "basis", [0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [one.tokens for one in found] == [120 * TOKENS]


def test_fidelity_counts_negative_layers_from_the_last(stores: list[Path], tmp_path: Path) -> None:
    [one] = fidelity(stores[:1], ["int8"], "resid_mid", [-1])
    assert [one] == fidelity(stores[:1], ["int8"], "resid_mid", [1])
    owner, more = kit.Store(), tmp_path / "more.zarr"
    owner.write(more, [RESID, FINAL], 20, attrs={"num_layers": 3})
    assert owner.shutdown(kit.PATIENCE)
    assert {f.layer for f in fidelity([more], ["int8"], layers=[-2])} == {1, None}
    assert [f.layer for f in fidelity([more], ["int8"], "resid_final", [0])] == [None], "resid_final exists once"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "99"], "--layer 99 of resid_mid is not in {store}; it has 0, 1"),
        (["--layer", "1", "--layer", "-3"], "--layer -3 of resid_mid is not in {store}; it has 0, 1"),
        (["--reduce", "rp(9999)"], "(reduce: rp(9999) is wider than the 96 values of a row; give a smaller k)"),
        (["--reduce", "none"], "no reduction can be measured ('none' is not a reduction); give another --reduce"),
        (
            ["--reduce", "none", "--reduce", "topk(97)"],
            "not a reduction; reduce: topk(97) keeps more than the 96 values",
        ),
    ],
)
def test_fidelity_says_why_nothing_is_measured(
    stores: list[Path], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fidelity", str(stores[0]), "--hooks", "resid_mid", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message.replace("{store}", str(stores[0])) in err, err


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/passwd", "", "A" * 64, "0" * 63])
def test_a_store_can_name_its_basis_only_by_its_sha256(tmp_path: Path, basis: Path, name: str) -> None:
    (tmp_path / "bases").mkdir()
    with pytest.raises(ValueError, match="which is not a SHA-256"):
        find_fitted(Basis, name, tmp_path / "a.zarr")
    with pytest.raises(ValueError, match="holds another basis file"):
        find_fitted(Basis, "0" * 64, tmp_path / "a.zarr", basis)


def test_the_copy_of_a_basis_is_private_and_made_once(tmp_path: Path, basis: Path) -> None:
    for _ in range(2):
        keep_copy(str(basis), Basis.load(basis).sha256, BASES, str(tmp_path), "private")
    [copy] = (tmp_path / "bases").iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600 and copy.parent.stat().st_mode & 0o777 == 0o700
    assert find_fitted(Basis, Basis.load(basis).sha256, tmp_path / "a.zarr").sha256 == Basis.load(basis).sha256
