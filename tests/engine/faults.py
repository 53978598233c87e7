# SPDX-License-Identifier: Apache-2.0
"""Injects faults into a running engine, its processes and its disk, while captures are in progress."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dmi_connector import Capture, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.store.read.verify import verify_store
from tests.engine.check import reference, same
from tests.engine.harness import Ask, Run, generate, prompt

MANY = 20
TOKENS = 200  # generated tokens of each request of `many`
PATIENCE = 600.0
"""Seconds after which a wait has failed. On a CPU the kernels of the V2 runner are slow."""


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        time.sleep(0.02)


def processes(kind: str, root: int | None = None) -> list[psutil.Process]:
    """The live processes of one kind in the group of a process (default: this one), without the process itself.

    The group is that of `group_of`.

    kind: a part of the command name or of the first argument: "dmi-writer", "dmi-coordinator", "EngineCore" or
    "Worker".
    """
    found = []
    for process in group_of(psutil.Process(root))[1:]:
        with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):  # the process has just ended
            names = [Path(f"/proc/{process.pid}/comm").read_text(), *process.cmdline()[:1]]
            if process.status() != psutil.STATUS_ZOMBIE and any(kind in name for name in names):
                found.append(process)
    return found


def kill(found: Sequence[psutil.Process], number: int = signal.SIGKILL) -> None:
    assert found, "there is no such process"
    for process in found:
        with suppress(psutil.NoSuchProcess):  # when one process dies, others may end by themselves
            process.send_signal(number)


@contextmanager
def stopped(found: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes (SIGSTOP) during the `with` block. This simulates a very slow disk."""
    kill(found, signal.SIGSTOP)
    try:
        yield
    finally:
        kill(found, signal.SIGCONT)


class Disk:
    """A directory for stores. It is a file system of its own if this process may mount one."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
        self.mounted = subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode == 0

    @contextmanager
    def full(self, writers: Sequence[psutil.Process]) -> Iterator[None]:
        """During the `with` block, no process can write to the disk. Without a mount, only `writers` cannot."""
        limits = [process.rlimit(psutil.RLIMIT_FSIZE) for process in writers]
        if self.mounted:
            with open(self.path / "ballast", "wb", buffering=0) as ballast:
                try:
                    while ballast.write(bytes(1 << 16)) == 1 << 16:
                        pass
                except OSError as error:
                    assert error.errno == 28, error
        else:
            for process, (_, hard) in zip(writers, limits, strict=True):
                process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            if self.mounted:
                (self.path / "ballast").unlink()
            for process, old in zip(writers, limits, strict=True):
                process.rlimit(psutil.RLIMIT_FSIZE, old)

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", self.path], check=True)
        shutil.rmtree(self.path, ignore_errors=True)


def many(tag: str, count: int = MANY, tokens: int = TOKENS) -> dict[str, Ask]:
    """Requests with 20 to 248 prompt tokens and the keys `tag`-i."""
    return {
        f"{tag}-{i}": Ask(
            prompt(20 + 12 * i, seed=7),
            kv={"include_output_tokens": True, "dmi": {"key": f"{tag}-{i}"}},
            sampling={"max_tokens": tokens},
        )
        for i in range(count)
    }


class Live:
    """A running engine, and a thread that submits requests, so that a test can interfere meanwhile."""

    def __init__(self, llm: Any, run: Run, oracle: Oracle) -> None:
        self.llm, self.run, self.oracle = llm, run, oracle

    def _submit(self, asks: dict[str, Ask]) -> Future[None]:
        """Submit requests on a daemon thread, because vLLM's client waits forever for a killed engine core."""
        future: Future[None] = Future()

        def work() -> None:
            try:
                generate(self.llm, self.run, asks)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=work, daemon=True).start()
        return future

    def begin(self, asks: dict[str, Ask]) -> Future[None]:
        """Submit requests, and wait until every capture has begun and some have chunks on disk."""
        future = self._submit(asks)
        tag = next(iter(asks)).rsplit("-", 1)[0]
        until(lambda: len(list(self.run.store_dir.glob(f"{tag}-*.partial"))) == len(asks), "captures have not begun")
        folder = self.run.store_dir
        until(lambda: asks.keys() <= {c.key for c in find_captures(folder)}, "captures are not in the index")
        until(lambda: sum(self._written(path) for path in self.partials(tag)) > len(asks), "no chunks were written")
        assert not future.done()
        return future

    def ask(self, asks: dict[str, Ask]) -> None:
        """Submit requests, and wait for the responses."""
        self._submit(asks).result(PATIENCE)

    def partials(self, tag: str) -> list[Path]:
        return list(self.run.store_dir.glob(f"{tag}-*.partial"))

    @staticmethod
    def _written(partial: Path) -> int:
        return len([path for path in partial.glob("*/c/0/*/0") if path.stat().st_size])

    def answered(self, asks: dict[str, Ask], future: Future[None]) -> None:
        """Check that every request got a full response."""
        future.result(PATIENCE)
        for name, ask in asks.items():
            assert len(self.run.tokens(name)) == len(ask.prompt) + ask.sampling["max_tokens"], name

    def works(self, tag: str) -> None:
        """Check that a request after the fault has a complete and correct store."""
        self.ask({tag: Ask(prompt(70, seed=3), sampling={"max_tokens": 30})})
        check_rows(open_capture(self.run.store(tag), timeout=300), self.oracle, self.run.tokens(tag))


def finished(folder: Path, tag: str, count: int = MANY, seconds: float = 600) -> list[CaptureInfo]:
    """The captures of `many(tag)`. Waits until the index says how each has ended."""

    def all_of_them() -> list[CaptureInfo]:
        return [c for c in find_captures(folder) if (c.key or "").startswith(f"{tag}-")]

    def ended() -> bool:
        return sum(c.state not in ("started", "unfinished") for c in all_of_them()) == count

    until(ended, f"not all captures of {tag} have ended", seconds)
    return all_of_them()


def check_rows(capture: Capture, oracle: Oracle, tokens: Sequence[int] | None = None) -> int:
    """Check the values of all rows that are not missing, and of all samples that are not lost.

    Returns the number of rows that are not missing. If rows are missing and `tokens` is None, no values are checked,
    because later rows depend on unknown tokens.

    tokens: all token ids of the request, if known.
    """
    assert verify_store(capture.path) == []
    held = capture.token_ids
    ids = held.tolist() if tokens is None else list(tokens)
    rows = np.setdiff1d(np.arange(len(held)), [i for start, stop in capture.missing for i in range(start, stop)])
    np.testing.assert_array_equal(held[rows], np.array(ids, "<i4")[rows])
    assert capture.complete == (capture.reason is None) and (capture.missing == [] or not capture.complete)
    if tokens is None and len(rows) < len(held):
        return len(rows)
    want = reference(oracle, ids) if ids else {}
    for hook in capture.attrs["hooks"] if ids else ():
        if hook == "logits":
            at = capture.logits_positions
            kept = np.flatnonzero((at >= 0) & (at < len(ids)))
            got, expected = capture.numpy(hook)[kept], want[hook][at[kept]]
        else:
            got = capture.numpy(hook)
            got, expected = (got if got.ndim == 3 else got[None])[:, rows], want[hook][:, rows]
        same(got, expected, f"{capture.path.name}: {hook}", atol=2e-5)
    return len(rows)


def group_of(process: psutil.Process) -> list[psutil.Process]:
    """A process, its descendants, the coordinators of these engines, and the descendants of the coordinators.

    A coordinator is not a descendant of its engine.
    """
    family = [process, *process.children(recursive=True)]
    engines = {p.pid for p in family}
    for other in psutil.process_iter():
        with suppress(psutil.Error):  # the process has just ended
            line = other.cmdline()
            if "--engine-pid" in line and int(line[line.index("--engine-pid") + 1]) in engines:
                family += [p for p in (other, *other.children(recursive=True)) if p not in family]
    return family


def gone(found: Sequence[psutil.Process], seconds: float) -> float:
    """Wait until all processes of `found` have ended or are zombies. Returns the seconds."""
    start = time.monotonic()
    until(lambda: not any(map(runs, found)), f"some of these still run: {found}", seconds)
    return time.monotonic() - start


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def memory(pid: int, *kinds: str) -> int:
    """Bytes of memory of a process: the sum of fields of /proc/PID/status, such as "RssAnon" and "RssShmem".

    "RssFile" is not useful here, because the kernel decides when to free pages of files.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in kinds)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
