# SPDX-License-Identifier: Apache-2.0
"""What the programs here share: options, a child process for each engine, result files that name no machine's paths."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def parser(module: str, doc: str | None, out: str, store_dir: str) -> argparse.ArgumentParser:
    """The options of every program, with its own defaults for `out` and `store_dir`."""
    p = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").splitlines()[0])
    p.add_argument("--out", default=out, help="result file (JSON), rewritten after every measurement")
    p.add_argument("--store-dir", default=store_dir)
    p.add_argument("--engine-args", type=json.loads, default={}, help="JSON: engine arguments for every engine")
    p.add_argument("--child", default="", help=argparse.SUPPRESS)
    return p


def run_child(module: str, argv: list[str], name: str, **env: str) -> int:
    """Run the part `name` of a program in a process of its own; returns its exit status.

    env: beside the environment, and the defaults for offline runs and small machines beneath it.
    """
    from dmi_connector.tiny import ENV

    command = [sys.executable, "-m", module, *argv, "--child", name]
    return subprocess.run(command, check=False, env={**ENV, **os.environ, **env}).returncode


def without_directories(text: str) -> str:
    """`text` with every path cut to its last part."""
    return re.sub(r"[^\s'\"=,:{}\[\]()]*/", "", text)


def command_line(module: str, argv: list[str]) -> str:
    """The command to record in a result."""
    return f"python -m {module} " + shlex.join(without_directories(arg) for arg in argv)


def save(path: str, results: dict[str, Any]) -> None:
    """Write a result file, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(target)


def store_problems(path: str | Path) -> list[str]:
    """What `dmi verify` finds wrong with a store."""
    from dmi_connector.store.verify import verify_store

    return [f"{Path(path).name}: {problem.where}: {problem.what}" for problem in verify_store(path)]
