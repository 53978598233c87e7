# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM's engine on a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

EXECUTOR = "dmi_connector.engine.executor.CaptureExecutor"
"""Value of vLLM's `distributed_executor_backend` for several GPUs: each step waits for fewer answers."""


def joined(flags: Sequence[str]) -> list[str]:
    """Flags of a command line, each with its values behind "="."""
    found: list[str] = []
    for text in flags:
        if text.startswith("-") and not re.fullmatch(r"-\d.*", text):
            found.append(text)
        elif found:
            found[-1] += ("," if "=" in found[-1] else "=") + text
        else:
            found.append(text)
    return found


def tensor_parallel(flags: Sequence[str]) -> int:
    """GPUs that an engine with these flags takes. Raises ValueError."""
    found = 1
    for flag in joined(flags):
        if flag_name(flag) in ("tensor-parallel-size", "tp"):
            value = flag.partition("=")[2]
            if not value.isdigit() or not int(value):
                raise ValueError(f"--tensor-parallel-size {value!r} is not valid; give a whole number from 1 on")
            found = int(value)
    return found


def executor(flags: Sequence[str]) -> list[str]:
    """The flag that gives an engine of several GPUs our executor, unless these flags name one. Raises ValueError."""
    names = {flag_name(flag) for flag in joined(flags)}
    if tensor_parallel(flags) == 1 or names & {"distributed-executor-backend", "nnodes"}:
        return []
    return ["--distributed-executor-backend", EXECUTOR]


def flag_name(flag: str) -> str:
    """A flag without dashes in front and without its value."""
    return flag.lstrip("-").split("=")[0].split(".")[0].replace("_", "-")
