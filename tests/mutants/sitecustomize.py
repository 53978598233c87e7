# SPDX-License-Identifier: Apache-2.0
"""In child processes of a mutation run, copied beside the package, so that each Python process imports it at its start.

Notes which functions a process reaches (see hits.py). And names the functions of a module that runs as a program
(`python -m MODULE`) for that module, as mutmut names its mutants: they would never be active in `__main__`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

FOLDER = os.environ.get("MUTANTS_HITS", "")
PROGRAM = dict(zip(sys.orig_argv, sys.orig_argv[1:], strict=False)).get("-m", "")

seen: set[str] = set()
test = -1


def record(name: str, caller: str | None = None) -> None:
    """Note that a function was reached, once in each test."""
    global test
    size = os.stat(os.path.join(FOLDER, "test")).st_size
    if size != test:
        test = size
        seen.clear()
    name = named(name)
    if name not in seen:
        seen.add(name)
        with open(os.path.join(FOLDER, f"{os.getpid()}.hits"), "a") as f:
            f.write(name + "\n")


def named(name: str) -> str:
    """The name of a function, or of its module, with the program's in place of `__main__`."""
    return PROGRAM + name.removeprefix("__main__") if name.split(".")[0] == "__main__" else name


if FOLDER and PROGRAM.startswith("dmi_connector."):
    import mutmut.stats

    if os.environ.get("MUTANT_UNDER_TEST") == "stats":
        mutmut.stats.record_trampoline_hit = record
    from mutmut.mutation import trampoline

    wrap = trampoline.wrap_in_trampoline

    def wrap_for_module(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
        def wrapped(function: Any) -> Any:
            function.__module__ = named(function.__module__)
            return wrap(*arguments, **options)(function)

        return wrapped

    trampoline.wrap_in_trampoline = wrap_for_module
elif FOLDER and os.environ.get("MUTANT_UNDER_TEST") == "stats":
    import mutmut.stats

    mutmut.stats.record_trampoline_hit = record
