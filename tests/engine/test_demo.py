# SPDX-License-Identifier: Apache-2.0
"""`dmi demo` as a user runs it, except that its engine is forked, and the notebook that reads one of its stores."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dmi_connector import Capture, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, compare
from dmi_connector.cli import demo
from dmi_connector.hooks import PRESETS
from tests import notebookkit
from tests.engine.harness import USUAL_HOOKS
from tests.forking.fork_workers import environment as forking


@dataclass(frozen=True)
class Result:
    """The output and the files of one run of the demo."""

    directory: Path
    out: str

    def captures(self) -> list[Capture]:
        return [open_capture(info.store, timeout=0) for info in find_captures(self.directory / "captures")]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    directory = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "dmi_connector.cli", "demo", "--dir", str(directory)]
    env = {**os.environ, **forking()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    log = (directory / "engine.log").read_text() if (directory / "engine.log").exists() else "no log"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log[-5000:]}"
    return Result(directory, done.stdout)


def test_the_demo_captures_every_hook_of_its_prompts(result: Result) -> None:
    captures = result.captures()
    assert sorted(c.attrs["key"] for c in captures) == sorted(demo.PROMPTS)
    for capture in captures:
        assert set(capture.attrs["hooks"]) == (set(PRESETS["vllm-full"]) | {"q_rot", "k_rot"}) & USUAL_HOOKS, capture
        assert len(capture.token_ids) == capture.prompt_len + demo.NEW_TOKENS - 1, capture
        assert all(capture.layers[hook] in ([0, 1, 2], []) for hook in capture.hooks), capture.layers
        assert capture.numpy("logits").shape == (demo.NEW_TOKENS, 512), capture


def test_the_demo_prints_each_store_and_the_error_of_each_hook(result: Result) -> None:
    for capture in result.captures():
        line = next(line for line in result.out.splitlines() if line.startswith(capture.path.name))
        assert f"{capture.prompt_len} + {demo.NEW_TOKENS - 1}" in line, line
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if len(line.split()) == 4}
    for hook, entry in result.captures()[0].attrs["hooks"].items():
        layers, width, error = rows[hook]
        assert (layers, int(width)) == ("3" if entry["layers"] else "-", entry["width"]), rows[hook]
        assert 0 <= float(error) <= demo.TOLERANCE, rows[hook]
    assert "agree with transformers" in result.out
    picture = result.directory / "residual_norms.png"
    assert str(picture) in result.out and picture.read_bytes().startswith(b"\x89PNG")


def test_the_comparison_finds_keys_of_another_layer(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = result.captures()[0]
    oracle = Oracle(result.directory / "model")
    assert all(error <= demo.TOLERANCE for error in compare(capture, oracle).values())
    run = oracle.run

    def rolled(*asked: Any) -> dict[str, Any]:
        return {name: values[::-1] if name == "k" else values for name, values in run(*asked).items()}

    monkeypatch.setattr(oracle, "run", rolled)
    wrong = compare(capture, oracle)
    assert wrong["k"] > 0.1 and wrong["q"] <= demo.TOLERANCE


def test_bad_hooks_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dmi_connector.cli", "demo", "--dir", "d", "--hooks", "mlp_pots"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 2 and "did you mean 'mlp_post'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "d/captures").exists()


@pytest.mark.parametrize(
    ("name", "pictures", "words"),
    [
        ("first_look", 2, ["largest difference from the captured logits"]),
        ("uncertainty", 2, ["largest difference of entropies", "decided at final"]),
    ],
)
def test_the_notebooks_run_on_a_store(
    name: str, pictures: int, words: list[str], result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(result.captures()[0].path)
    text, drawn = notebookkit.execute(notebookkit.read(name), monkeypatch, DMI_STORE=store)
    assert drawn == pictures and all(word in text for word in words), text
