# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM and Python are those that `make compat` ran without a failure."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.checks import compat
from benchmarks.common import END, ROOT
from dmi_connector.engine import contract

RESULTS: dict[str, Any] = json.loads(compat.RESULTS.read_text())
RUNS: list[dict[str, Any]] = RESULTS["runs"]
CPU_RUNS = [run for run in RUNS if run["runner"] != "GPU"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def minor(version: str) -> str:
    """The minor version, such as 0.32 of 0.32.0+cpu."""
    return ".".join(version.split(".")[:2])


def after(version: str) -> str:
    """The next minor version."""
    major, _, last = version.partition(".")
    return f"{major}.{int(last) + 1}"


VLLM = sorted({minor(run["vllm"]) for run in RUNS}, key=Version)
PYTHON = sorted({run["python"] for run in CPU_RUNS}, key=Version)


def test_every_environment_was_run_on_each_of_its_runners_and_nothing_failed() -> None:
    wanted = {(e.name, runner): compat.CORE[runner] for e in compat.ENVIRONMENTS for runner in e.runners}
    ran: dict[tuple[str, str], list[str]] = {}
    for run in RUNS:  # a run on a GPU may be split
        ran.setdefault((run["environment"], run["runner"]), []).extend(run["tests"])
    assert {key: tuple(tests) for key, tests in ran.items()} == wanted
    for run in RUNS:
        assert (run["failed"], run["failures"]) == (0, []), run["environment"]
        assert run["passed"] > (100 if run["runner"] != "GPU" else 0) and run["skipped"] <= run["passed"] / 10, run
        assert re.fullmatch(r"[0-9a-f]{7,}", run["commit"]), f"{run['environment']} ran with uncommitted changes"
        assert run["environment"] == f"vllm-{minor(run['vllm'])}-py{run['python']}"


def test_the_contract_promises_the_versions_of_vllm_that_were_run() -> None:
    assert f">={VLLM[0]},<{after(VLLM[-1])}" == contract.SUPPORTED
    promised = [f"0.{n}" for n in range(100) if SpecifierSet(contract.SUPPORTED).contains(f"0.{n}.0")]
    assert promised == VLLM, "make compat did not run a version in between"


def test_pyproject_promises_what_was_run() -> None:
    [vllm] = [line for line in PROJECT["optional-dependencies"]["vllm"] if line.startswith("vllm")]
    assert vllm == f"vllm{contract.SUPPORTED}"
    assert PROJECT["requires-python"] == f">={PYTHON[0]},<{after(PYTHON[-1])}"
    classified = {line.split(" :: ")[-1] for line in PROJECT["classifiers"] if "Python :: 3" in line}
    assert classified == set(PYTHON)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CHANGELOG.md"])
def test_pages_promise_the_versions_that_were_run(page: str) -> None:
    text = (ROOT / page).read_text()
    ranges = set(re.findall(r"vLLM (0\.\d+) (?:to|and) (0\.\d+)", text))
    assert ranges == {(VLLM[0], VLLM[-1])}, page
    assert set(re.findall(r"Python (3\.\d+) to (3\.\d+)", text)) <= {(PYTHON[0], PYTHON[-1])}, page


def test_the_table_is_the_one_that_make_compat_wrote() -> None:
    page = compat.PAGE.read_text()
    shown = page[page.index(compat.BEGIN) + len(compat.BEGIN) : page.index(END)]
    assert shown.strip() == compat.table(RESULTS)


def test_a_run_takes_the_place_of_those_of_its_kind(tmp_path: Path) -> None:
    """A run on a GPU may be split. Other fields of the file and the order of the table do not change."""
    path = tmp_path / "compat.json"
    path.write_text(compat.RESULTS.read_text())
    again = {"environment": "vllm-0.33-py3.12", "runner": "GPU", "passed": 98}
    kept = [run for run in RUNS if run["runner"] != "GPU"]
    assert compat.save(again, path) == {**RESULTS, "runs": [again, *kept]} == json.loads(path.read_text())
    last = {**kept[-1], "passed": 1}
    assert compat.save(last, path)["runs"] == [again, *kept[:-1], last]
    assert compat.save(last, tmp_path / "other.json") == {"runs": [last]}


@pytest.mark.parametrize("environment", compat.CPU_ENVIRONMENTS, ids=lambda environment: environment.name)
def test_a_lock_file_pins_each_package_once(environment: compat.Environment) -> None:
    lines = compat.lock(environment).splitlines()
    names = [re.split("==", line)[0].lower().replace("_", "-") for line in lines]
    assert all(re.fullmatch(r"[\w.\-]+==[\w.+!]+", line) for line in lines), "a lock file must only have pins"
    assert len(set(names)) == len(names) > 150


def test_overrides_change_something_and_belong_to_an_environment() -> None:
    files = set((ROOT / "requirements" / "compat").glob("*.txt"))
    assert files == {e.overrides for e in compat.CPU_ENVIRONMENTS if e.overrides.exists()}
    base = {**compat.pins((ROOT / "requirements/cpu.txt").read_text())}
    base |= compat.pins((ROOT / "requirements/test.txt").read_text())
    for path in files:
        changed = compat.pins(path.read_text())
        assert all(base.get(name) != line for name, line in changed.items()), f"{path.name} repeats a pin"


def test_a_report_is_counted() -> None:
    case = '<testcase classname="tests.a" name="{}">{}</testcase>'
    cases = [case.format("ok", ""), case.format("bad", "<failure/>"), case.format("off", "<skipped/>")]
    report = f"<testsuites><testsuite>{''.join(cases)}{case.format('broken', '<error/>')}</testsuite></testsuites>"
    wanted = {"passed": 1, "failed": 2, "skipped": 1, "failures": ["tests.a.bad", "tests.a.broken"]}
    assert compat.counts(report) == wanted
