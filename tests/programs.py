# SPDX-License-Identifier: Apache-2.0
"""Forks programs that import vLLM from a process that has imported it. Each fork saves nine CPU seconds.

`Program` and `run` replace `subprocess.Popen` and `subprocess.run`. All processes of such a program are forked: the
processes of an engine, as vLLM does on a GPU, and the engines of `dmi run`. Only the processes of the store are started
as usual. This module run as a program is the server, see forks.py. `own_interpreters` starts the same command as a user
does.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from setproctitle import getproctitle, setproctitle

from tests import forks
from tests.runner import GPU
from tests.waits import sleep_while_waiting

MODULE = "tests.programs"
ENGINE = "dmi_connector.bulk.engine_process"
_IMPORTS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "dmi_connector.cli.main",
    "ipykernel.kernelapp",
    ENGINE,
)


class Program:
    """A process with the interface of `subprocess.Popen`.

    command: [sys.executable, "-m", module, arguments...] or [sys.executable, "-c", code]. On a GPU the program is
    started as usual, because a process that has imported vLLM there may not be forked.
    """

    stdin = stdout = stderr = None
    """There are no pipes. The attributes exist because code that ends a notebook's kernel reads them."""

    def __new__(cls, command: Sequence[str], *, group: bool = False, **options: Any) -> Any:
        return subprocess.Popen(command, process_group=0 if group else None, **options) if GPU else super().__new__(cls)

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[Any],
        stderr: IO[Any],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        group: bool = False,
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        with open(os.devnull) as nothing:
            fds = {0: nothing.fileno(), 1: stdout.fileno(), 2: stderr.fileno()}
            self._server, self.pid = forks.ask(MODULE, command, env or os.environ, fds, group, cwd)

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises TimeoutExpired."""
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], timeout)[0]:
            self.returncode = int(self._server.recv(100))
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(command: Sequence[str], cwd: Path | None = None, timeout: float | None = None) -> Any:
    """Run a program to its end. Returns a CompletedProcess with its output as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = Program(command, stdout=out, stderr=err, cwd=cwd)
        try:
            code = program.wait(timeout)
        except BaseException:
            program.kill()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return subprocess.CompletedProcess(command, code, *texts)


# ---- the server ---------------------------------------------------------------------------------------------------


def _engine(command: Sequence[str]) -> int:
    setproctitle(" ".join(command))  # tests find the process by this command line
    return forks.main_of(command)


class _Engine(forks.Forked):
    be = staticmethod(_engine)


def _popen(command: Sequence[str], **options: Any) -> Any:
    """Start a process of a `Child`. The engines of `dmi run` are forked."""
    return (_Engine if command[3] == ENGINE else subprocess.Popen)(command, **options)


def _execv(_path: str, command: Sequence[str]) -> None:
    _be(command)


def _be(command: Sequence[str]) -> int:
    """Run the equivalent of `python [-P] -m MODULE ARGUMENTS...` or `python -c CODE`. Returns the exit status."""
    from vllm.logger import _configure_vllm_root_logger

    signal.signal(signal.SIGINT, signal.default_int_handler)
    _configure_vllm_root_logger()  # the log level is in the environment
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR may be another one
    try:
        if command[1] == "-c":
            exec(compile(command[2], "<string>", "exec"), {"__name__": "__main__"})
            return 0
        module = command.index("-m") + 1
        sys.argv = [command[0], *command[module + 1 :]]
        runpy.run_module(command[module], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def main(life: int) -> None:
    """Entry point of the server of programs that import vLLM."""
    from dmi_connector.store.write import child_process

    gc.disable()  # as in conftest.py
    for module in _IMPORTS:
        importlib.import_module(module)
    from vllm.model_executor.models import registry

    gc.freeze()
    gc.enable()
    getproctitle()  # the first call locates the title in memory, and needs the unchanged environment to do so
    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: forked  # type: ignore[assignment]
    child_process.subprocess = SimpleNamespace(Popen=_popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    sleep_while_waiting(pytest.MonkeyPatch())
    registry._run_in_subprocess = lambda look: look()  # it imports vLLM anew for each class that is not in its cache
    os.execv = _execv  # type: ignore[assignment]
    forks.serve(life, _be)


if __name__ == "__main__":
    main(int(sys.argv[1]))
