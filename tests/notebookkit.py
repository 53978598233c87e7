# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of examples/."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def read(name: str) -> nbformat.NotebookNode:
    """A notebook of examples/, which is stored without outputs."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    return notebook


def execute(notebook: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch, **env: str) -> tuple[str, int]:
    """(Text that the cells print, number of pictures). env: of the kernel. Raises CellExecutionError."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    return "".join(o.get("text", "") for o in outputs), len(pictures)
