# SPDX-License-Identifier: Apache-2.0
"""docs/TYPES.md: tests run each code block, and the table of formats equals that of `dmi export`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dmi_connector import open_capture
from dmi_connector.analysis.export.targets import TARGETS
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import snippets
from tests import storekit as kit


def test_a_test_runs_each_block_of_the_page() -> None:
    """Tests in tests/types run with `make types`."""
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    found = snippets.blocks()
    assert len(found) > 8
    run = {"python": "run", "sh": "commands"}
    lacking = [(title, kind) for title, kind in found if f'snippets.{run[kind]}("{title}"' not in tests]
    assert not lacking


def test_the_commands_for_files_of_other_programs_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = kit.Store(1 << 22)
    specs = [ArraySpec("resid_pre", "bfloat16", (0, 1, 2), 16), ArraySpec("resid_final", "bfloat16", (), 16)]
    for name in ("NAME", "b"):
        owner.write(tmp_path / f"captures/{name}.zarr", specs, 40, attrs={"num_layers": 3})
    assert owner.shutdown()
    monkeypatch.chdir(tmp_path)
    for words in snippets.commands("Files of other programs"):
        assert words[0] == "dmi" and main(words[1:]) == 0, words
    files = sorted(path.name for path in Path("data/hidden_states").glob("hs_*"))
    assert files == ["hs_0.safetensors", "hs_1.safetensors"]
    found = load_file("NAME.safetensors")
    with open_capture("captures/NAME.zarr") as capture:
        assert found["hidden_states"].shape == (40, 4, 16) and (found["token_ids"] == capture.token_ids).all()
        assert (found["hidden_states"][:, 1] == capture.numpy("resid_pre", 1, convert=False)).all()


def test_the_table_of_formats_is_that_of_the_command() -> None:
    page = (snippets.DOCS / "TYPES.md").read_text()
    section = page[page.index("\n## Files of other programs\n") :].split("\n## ")[1]
    rows = re.findall(r"^\| `(\w[\w-]*)` \| .* \| (.*?) ?\|$", section, re.MULTILINE)
    shown = {name: set(re.findall(r"`--([\w-]+)`", options)) for name, options in rows}
    assert shown == {name: {o.replace("_", "-") for o in target.options} for name, target in TARGETS.items()}
