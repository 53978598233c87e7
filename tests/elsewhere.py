# SPDX-License-Identifier: Apache-2.0
"""Reads stores without the modules and functions that Windows or macOS lack: `python tests/elsewhere.py STORES MODEL
OUT`.

Other libraries are imported first, because they have their own code for each system. A forked process then reads as on
Windows, another one as on macOS.
"""

from __future__ import annotations

import importlib.abc
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import dask
import matplotlib.figure
import numpy as np
import pandas  # noqa: F401
import polars  # noqa: F401
import torch
import xarray  # noqa: F401
import zarr
from starlette.testclient import TestClient

MODULES = {
    "windows": {
        "fcntl",
        "resource",
        "termios",
        "tty",
        "pty",
        "pwd",
        "grp",
        "syslog",
        "readline",
        "curses",
        "posix_ipc",
    },
    "macos": set[str](),
}
ONLY_LINUX = (
    "copy_file_range eventfd memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate preadv pwritev"
    " sched_getaffinity sched_setaffinity splice setns unshare getrandom sendfile MFD_CLOEXEC POSIX_FADV_WILLNEED"
    " O_DIRECT O_TMPFILE O_PATH O_NOATIME RWF_NOWAIT"
)
ONLY_POSIX = (
    "fork forkpty pread pwrite readv writev register_at_fork statvfs fstatvfs geteuid getuid getegid getgid getpgid"
    " getpgrp setsid setpgid killpg chown fchown lchown fchmod fchdir mkfifo mknod nice uname sysconf getpriority"
    " getloadavg wait3 wait4 waitid lockf confstr initgroups posix_spawn posix_spawnp pathconf O_CLOEXEC O_DIRECTORY"
    " O_NOFOLLOW O_NONBLOCK O_SYNC O_NOCTTY O_ASYNC O_DSYNC"
)
SIGNALS = "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE SIGQUIT SIGSTOP pthread_sigmask"


class Missing(importlib.abc.MetaPathFinder):
    """Raises ModuleNotFoundError for modules that this system lacks."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove(system: str) -> None:
    """Remove the modules and functions that `system` lacks."""
    windows = system == "windows"
    sys.meta_path.insert(0, Missing(MODULES[system]))
    for name in MODULES[system]:
        sys.modules.pop(name, None)
    for name in [*ONLY_LINUX.split(), *(ONLY_POSIX.split() if windows else [])]:
        if hasattr(os, name):
            delattr(os, name)
    if hasattr(os, "process_cpu_count"):  # Python 3.13 defines it as `cpu_count` on systems without sched_getaffinity
        os.process_cpu_count = os.cpu_count
    for name in SIGNALS.split() if windows else []:
        if hasattr(signal, name):
            delattr(signal, name)


def read(stores: Path, expected: dict[str, np.ndarray]) -> None:
    """Check that every way of reading returns the values that were written."""
    from dmi_connector import TokenDataset, find_captures, importance, open_capture, open_captures
    from dmi_connector.store.read.verify import verify_dir
    from dmi_connector.store.read.waiting import wait_for

    with open_capture(stores / "a.zarr") as cap:
        np.testing.assert_array_equal(cap.numpy("resid_pre"), expected["resid_pre"])
        np.testing.assert_array_equal(cap["blocks.1.hook_resid_pre"], expected["resid_pre"][1])
        assert torch.equal(cap.torch("resid_pre", 1).float(), torch.from_numpy(expected["resid_pre"][1]))
        np.testing.assert_array_equal(cap.xarray(["resid_pre"]).resid_pre.compute().values, expected["resid_pre"])
        assert isinstance(cap.group["resid_pre"], zarr.Array) and cap.attention(0).shape[-1] == 300
        np.testing.assert_array_equal(cap.token_ids, expected["token_ids"])
    captures = open_captures(stores, hooks="resid_pre@1")
    assert len(captures) == len(find_captures(stores)) == 3
    rows = captures.rows("resid_pre", 1)
    np.testing.assert_array_equal(rows[:300], expected["resid_pre"][1])
    assert len(captures.table()) == len(captures.table("polars")) == 3
    with dask.config.set(scheduler="synchronous"):
        assert sum(len(batch) for batch in TokenDataset(captures, "resid_pre@1", batch_size=16)) > 300
    assert importance(captures, "mlp_out", 0).shape == (16,)
    assert verify_dir(stores) == []
    wait_for(stores / "a.zarr", 0)


def run(*argv: object, status: int = 0) -> None:
    """Run a `dmi` command, and check its exit status."""
    from dmi_connector.cli.main import main

    found = main([str(part) for part in argv])
    assert found == status, f"dmi {' '.join(map(str, argv))} ended with {found}"


def command_line(stores: Path, model: Path, out: Path) -> None:
    """Run the commands that read stores."""
    store = stores / "a.zarr"
    for argv in (["ls"], ["ls", "--stats"], ["ls", "--json"], ["tail", "--once"], ["verify"], ["verify", store]):
        run(argv[0], stores, *argv[1:])
    run("info", store)
    run("diff", store, store)
    for to, *options in (
        ["safetensors"],
        ["zip"],
        ["speculators"],
        ["specforge"],
        ["routed-experts"],
        ["delphi", "--hook", "mlp_out@0", "--sae", model / "sae", "--context-size", 16],
    ):
        run("export", stores, "--to", to, "-o", out / to, *options)
    run("verify", out / "zip/a.zip")
    run("info", out / "zip/a.zip")
    for kind, *options in (
        ["norms"],
        ["heat", "--hook", "mlp_out"],
        ["text", "--hook", "mlp_out", "--layer", 1],
        ["attention", "--layer", 0],
        ["drift"],
        ["neuron", "--hook", "mlp_out", "--neuron", 1, "--layer", 0],
        ["difference", "--hook", "mlp_out", "--layer", 0, "--against", stores / "b.zarr"],
        ["lens", "--model", model],
        ["attribution", "--model", model, "--token", 3],
        ["uncertainty", "--model", model],
    ):
        run("plot", store, "--kind", kind, "-o", out / f"{kind}.png", *options)
    run("fit-pca", store, "--hook", "mlp_out", "--rank", 2, "-o", out / "basis.safetensors")
    run("fidelity", store, "--hooks", "mlp_out", "--reduce", "int8")


def refused(stores: Path, model: Path) -> None:
    """Check that commands that need Linux are refused with a message that says so."""
    for argv in (["repair", stores], ["prune", stores, "--older-than", "0"], ["run"], ["serve", model], ["demo"]):
        run(*argv, status=2)


def page(stores: Path, model: Path) -> None:
    """Check the page of `dmi view`."""
    from dmi_connector.view.app import make_app
    from dmi_connector.view.data import Library
    from dmi_connector.view.server import _listen

    _listen(0).close()
    client = TestClient(make_app(Library.at(stores), "t", model), base_url="http://127.0.0.1/t/")
    assert client.get("api/captures").json()["total"] == 3
    for place in (
        "",
        "static/main.js",
        "api/capture/a.zarr",
        "api/tokens/a.zarr",
        "api/heat/a.zarr?hook=mlp_out",
        "api/attention/a.zarr?layer=0&head=0",
        "api/attended/a.zarr?layer=0&head=0&token=9",
        "api/lens/a.zarr?token=9",
    ):
        answer = client.get(place)
        assert answer.status_code == 200, (place, answer.text)
    assert client.get("api/verify/a.zarr").json()["problems"] == []


def run_all(system: str, stores: Path, model: Path, out: Path) -> None:
    """Run all checks."""
    expected: dict[str, Any] = dict(np.load(stores / "expected.npz"))
    remove(system)
    # Windows reads and writes text as cp1252 if no encoding is given.
    warnings.simplefilter("ignore", EncodingWarning)
    warnings.filterwarnings("error", category=EncodingWarning, module="dmi_connector")
    read(stores, expected)
    if system == "windows":  # Windows lacks everything that macOS lacks
        command_line(stores, model, out)
    refused(stores, model)
    page(stores, model)
    print(f"all of it was read as on {system}", flush=True)


def main(*paths: str) -> int:
    """Run all checks for each system. Returns the exit status."""
    stores, model, out = map(Path, paths)
    out.mkdir()
    matplotlib.figure.Figure().savefig(out / "first.png")  # imports the modules that savefig needs
    for system in MODULES:
        process = os.fork()
        if not process:
            status, end = 1, os._exit
            try:
                run_all(system, stores, model, out)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                end(status)
        if status := os.waitpid(process, 0)[1]:
            return os.waitstatus_to_exitcode(status)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
