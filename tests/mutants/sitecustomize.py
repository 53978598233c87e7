# SPDX-License-Identifier: Apache-2.0
"""Imported by every Python process of a mutation run at its start. It is copied next to the package.

It records which functions a process reaches (see hits.py). It also sets the module name of functions in a module that
runs as a program (`python -m MODULE`). mutmut selects mutants by module name, so those in `__main__` would never be
active.
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
    """Record that a function was reached, once per test."""
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
    """The name of a function or of its module, with the program's name instead of `__main__`."""
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
