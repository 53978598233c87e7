# SPDX-License-Identifier: Apache-2.0
"""The stored outputs of the notebooks of examples/, which GitHub shows. `make notebooks` writes them."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests import notebookkit

PATHS = re.compile(r"(?<![\w:/])/(?:[\w.-]+/)+[\w.-]+")
TIMES = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b")
MOST_BYTES = 1_000_000


def outputs(name: str) -> list[nbformat.NotebookNode]:
    return [output for cell in notebookkit.stored(name).cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", notebookkit.NAMES)
def test_the_outputs_are_those_of_the_code(name: str) -> None:
    notebook = notebookkit.stored(name)
    assert notebook.metadata.outputs_of == notebookkit.fingerprint(notebook), f"run make notebooks NAMES={name}"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], "every cell must have run, in order"


@pytest.mark.parametrize("name", notebookkit.NAMES)
def test_what_the_code_imports_exists(name: str) -> None:
    """`make soak` runs notebooks that train; in `make test` only their imports are checked."""
    code = "\n".join(cell.source for cell in notebookkit.stored(name).cells if cell.cell_type == "code")
    lines = [line for line in code.splitlines() if not line.lstrip().startswith(("!", "%"))]
    imports = [one for one in ast.walk(ast.parse("\n".join(lines))) if isinstance(one, ast.ImportFrom)]
    ours = [one for one in imports if str(one.module).startswith("dmi_connector")]
    assert ours
    for one in ours:
        module = importlib.import_module(str(one.module))
        assert [alias.name for alias in one.names if not hasattr(module, alias.name)] == [], one.module


@pytest.mark.parametrize("name", notebookkit.NAMES)
def test_the_outputs_are_pictures_and_text_of_no_machine(name: str) -> None:
    found = outputs(name)
    assert any("image/png" in output.get("data", {}) for output in found)
    for output in found:
        assert output.output_type != "error" and output.get("name") != "stderr"
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not PATHS.search(text) and not TIMES.search(text) and "WARNING" not in text, text


def test_the_patterns_find_paths_and_times() -> None:
    assert all(PATHS.search(text) for text in ("/tmp/x", "Capture('/root/a/b.zarr', 3)", "in /usr/lib/python3/a.py:3"))
    assert all(TIMES.search(text) for text in ("WARNING 11-27 18:13:37 [x]", "2026-11-27"))
    assert not PATHS.search("12/14 stored, and/or") and not TIMES.search("0.15078946948051453")


def test_all_notebooks_together_are_small() -> None:
    assert sum(path.stat().st_size for path in notebookkit.EXAMPLES.glob("*.ipynb")) < MOST_BYTES


@pytest.mark.parametrize("name", notebookkit.NAMES)
def test_logs_of_vllm_are_silenced_before_it_is_imported(name: str) -> None:
    code = "\n".join(cell.source for cell in notebookkit.stored(name).cells if cell.cell_type == "code")
    if "import LLM" in code:
        assert "VLLM_LOGGING_LEVEL" in code[: code.index("import LLM")]
    else:
        assert "capture_output=True" in code, "the demo's output must be shown if it fails"


def test_refresh_stores_what_the_cells_print_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nprint(os.environ.get('DMI_STORE'))"
    old = new_code_cell(code, outputs=[new_output("stream", name="stdout", text="old")], execution_count=7)
    monkeypatch.setattr(notebookkit, "EXAMPLES", tmp_path)
    monkeypatch.setenv("DMI_STORE", "mine")
    nbformat.write(new_notebook(cells=[old], metadata={"language_info": {"name": "python"}}), tmp_path / "x.ipynb")
    for _ in range(2):
        notebookkit.refresh("x")
        stored = notebookkit.stored("x")
        assert [(o.name, o.text) for o in stored.cells[0].outputs] == [("stdout", "a\nNone\n")]
        assert stored.metadata == {
            "language_info": {"name": "python"},
            "outputs_of": notebookkit.fingerprint(stored),
        }
    assert stored.cells[0].execution_count == 1 and "execution" not in stored.cells[0].metadata
