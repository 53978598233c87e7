# SPDX-License-Identifier: Apache-2.0
"""Helpers of all benchmarks: the header of a result file, common options, and child processes for engines."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
"""The root directory of the repository."""
DIRTY = "-dirty"
"""Suffix of a commit whose tree has uncommitted changes."""
CLOSE_S = 60
"""Seconds that a child process has to end before it is killed."""
_PACKAGES = ("vllm", "torch", "triton", "numpy", "zarr", "numcodecs")
"""Packages whose versions are in the header of a result."""
WIDTHS = {
    **{"resid_pre": 2560, "ln1": 2560, "q": 4096, "k": 1024, "v": 1024, "z": 4096, "attn_out": 2560},
    **{"resid_mid": 2560, "ln2": 2560, "mlp_post": 9728, "mlp_out": 2560},
}
"""{hook: width} of the 11 wide hooks of a layer of Qwen3-4B."""
QWEN3_LAYERS = 36
"""Number of layers of Qwen3-4B."""
_RANDOM_BYTES = 16 << 20
"""Number of bytes after which `activations` repeats. Codecs do not notice: they compress far smaller blocks."""
END = "<!-- until here -->"
"""The mark after a table that a program writes into a page."""
SPECIAL_TOKENS = 10
"""Number of tokens at each end of the vocabulary that `random_tokens` leaves out, because they may be special."""
_LINE = 200
"""Maximum number of characters of a value that is written on one line of a result file."""
_CALLS, _SAMPLES = 1500, 5
"""Number of calls per sample of `python_us`, and number of samples. A sample takes about 60 us on a fast core."""

# ---- the header of a result --------------------------------------------------------------------------------------


def header(module: str, argv: list[str]) -> dict[str, Any]:
    """The header of a result: commit, command, machine and versions.

    Call it before the first measurement, because the working tree may change later. commit: the result of `commit`.
    clean: whether the tree has no changes. Both are None if the commit is unknown.
    """
    found = commit()
    return {
        "commit": found,
        "clean": None if found is None else not found.endswith(DIRTY),
        "command": command_line(module, argv),
        "machine": machine(),
        "versions": versions(),
    }


def commit(root: Path = ROOT, variable: str = "DMI_COMMIT") -> str | None:
    """Short hash of the commit in `root`, followed by DIRTY if the working tree has changes.

    If `root` is not a git repository, returns the value of the environment variable `variable`, or None.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve():
            # Result files do not change what is measured.
            changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
            return _git(root, "rev-parse", "--short", "HEAD") + (DIRTY if changes else "")
    except (OSError, subprocess.CalledProcessError):
        pass  # git is missing, or there is no repository or no commit yet
    return os.environ.get(variable) or None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Facts about the machine. gpu is None without a GPU or without torch."""
    gpu = None
    if find_spec("torch") is not None:
        import torch

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "gpu": gpu,
    }


def versions() -> dict[str, str | None]:
    """{package: version} of Python, dmi_connector and _PACKAGES; None for a package that is not installed."""
    import dmi_connector

    found: dict[str, str | None] = {"python": platform.python_version(), "dmi_connector": dmi_connector.__version__}
    for package in _PACKAGES:
        found[package] = None
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def without_directories(text: str) -> str:
    """`text` with each path replaced by its last part."""
    return re.sub(r"[^\s'\"=,:{}\[\]()]*/", "", text)


def command_line(module: str, argv: list[str]) -> str:
    """The command to record in a result, without directories."""
    return f"python -m {module} " + shlex.join(without_directories(arg) for arg in argv)


def save(path: str | Path, results: dict[str, Any]) -> None:
    """Write a result file under a temporary name, then rename it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(_dumps(json.loads(json.dumps(results))) + "\n")
    part.replace(target)


def _dumps(value: Any, indent: int = 0) -> str:
    """JSON with one line for each value that fits on a line."""
    flat = json.dumps(value)
    if len(flat) + indent < _LINE or not value or not isinstance(value, dict | list):
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {_dumps(one, indent + 1)}" for name, one in value.items()]
    else:
        lines = [_dumps(one, indent + 1) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(lines) + f"\n{' ' * indent}{last}"


def markdown(lines: list[list[str]]) -> str:
    """A Markdown table. The first line is its head."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body])


def write_table(page: Path, begin: str, table: str) -> None:
    """Replace the text between the marks `begin` and END of a page by a table."""
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{END}{rest.split(END)[1]}")


def three_digits(number: float) -> float:
    """`number` rounded to three significant digits."""
    return float(f"{number:.3g}")


# ---- options and child processes ---------------------------------------------------------------------------------


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for the options of a program. Its description is the first line of `doc`, the program's docstring."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").splitlines()[0])


def engine_parser(module: str, doc: str | None, out: str, store_dir: str) -> argparse.ArgumentParser:
    """A parser with the common options of programs that start engines. out, store_dir: defaults of the options."""
    p = parser(module, doc)
    p.add_argument("--out", default=out, help="result file (JSON), rewritten after every measurement")
    p.add_argument("--store-dir", default=store_dir)
    p.add_argument("--engine-args", type=json.loads, default={}, help="JSON: engine arguments for every engine")
    p.add_argument("--child", default="", help=argparse.SUPPRESS)
    return p


def tiny_model(store_dir: str) -> str:
    """Make a tiny Qwen3 in `store_dir`, for programs without --model. Returns its directory."""
    from dmi_connector.cli.tiny_models import make_model

    return str(make_model("qwen3", Path(store_dir) / "tiny-qwen3"))


def child_command(module: str, argv: list[str], name: str) -> list[str]:
    """The command that starts child process `name` of a program. argv: the options of the program."""
    return [sys.executable, "-m", module, *argv, "--child", name]


def child_env(**env: str) -> dict[str, str]:
    """The environment of a child process: that of this process, with `env` added.

    Variables of `tiny_models.ENV` that are set in neither get its values, which fit offline and small machines.
    """
    from dmi_connector.cli.tiny_models import ENV

    return {**ENV, **os.environ, **env}


def run_child(module: str, argv: list[str], name: str, **env: str) -> int:
    """Run child process `name` of a program to its end. Returns its exit status."""
    return subprocess.run(child_command(module, argv, name), check=False, env=child_env(**env)).returncode


def end_with_children() -> None:
    """Make SIGTERM, which `timeout` sends, raise SystemExit, so that this process closes its `Child` processes.

    `Child` processes have sessions of their own, so the signal does not reach them. Their engines would otherwise keep
    the memory of the GPU.
    """
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


class Child:
    """A child process that answers lines of JSON with lines of JSON, on a socket that its option `--fd` names.

    command: its command, without `--fd`. env: its environment; None: that of this process. cwd: its working directory;
    None: that of this process.
    """

    def __init__(self, command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self._socket, end = socket.socketpair()
        with end:
            fd = end.fileno()
            self._process = subprocess.Popen(
                [*command, "--fd", str(fd)], env=env, cwd=cwd, pass_fds=[fd], start_new_session=True
            )
        self._lines = self._socket.makefile()
        # If the child is killed, processes that it forked keep the socket open. A pidfd shows that the child has ended.
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id of the child, and id of its session."""
        return self._process.pid

    def send(self, request: dict[str, Any]) -> None:
        """Send a request. `answer` waits for its answer, and tells if the process has ended."""
        with suppress(ConnectionError):
            self._socket.sendall((json.dumps(request) + "\n").encode())

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for an answer or for the end of the process, up to `seconds`. Returns whether one of them is there."""
        return any(select.select([self._socket.fileno(), self._pidfd], [], [], seconds))

    def answer(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The next answer, after sending `request` if there is one; {"failed": why} if the process ended instead."""
        if request is not None:
            self.send(request)
        with suppress(ConnectionError):  # the child ended
            fd = self._socket.fileno()
            readable, _, _ = select.select([fd, self._pidfd], [], [])
            if fd in readable and (line := self._lines.readline()):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"failed": f"exit status {self.close()}"}

    def end(self) -> None:
        """Close the socket. The child then reads the end of the file, and ends."""
        self._lines.close()
        self._socket.close()

    def close(self) -> int:
        """Close the socket, wait until the child ends, and kill processes of its session. Returns its exit status."""
        if self._process.returncode is None:
            self.end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            with suppress(ProcessLookupError):  # all processes have ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._pidfd)
        return self._process.returncode


# ---- runs that share a machine ----------------------------------------------------------------------------------


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Lock a file for the `with` block: exclusively to measure `alone` on this machine, otherwise shared.

    The environment variable DMI_TURNS names the file, the same for all benchmarks. Without the variable, nothing is
    locked.
    """
    name = os.environ.get("DMI_TURNS")
    if not name:
        yield
        return
    with open(name, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


# ---- the cores of a shared machine -------------------------------------------------------------------------------


def python_us() -> float:
    """Microseconds that a fixed piece of Python takes on the core of this thread: the minimum of _SAMPLES samples.

    The result shows how fast the core is at the moment. Other virtual machines on the host may halve the speed of a
    core from one second to the next, and each step of an engine then takes twice as long.
    """

    def call(a: int, b: int = 2) -> int:
        return a + b

    samples = []
    for _ in range(_SAMPLES):
        total, begin = 0, time.perf_counter()
        for _ in range(_CALLS):
            total = call(total)
        samples.append(time.perf_counter() - begin)
    return round(min(samples) * 1e6, 1)


def quickest_cores(count: int) -> list[int]:
    """The numbers of the `count` fastest cores by `python_us`. This thread visits all cores that it may use."""
    cores = os.sched_getaffinity(0)
    found = {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            found[core] = python_us()
    finally:
        os.sched_setaffinity(0, cores)
    return sorted(found, key=lambda core: found[core])[:count]


# ---- values and stores -------------------------------------------------------------------------------------------


def activations(nbytes: int) -> np.ndarray:
    """Normally distributed bf16 values as uint8 [nbytes]. Codecs compress them about as little as activations."""
    values = np.random.default_rng(0).standard_normal(min(nbytes, _RANDOM_BYTES) // 2, dtype=np.float32)
    return np.resize((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), nbytes)


def random_tokens(rng: np.random.Generator, vocab: int, shape: int | tuple[int, ...]) -> Any:
    """Random token ids of the given shape, as lists. vocab: size of the vocabulary."""
    return rng.integers(SPECIAL_TOKENS, vocab - SPECIAL_TOKENS, shape).tolist()


def store_problems(path: str | Path, threads: int = 1) -> list[str]:
    """The problems that `dmi verify` finds in a store. threads: number of threads that check it."""
    from dmi_connector.store.read.verify import verify_store

    return [f"{Path(path).name}: {problem.where}: {problem.what}" for problem in verify_store(path, threads=threads)]
