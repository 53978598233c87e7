# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of examples/. As a program, it stores their outputs: `python -m tests.notebookkit [NAME ...]`."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

from tests.programs import Program

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = tuple(sorted(path.stem for path in EXAMPLES.glob("*.ipynb")))


def stored(name: str) -> nbformat.NotebookNode:
    """A notebook of examples/ with its stored outputs."""
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def read(name: str) -> nbformat.NotebookNode:
    """A notebook of examples/ without outputs."""
    notebook = stored(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """SHA-256 of the code cells. A notebook's stored outputs name the fingerprint of the code that printed them."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


class Mistake(NamedTuple):
    """Wrong code that the checks in later cells must detect. It runs after the cell that contains `after`, then the
    later cells run again.

    quick: (text in later cells, its replacement), to make them faster or to change them too.
    """

    after: str
    code: str
    error: str = "AssertionError"
    quick: tuple[str, str] = ("", "")


def shorter(notebook: nbformat.NotebookNode, text: str, instead: str) -> nbformat.NotebookNode:
    """The notebook with `text`, which must be in one cell, replaced by `instead`, for fewer training steps."""
    [cell] = [cell for cell in notebook.cells if text in cell.source]
    cell.source = cell.source.replace(text, instead)
    return notebook


def fork_kernels(patch: pytest.MonkeyPatch) -> None:
    """Fork kernels, and the engines that notebooks start, from the process of programs.py, which has imported vLLM."""

    def launch(command: list[str], env: Mapping[str, str], cwd: str | None = None, **_: Any) -> Any:
        own = {**env, "JPY_PARENT_PID": str(os.getpid())}  # with it a kernel ends when its parent has ended
        directory = Path(cwd) if cwd else None
        return Program(command, stdout=sys.__stdout__, stderr=sys.__stderr__, env=own, cwd=directory, group=True)

    patch.setattr(local_provisioner, "launch_kernel", launch)


def execute(
    notebook: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch, mistakes: Sequence[Mistake] = (), **env: str
) -> tuple[str, int]:
    """Run a notebook. Returns (printed text, number of pictures). env: environment variables of the kernel. Raises
    CellExecutionError.

    mistakes: run one after another in the same kernel, after all cells. Fails if a mistake is not detected.
    """
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True)
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        pictures = [o for o in outputs if "image/png" in o.get("data", {})]
        for mistake in mistakes:
            places = [i for i, cell in enumerate(notebook.cells) if mistake.after in cell.source]
            rest = [copy.deepcopy(cell) for cell in notebook.cells[places[0] + 1 :] if cell.cell_type == "code"]
            with pytest.raises(CellExecutionError, match=mistake.error):
                for cell in [new_code_cell(mistake.code), *rest]:
                    cell.source = cell.source.replace(*mistake.quick) if mistake.quick[0] else cell.source
                    client.execute_cell(cell, 0)
    return "".join(o.get("text", "") for o in outputs), len(pictures)


def refresh(name: str) -> None:
    """Run a notebook in a new kernel, and store it with its printed text and pictures. Raises CellExecutionError.

    Standard error is left out, because it has progress bars and warnings with paths of this machine.
    """
    notebook = read(name)
    about = copy.deepcopy(notebook.metadata)  # a run adds the version of Python
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory(prefix="n") as folder:
        for own in ("DMI_STORE", "DMI_CAPTURES"):
            monkeypatch.delenv(own, raising=False)
        execute(notebook, monkeypatch, TMPDIR=folder)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = about | {"outputs_of": fingerprint(notebook)}
    nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        print(name, flush=True)
        refresh(name)
