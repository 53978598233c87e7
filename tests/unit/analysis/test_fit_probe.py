# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-probe`: the fitted probe, the held-out captures, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dmi_connector.analysis.fit_probe import fit_probe, read_labels
from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.probe_file import load
from tests import storekit as kit
from tests.probekit import scores

STORES, ROWS, WIDTH = 20, 30, 16
AXIS = 5
"""Column that separates the two labels. Their means differ by 2, with a standard deviation of 1."""
SPECS = (ArraySpec("resid_pre", "float32", (1, 3), WIDTH), ArraySpec("resid_final", "float32", (), WIDTH))


def label(number: int) -> int:
    return int(number % 4 == 0)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores. A quarter has label 1. Only layer 3 depends on the label; layer 1 and resid_final do not."""
    folder = tmp_path_factory.mktemp("captures")
    owner, rng = kit.Store(1 << 22), np.random.default_rng(0)
    for number in range(STORES):
        values = {spec.name: rng.standard_normal((spec.n_layers, ROWS, WIDTH)).astype("f4") for spec in SPECS}
        values["resid_pre"][1, :, AXIS] += 3 + 2 * label(number)  # the values of neither label are centred at 0
        flat = {name: array.view("u4") for name, array in values.items()}
        names = {"key": f"key-{number}", "request_id": f"request-{number}"}
        owner.write(folder / f"{number:02}.zarr", SPECS, ROWS, values=flat, attrs={"num_layers": 4}, **names)
    assert owner.shutdown(kit.PATIENCE)
    return sorted(folder.glob("*.zarr"))


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text("key,label\n" + "".join(f"key-{number},{label(number)}\n" for number in range(STORES)))
    return path


def test_a_probe_finds_the_direction_in_which_labels_differ(
    stores: list[Path], labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "risk.safetensors"
    command = ["fit-probe", str(stores[0].parent), "--labels", str(labels), "--hook", "resid_pre", "--layer", "-1"]
    assert main([*command, "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["captures"], found["rows"], found["held_out"], found["held_rows"]) == (16, 480, 4, 120)
    # Two normal distributions with this distance have the accuracy Phi(1) = 0.84 with equal priors and 0.87 with priors
    # of 1/4 and 3/4. Their AUC is Phi(sqrt(2)) = 0.92.
    assert 0.8 < found["accuracy"] < 0.95 and found["baseline"] == 0.75 and 0.85 < found["auc"] < 0.98
    file = load(out)
    assert (file.facts.hook, file.facts.layers, file.facts.outputs, file.facts.output) == (
        *("resid_pre", (3,), ("risk",)),
        "sigmoid",
    )
    with safe_open(out, framework="np") as written:
        told = json.loads(written.metadata()["dmi_probe"])["about"]
    share = f"{found['accuracy']:.4f}"
    about = {"fit": "difference of means", "rows": "all", "captures": "16", "held_out_accuracy": share}
    assert told == {**about, "baseline": "0.7500"}
    weight = file.of(3)[0][0][0]
    assert np.abs(weight).argmax() == AXIS and np.abs(weight[AXIS]) > 3 * np.delete(np.abs(weight), AXIS).max()
    rows = np.concatenate([open_capture(store, 0).numpy("resid_pre", 3) for store in stores])
    truth = np.repeat([label(number) for number in range(STORES)], ROWS)
    probability = scores(out, rows, 3)[:, 0]
    for low, high in ((0.0, 0.2), (0.2, 0.6), (0.6, 1.0)):
        inside = (probability >= low) & (probability < high)
        assert abs(truth[inside].mean() - probability[inside].mean()) < 0.15, "a score must be a probability"
    assert main([*command, "-o", str(tmp_path / "again.safetensors")]) == 0
    assert f"accuracy {found['accuracy']:.3f}, baseline (more frequent label) 0.750; AUC" in capsys.readouterr().out
    np.testing.assert_array_equal(load(tmp_path / "again.safetensors").of(3)[0][0], file.of(3)[0][0])


def test_a_hook_without_information_is_no_better_than_the_frequent_label(stores: list[Path], tmp_path: Path) -> None:
    labels = {("store", store.name): bool(label(number)) for number, store in enumerate(stores)}
    found = fit_probe(stores, labels, "resid_final", tmp_path / "p.safetensors", held_out=0.5)
    assert found.accuracy <= found.baseline + 0.05 and abs(found.auc - 0.5) < 0.15
    assert load(tmp_path / "p.safetensors").facts.layers == ()


def test_rows_and_stores_without_labels_are_left_out(
    stores: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = {("request_id", f"request-{number}"): bool(label(number)) for number in range(STORES - 4)}
    labels |= {("key", "nobody"): True}
    out = tmp_path / "p.safetensors"
    found = fit_probe(stores, labels, "resid_pre", out, layer=3, rows="prompt")
    assert (
        found.captures + found.held_out == STORES - 4 and found.rows == ROWS // 2 * found.captures
    )  # half of the rows belong to prompts
    assert "1 of 17 labels name no store" in caplog.text and "4 of 20 stores have no label" in caplog.text


def test_rows_that_are_not_finite_are_left_out_of_the_fit_and_of_the_test(
    stores: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner, spec = kit.Store(1 << 20), SPECS[1]
    values = np.random.default_rng(1).standard_normal((1, ROWS, WIDTH)).astype("f4")
    values[0, 7, 3], values[0, 9, 0] = np.nan, np.inf
    bad = [tmp_path / f"{number}.zarr" for number in range(8)]  # enough stores that some are held out
    for path in bad:
        owner.write(path, [spec], ROWS, values={spec.name: values.view("u4")})
    assert owner.shutdown(kit.PATIENCE)
    every = [*stores, *bad]
    labels = {("store", store.name): number % 2 == 0 for number, store in enumerate(every)}
    found = fit_probe(every, labels, "resid_final", tmp_path / "p.safetensors", held_out=0.5)
    assert found.rows + found.held_rows == len(every) * ROWS - 2 * len(bad)
    assert 0 < found.held_rows < found.held_out * ROWS and abs(found.auc - 0.5) < 0.2
    assert "row 7 of " in caplog.text and "such rows, in 8 stores, are left out" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no label; give a CSV file with a header, or JSON lines"),
        ("key,label\na,maybe\n", "line 2 is .* give key, request_id or store, and the label 0 or 1"),
        ("name,label\na,1\n", "line 2 is .*'name'"),
        ('{"key": "a", "label": 1}\n{"key": "a"', "line 2 is not a JSON object"),
        ('{"key": "a", "label": 1}\n{"key": "a", "label": false}', "key 'a' has both labels"),
        (
            "text,key,label\n" + 200_000 * "x" + ",a,1\n",
            "line 2 is not CSV .*field larger than field limit",
        ),
        ("key,label\n\udce9,1\n", "the text is not UTF-8 .*save it as UTF-8"),
    ],
)
def test_labels_that_cannot_be_read_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"^--labels .*{message}"):
        read_labels(path)


def test_labels_are_lines_of_json_too(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"key": "a", "label": true}\n\n{"request_id": 3, "label": 0}\n{"store": "x.zarr", "label": "1"}\n')
    assert read_labels(path) == {("key", "a"): True, ("request_id", "3"): False, ("store", "x.zarr"): True}


@pytest.mark.parametrize(
    "text",
    [
        'key,text,label\na,"two\nlines",1\nb,x\x0c\u2028,0\n',
        '{"key": "a", "text": "x\u2028\x85", "label": 1}\n{"key": "b", "label": 0}\n',
    ],
    ids=["csv", "json"],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_lines_of_labels_end_only_at_line_feeds(text: str, mark: str, tmp_path: Path) -> None:
    """Texts may have other line separators. Spreadsheets write a byte order mark at the start of UTF-8 files."""
    path = tmp_path / "labels"
    path.write_text(mark + text, "utf-8")
    assert read_labels(path) == {("key", "a"): True, ("key", "b"): False}


def test_invalid_fits_are_refused(stores: list[Path], tmp_path: Path) -> None:
    every = {("store", store.name): bool(label(number)) for number, store in enumerate(stores)}
    few = dict(list(every.items())[:4])
    out = tmp_path / "p.safetensors"
    with pytest.raises(ValueError, match="1 captures have the label 1; 2 or more are needed"):
        fit_probe(stores, few, "resid_pre", out, 3)
    strangers = {("key", "doc-0"): True, ("key", "doc-1"): False}
    told = r"no label names a store: the first label is of key 'doc-0', and the last store has key .*, store '.*'; give"
    with pytest.raises(ValueError, match=told):
        fit_probe(stores, strangers, "resid_pre", out, 3)
    with pytest.raises(ValueError, match="resid_pre has several layers; name one with --layer"):
        fit_probe(stores, every, "resid_pre", out)
    with pytest.raises(KeyError, match="has no layer 2"):
        fit_probe(stores, every, "resid_pre", out, 2)
    with pytest.raises(ValueError, match=r"--held-out 1\.0 is not valid"):
        fit_probe(stores, every, "resid_pre", out, 3, held_out=1.0)
    with pytest.raises(ValueError, match=r"^--seed -1 is not valid; give 0 or more$"):
        fit_probe(stores, every, "resid_pre", out, 3, seed=-1)
    out.touch()
    with pytest.raises(FileExistsError, match="exists; give a new name"):
        fit_probe(stores, every, "resid_pre", out, 3)
