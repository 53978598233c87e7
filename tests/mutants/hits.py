# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that tells mutmut which functions each test reaches in child processes.

mutmut runs a mutant only against tests that reach its function, and only sees functions that pytest's own process
reaches. The coordinator and the writers are processes of their own. Every Python process imports `sitecustomize.py` at
its start, which records the functions that it reaches. Mutants need no such help: child processes inherit the
environment variable that selects the mutant.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = os.environ.get("MUTANTS_HITS", "")
"""Directory of the records of child processes, a file per process. Its file `test` grows by one byte per test."""


def pytest_runtest_logstart(nodeid: str) -> None:
    if FOLDER and os.environ.get("MUTANT_UNDER_TEST") == "stats":
        with open(Path(FOLDER, "test"), "ab") as f:
            f.write(b".")


def pytest_runtest_logfinish(nodeid: str) -> None:
    if FOLDER and os.environ.get("MUTANT_UNDER_TEST") == "stats":
        from mutmut.state import state

        for path in Path(FOLDER).glob("*.hits"):
            for function in path.read_text().split("\n")[:-1]:
                state().tests_by_mangled_function_name[function].add(nodeid)
            path.unlink()
