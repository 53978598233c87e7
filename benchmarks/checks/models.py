# SPDX-License-Identifier: Apache-2.0
"""Compares every hook of every family of models with transformers, and writes the table of docs/MODELS.md.

    python -m benchmarks.checks.models

Runs tests/engine/test_models.py and test_multimodal.py in full: eager and compiled, rows of both owners, two
tensor-parallel ranks. Results go to benchmarks/results/cpu-models.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.checks.check_gpu import LEAST_COSINE_OF_ARCH

RESULTS = common.ROOT / "benchmarks" / "results" / "cpu-models.json"
PAGE = common.ROOT / "docs" / "MODELS.md"
BEGIN, END = "<!-- written by make models -->", "<!-- until here -->"
"""Around the table in PAGE."""
GPU = common.ROOT / "benchmarks" / "results" / "h100-models.json"
"""What a GPU gave, of the models that were run there, by architecture.

`model`: which in the table. `cosine`: least of a row with float32. `rows_below`: in models with experts the largest
part of a hook's rows below LEAST_COSINE_OF_ARCH, else None. `same_tokens`: requests with stock vLLM's tokens.
"""


def run(argv: list[str]) -> tuple[list[dict[str, Any]], int]:
    """(what the tests found, pytest's exit status)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        tests = [
            "tests/engine/test_models.py",
            "tests/engine/test_multimodal.py",
            "-m",
            "soak or not soak",
            "-q",
            *argv,
        ]
        env = {**os.environ, "MODELS_RESULT": str(out)}
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *tests], cwd=common.ROOT, env=env, check=False
        ).returncode
        lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines], status


def table(found: list[dict[str, Any]], gpu: dict[str, Any]) -> str:
    """A row for each model: its largest error of a hook, as a part of the hook's largest value."""
    lines = [["model", "architecture", "hooks", "eager", "compiled", "two ranks", "GPU, bf16"]]
    for name in dict.fromkeys(one["model"] for one in found):
        mine = [one for one in found if one["model"] == name]
        architecture = mine[0]["architecture"]
        lines.append(
            [
                f"`{name}`",
                f"`{architecture}`",
                str(max(len(one["errors"]) for one in mine)),
                *(_worst(mine, mode) for mode in ("eager", "compiled", "eager, two ranks")),
                _on_gpu(gpu.get(architecture, {}), name),
            ]
        )
    return common.markdown(lines)


def _on_gpu(found: dict[str, Any], name: str) -> str:
    """What a GPU gave for the model `name` of an architecture."""
    if found.get("model") != name:
        return "not run"
    values = f"cosine {found['cosine']:.5f}"
    if found["rows_below"] is not None:
        values = f"{1 - found['rows_below']:.1%} of rows ≥ {LEAST_COSINE_OF_ARCH}".replace("%", " %")
    return f"{values}, tokens {found['same_tokens']}"


def _worst(found: list[dict[str, Any]], mode: str) -> str:
    errors = {hook: error for one in found if one["mode"] == mode for hook, error in one["errors"].items()}
    if not errors:
        return "not run"
    hook = max(errors, key=lambda name: errors[name])
    return f"{errors[hook]:.1e} (`{hook}`)"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    header = common.header("benchmarks.checks.models", argv)
    found, status = run(argv)
    common.save(RESULTS, {"header": header, "found": found})
    gpu = json.loads(GPU.read_text())["models"] if GPU.exists() else {}
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found, gpu)}\n\n{END}{rest.split(END)[1]}")
    return status


if __name__ == "__main__":
    sys.exit(main())
