# SPDX-License-Identifier: Apache-2.0
"""The settings of `make mutants` only name files and functions that exist."""

from __future__ import annotations

import ast
import configparser
import json
import re
from pathlib import Path

from tests.mutants.run import copy_tree, made_name

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "tests" / "mutants"


def test_paths_in_the_settings_exist() -> None:
    settings = configparser.ConfigParser()
    settings.read(MUTANTS / "setup.cfg")
    named = [
        path
        for key in ("only_mutate", "do_not_mutate", "pytest_add_cli_args_test_selection")
        for path in settings["mutmut"][key].split()
    ]
    named += re.findall(r"--deselect=(\S+?)::", settings["mutmut"]["pytest_add_cli_args"])
    lacking = [path for path in named if not list(ROOT.glob(path))]
    assert len(named) > 20 and not lacking, f"tests/mutants/setup.cfg names {lacking}"


def functions(file: Path) -> set[str]:
    """Functions and methods of a file in mutmut's notation: x_name, xǁClassǁname."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        names |= {f"xǁ{node.name}ǁ{each.name}" for each in inside if isinstance(each, ast.FunctionDef)}
        names |= {f"x_{node.name}"} if isinstance(node, ast.FunctionDef) else set()
    return names


def test_survivors_are_mutants_of_functions_that_exist() -> None:
    lacking = []
    named = json.loads((MUTANTS / "survivors.json").read_text())
    for mutant in named:
        module, function = re.fullmatch(r"(.+)\.(x.+)__mutmut_\d+", mutant).groups()  # type: ignore[union-attr]
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file() or function not in functions(file):
            lacking.append(mutant)
    assert len(named) > 20 and not lacking, f"tests/mutants/survivors.json names {lacking}"


def test_mutants_of_files_that_are_gone_are_not_counted(tmp_path: Path) -> None:
    """All numbers in made/ are added, and a tree is kept from run to run."""
    for folder in ("made", "mutants"):
        (tmp_path / folder).mkdir()
    here, gone = made_name("dmi_connector/layout.py"), made_name("dmi_connector/renamed_since.py")
    for name in (here, gone):
        (tmp_path / "made" / name).write_text("7")
    copy_tree(tmp_path)
    assert [path.name for path in (tmp_path / "made").iterdir()] == [here]
    assert (tmp_path / "dmi_connector/layout.py").is_file()
