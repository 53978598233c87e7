# SPDX-License-Identifier: Apache-2.0
"""Imports between rooms follow the rules in pyproject.toml, [tool.importlinter]."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests import rooms

ROOT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the package in a folder against the rules of the pyproject.toml there."""
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True)


def test_imports_keep_the_rules() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "code", "broken"),
    [
        ("hooks.py", "import dmi_connector.layout", "Imports run downwards"),
        ("store/format/schema.py", "import dmi_connector.store.read.verify", "Imports run downwards"),
        ("store/read/verify.py", "import dmi_connector.analysis.pictures.plot", "Imports run downwards"),
        ("store/read/verify.py", "import dmi_connector.captures.capture", "Imports run downwards"),
        ("engine/contract.py", "import dmi_connector.engine.context", "No import cycles"),
        (
            "captures/attention.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dmi_connector.captures.capture",
            "No import cycles",
        ),
        (
            "store/read/arrays/hook_array.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dmi_connector.store.read.reader",
            "No import cycles",
        ),
        ("settings.py", "import vllm", "Only the engine imports vllm"),
        ("store/read/metadata.py", "import torch", "Stores need no torch"),
        ("store/read/arrays/chunk.py", "from numcodecs import blosc", "Only codecs import"),
    ],
)
def test_an_import_against_the_rules_is_found(file: str, code: str, broken: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = shutil.copytree(ROOT / "dmi_connector", tmp_path / "dmi_connector")
    source = package / file
    source.write_text(source.read_text() + f"\n{code}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    assert any(broken in row and "BROKEN" in row for row in done.stdout.splitlines()), done.stdout


# ---- the drawing of rooms in CONTRIBUTING.md ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return rooms.read_imports()


def test_the_drawing_of_rooms_is_what_the_imports_give(graph: grimp.ImportGraph) -> None:
    assert rooms.drawing() == rooms.draw(graph), "rooms or imports changed: update CONTRIBUTING.md with `make rooms`"


def test_the_drawing_has_each_room_and_direct_imports_that_no_others_imply(graph: grimp.ImportGraph) -> None:
    drawn = rooms.draw(graph)
    packages = {path.parent.name for path in (ROOT / "dmi_connector").glob("*/**/__init__.py")} - {"store"}
    assert len(packages) > 20 and all(f"{name}_[" in drawn for name in packages)
    assert "  captures_ --> store_read_\n" in drawn and "view_ --> analysis_\n" in drawn
    assert "analysis_ --> captures_\n" in drawn, "the drawing must leave out imports that others imply"


def test_the_drawing_follows_an_import(graph: grimp.ImportGraph) -> None:
    changed = copy.deepcopy(graph)
    changed.add_import(importer="dmi_connector.engine.context", imported="dmi_connector.captures.capture")
    assert "  engine_ --> captures_ & store_write_\n" in rooms.draw(changed)
