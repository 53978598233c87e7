# SPDX-License-Identifier: Apache-2.0
"""The numbers of exported files. Trainers use them to pair files with the rows of a data set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import storekit as kit

SPECS = (ArraySpec("resid_pre", "float32", (0, 1), 8), ArraySpec("resid_final", "float32", (), 8))
ROWS = {"r-000000000": 0, "r-000000001": 4, "r-000000002": 2}
"""{key: row in the data set}. Row 1 was rejected, and row 4 was captured before row 2."""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with three stores and their manifest."""
    root = tmp_path_factory.mktemp("run")
    owner = kit.Store(1 << 22)
    for length, key in zip((9, 8, 7), ROWS, strict=True):
        owner.write(root / f"{key}--{length}.zarr", SPECS, length, attrs={"num_layers": 2}, key=key)
    assert owner.shutdown()
    lines = [
        {"row": row, "id": str(10 + row), "key": key, "store": next(root.glob(f"{key}--*")).name}
        for key, row in ROWS.items()
    ]
    (root / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def captures(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "captures"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], captures: Path, tmp_path: Path) -> Run:
    def call(number_by: str, *stores: Path) -> tuple[int, str, str]:
        given = [str(store) for store in stores or [captures]]
        flags = ["--number-by", number_by, "-o", str(tmp_path / number_by)]
        status = main(["export", *given, "--to", "speculators", *flags])
        return (status, *capsys.readouterr())

    return call


def change(captures: Path, number: int, **fields: object) -> None:
    """Change fields of a line of the manifest."""
    lines = [json.loads(line) for line in (captures / "manifest.jsonl").read_text().splitlines()]
    lines[number] |= fields
    (captures / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(("number_by", "first"), [("row", 0), ("id", 10)])
def test_files_have_the_rows_of_the_input(captures: Path, tmp_path: Path, run: Run, number_by: str, first: int) -> None:
    assert run(number_by) == (0, f"{tmp_path / number_by}: 3 written\n", "")
    names = {f"hs_{first + row}.safetensors": key for key, row in ROWS.items()}
    assert {path.name for path in (tmp_path / number_by).glob("hs_*")} == set(names)
    for name, key in names.items():
        with open_capture(next(captures.glob(f"{key}--*"))) as capture:
            assert load_file(tmp_path / number_by / name)["token_ids"].tolist() == capture.token_ids.tolist()


def test_rows_of_shares_are_joined_and_the_later_line_counts(captures: Path, tmp_path: Path, run: Run) -> None:
    lines = (captures / "manifest.jsonl").read_text().splitlines(keepends=True)
    (captures / "manifest.jsonl").unlink()
    (captures / "manifest-0-of-2.jsonl").write_text(lines[0].replace('"row": 0', '"row": 8') + lines[2] + lines[0])
    (captures / "manifest-1-of-2.jsonl").write_text(lines[1])
    assert run("row")[0] == 0
    assert {path.name for path in (tmp_path / "row").glob("hs_*")} == {f"hs_{row}.safetensors" for row in (0, 2, 4)}


def test_order_says_that_it_is_not_the_row(captures: Path, run: Run) -> None:
    status, text, _ = run("order")
    assert status == 0 and text.endswith(
        "3 written; file N is not of row N of the input of dmi run: file 1 is of row 4; use --number-by row\n"
    )
    change(captures, 1, row=1)
    assert run("order")[1].endswith("3 already existed\n"), "file N must be of row N"


def test_keys_of_a_run_are_distinguished_from_other_keys(run: Run) -> None:
    status, _, error = run("key")
    assert status == 2 and "is from dmi run; use --number-by row" in error and "order" not in error


def test_an_unusable_number_of_a_store_is_refused_with_the_fix(captures: Path, run: Run) -> None:
    change(captures, 2, id="doc-2")
    assert "the id 'doc-2' of" in (error := run("id")[2]) and "use --number-by row" in error
    change(captures, 2, row=4)
    assert "have the row 4; export them into two directories" in run("row")[2]
    lines = (captures / "manifest.jsonl").read_text().splitlines(keepends=True)
    (captures / "manifest.jsonl").write_text("".join(lines[:2]))
    assert "no line of manifest*.jsonl names" in (error := run("row")[2]) and "repeat the dmi run" in error
    change(captures, 1, row=1)
    assert "file 2 is of a row that the manifest lacks" in run("order")[1]
    (captures / "manifest.jsonl").unlink()
    assert "no manifest*.jsonl of dmi run is beside" in run("row")[2]
