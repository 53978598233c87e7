# SPDX-License-Identifier: Apache-2.0
"""Compares every hook of every model family with transformers, and writes the table of docs/MODELS.md.

    python -m benchmarks.checks.models [PYTEST ARGUMENT...]

The program runs tests/engine/test_models.py, test_multimodal.py and test_hybrids.py in full: eager and compiled, with
each owner, and on two tensor-parallel ranks. Results are written to benchmarks/results/models.json. With arguments,
such as -k, only some tests run, and the results of the others are kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.checks.check_gpu import LEAST_COSINE

RESULTS = common.ROOT / "benchmarks" / "results" / "models.json"
"""The result file.

`found`: a `summary`, with the `commit` that measured each model. `gpu`: results on GPUs, added by hand. `gpu["models"]`
has for each architecture: `model`: its name in the table. `cosine`: minimum cosine of a row with float32. `rows_below`:
for models with experts, the largest fraction of a hook's rows below LEAST_COSINE, else None. `same_tokens`:
requests with the tokens of stock vLLM. `gpu["float32"]["models"]` has errors by mode as in `found`, measured on a
GPU. `gpu["speed"]` has the decode speed of larger shapes.
"""
PAGE = common.ROOT / "docs" / "MODELS.md"
BEGIN = "<!-- written by make models -->"
"""The mark before the table in PAGE."""
MODES = ("eager", "compiled", "eager, two ranks")


def run(argv: list[str]) -> tuple[list[dict[str, Any]], int]:
    """(results of the tests, exit status of pytest)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        tests = [
            "tests/engine/test_models.py",
            "tests/engine/test_multimodal.py",
            "tests/engine/test_hybrids.py",
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


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model: its architecture, the number of its hooks, and in each mode the largest error and its hook.

    An error is relative to the hook's largest value. found: results of the tests.
    """
    models = []
    for name in dict.fromkeys(one["model"] for one in found):
        mine = [one for one in found if one["model"] == name]
        hooks = max(len(one["errors"]) for one in mine)
        models.append({"model": name, "architecture": mine[0]["architecture"], "hooks": hooks})
        for mode in MODES:
            errors = [(error, hook) for one in mine if one["mode"] == mode for hook, error in one["errors"].items()]
            if errors:
                error, hook = max(errors, key=lambda pair: pair[0])
                models[-1][mode] = [float(f"{error:.2g}"), hook]
    return models


def merged(before: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The models of an earlier result, updated by a later run of some tests.

    before: the earlier result. found: the models of the later run. Modes that the later run did not test keep their
    error.
    """
    models = {one["model"]: {"commit": before["header"]["commit"], **one} for one in before["found"]}
    for one in found:
        models[one["model"]] = {**models.get(one["model"], {}), **one}
    return list(models.values())


def table(models: list[dict[str, Any]], gpu: dict[str, Any]) -> str:
    """A table with a row for each model of a `summary`. gpu: results on GPUs, see RESULTS."""
    lines = [["model", "architecture", "hooks", "eager", "compiled", "two ranks", "GPU, float32", "GPU, bf16"]]
    for one in models:
        name, architecture = one["model"], one["architecture"]
        errors = [_error(one.get(mode)) for mode in MODES]
        errors.append(_error(max(gpu["float32"]["models"].get(name, {}).values(), default=None)))
        lines.append([f"`{name}`", f"`{architecture}`", str(one["hooks"]), *errors])
        lines[-1].append(_on_gpu(gpu["models"].get(architecture, {}), name))
    return common.markdown(lines)


def _error(found: Sequence[Any] | None) -> str:
    """An error and the hook that has it."""
    return "not run" if found is None else f"{found[0]:.1e} (`{found[1]}`)"


def _on_gpu(found: dict[str, Any], name: str) -> str:
    """The result on a GPU for the model `name` of an architecture."""
    if found.get("model") != name:
        return "not run"
    values = f"cosine {found['cosine']:.5f}"
    if found["rows_below"] is not None:
        values = f"{1 - found['rows_below']:.1%} of rows ≥ {LEAST_COSINE}".replace("%", " %")
    return f"{values}, tokens {found['same_tokens']}"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    header = common.header("benchmarks.checks.models", argv)
    tests, status = run(argv)
    before = json.loads(RESULTS.read_text())
    found = [{**one, "commit": header["commit"]} for one in summary(tests)]
    if argv:
        found = merged(before, found)
    common.save(RESULTS, {"header": header, "found": found, "gpu": before["gpu"]})
    common.write_table(PAGE, BEGIN, table(found, before["gpu"]))
    return status


if __name__ == "__main__":
    sys.exit(main())
