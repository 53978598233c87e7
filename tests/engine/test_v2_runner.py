# SPDX-License-Identifier: Apache-2.0
"""Engine tests on the V2 model runner, vLLM's default on GPUs, with asynchronous scheduling.

Each file runs in its own pytest process, because a process has one runner (tests/runner.py). Kernels run in Triton's
interpreter, which is slow. So these tests only run in `make soak`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = [
    pytest.param("test_lives", "V2-async", 64, id="lives of 64, async"),
    pytest.param("test_lives", "V2", 64, id="lives of 64"),
    *(
        pytest.param(f"test_{name}", "V2-async", 64, id=f"{name}, async")
        for name in (
            "preemption",
            "tokens_and_steps",
            "tp2",
            "stages",
            "attention",
            "reduce",
            "probes",
            "stock_ehs",
            "request_options",
            "limits",
            "faults",
            "hooks_vs_transformers",
            "multimodal",
            "speculative",
            "hybrid_cache",
        )
    ),
]


WITH_SOAK = ("test_stages",)
"""Files of which the soak tests run too, because the others show little of what differs between the runners."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "runner", "crowd"), CASES)
def test_the_engine_tests_pass_on_the_v2_runner(name: str, runner: str, crowd: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", f"tests/engine/{name}.py", "--basetemp", str(tmp_path / "pytest")]
    command += ["-m", "soak or not soak"] if name in WITH_SOAK else []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TEST_RUNNER": runner, "TEST_CROWD": str(crowd)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    *_, summary = done.stdout.strip().splitlines() or [""]
    print(f"{name}, {runner}: {summary}")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    passed = re.search(r"(\d+) passed", summary)
    assert passed and "failed" not in summary and "error" not in summary, summary
