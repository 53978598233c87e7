# SPDX-License-Identifier: Apache-2.0
"""Commands on a base install without optional libraries, and commands that take directories of stores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1), 8),
    ArraySpec("resid_final", "bfloat16", (), 8),
    ArraySpec("final_ln", "bfloat16", (), 8),
    ArraySpec("topk_ids", "int32", (0, 1), 2),
)
OPTIONAL = [
    "torch",
    "matplotlib",
    "pandas",
    "polars",
    "obstore",
    "starlette",
    "uvicorn",
    "vllm",
    "transformers",
    "tqdm",
    "pyarrow",
    "datasets",
    "xarray",
    "dask",
    "triton",
    "transformer_lens",
    "ray",
    "tokenizers",
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two complete stores, and one with missing rows."""
    root, owner = tmp_path_factory.mktemp("stores"), kit.Store(1 << 20)
    attrs = {"num_layers": 2, "dtype": "bfloat16", "versions": {}, "experts": {"count": 4, "layers": [0, 1]}}
    for name in "ab":
        owner.write(root / f"{name}.zarr", SPECS, 40, attrs=attrs)
    owner.write(root / "c.zarr", SPECS, 40, attrs=attrs, losses=[Loss.of(Cause.FELL_BEHIND, [[2, 3]])])
    assert owner.shutdown()
    return root


def test_each_command_names_the_extra_that_it_lacks(stores: Path, tmp_path: Path) -> None:
    one, key = str(stores / "a.zarr"), ["--hook", "resid_pre@1"]
    commands = {
        "demo": ["--dir", str(tmp_path / "demo")],
        "serve": ["model", "--hooks", "q", "--store-dir", str(tmp_path)],
        "run": ["--model", "model", "--prompts", "p.parquet", "--out", str(tmp_path / "out")],
        "ls": [str(stores)],
        "tail": [str(stores), "--once"],
        "info": [one],
        "verify": [one],
        "repair": [str(stores)],
        "prune": [str(stores), "--keep-bytes", "1T"],
        "diff": [one, one],
        "fit-pca": [one, "--hook", "resid_pre", "--rank", "2", "-o", str(tmp_path / "pca.safetensors")],
        "fit-pq": [one, "--hook", "resid_pre", "--subvectors", "2", "-o", str(tmp_path / "pq.safetensors")],
        "fidelity": [one],
        "plot": [one, "-o", str(tmp_path / "x.png")],
        "view": [str(stores)],
    }
    argv = [[name, *rest] for name, rest in commands.items()] + [["ls", "s3://bucket/captures"]]
    for to in ("safetensors", "zip", "speculators", "specforge", "routed-experts", "saelens"):
        flags = [*(key if to == "saelens" else []), "-o", str(tmp_path / to)]
        argv.append(["export", one, "--to", to, *flags])
    code = f"""
import contextlib, importlib.util, io, json, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {OPTIONAL!r} else find_spec(name, *more)
from dmi_connector.cli.main import main
for argv in {argv!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([argv[0] if argv[0] != "export" else argv[3], status, err.getvalue()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lacking = set()
    for name, status, error in map(json.loads, done.stdout.splitlines()):
        assert "No module named" not in error and "import of" not in error, (name, error)
        if status:
            assert status == 2 and "not installed" in error and "install dmi_connector[" in error, (name, error)
            lacking.add(name)
    assert lacking == {"demo", "serve", "run", "fit-pq", "fidelity", "plot", "view", "ls", "specforge", "saelens"}


@pytest.mark.parametrize("form", ["directory", "stores", "zip"])
def test_fidelity_and_fit_pca_take_directories_as_other_commands_do(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    given = {"directory": [stores], "stores": [stores / "a.zarr", stores / "b.zarr"], "zip": [tmp_path / "a.zip"]}[form]
    if form == "zip":
        assert main(["export", str(stores / "a.zarr"), "--to", "zip", "-o", str(given[0])]) == 0
    capsys.readouterr()
    paths = [str(path) for path in given]
    assert main(["fidelity", *paths, "--hooks", "resid_pre", "--reduce", "int8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [one["tokens"] for one in json.loads(out)] == [40 if form == "zip" else 80] * 2
    left = f"{stores}: 1 left out, because they are incomplete (dmi ls lists them)\n"
    assert err == (left if form == "directory" else "")
    basis = tmp_path / "basis.safetensors"
    assert main(["fit-pca", *paths, "--hook", "resid_pre", "--rank", "2", "-o", str(basis)]) == 0 and basis.exists()
    assert capsys.readouterr().err == "", "the command must read the rows that are not missing"


def test_directories_without_what_is_wanted_are_named(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for command in (["fidelity"], ["fit-pca", "--hook", "q", "--rank", "1", "-o", str(tmp_path / "x")]):
        assert main([*command, str(tmp_path / "empty")]) == 2
        assert "empty holds no finished store (*.zarr); give a store or a directory" in capsys.readouterr().err
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking/c.zarr").symlink_to(stores / "c.zarr")
    assert main(["fidelity", str(tmp_path / "lacking")]) == 2
    assert "fidelity: every store lacks rows (dmi ls says which); capture them again" in capsys.readouterr().err
