# SPDX-License-Identifier: Apache-2.0
"""Forks processes of the store from a process that has imported their code. Each fork saves half a CPU second.

`forked` replaces `subprocess.Popen` by `Served` in the modules of the store that start processes. `Served` asks a
server process to fork. The server is this module run as a program; it has one thread, so it may fork. Processes that a
coordinator starts are forked from the coordinator, and remain its children. The fixture `own_interpreters` lets a test
start processes as an engine does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from dmi_connector.store.write import child_process
from dmi_connector.store.write.client import COORDINATOR
from dmi_connector.store.write.coordinator.writer_pool import WRITER
from dmi_connector.store.write.finish.uploads import UPLOADER

MODULE = "tests.forks"
MODULES = (COORDINATOR, WRITER, UPLOADER)
_ENCODING = ("numcodecs.blosc", "zstandard")
"""Modules that a writer imports when it encodes its first chunks. They start no threads."""
_REQUEST_BYTES = 1 << 18
_OUT_OF_THE_WAY = 1000
"""Lowest number of the temporary copies of a child's descriptors, above the numbers that the child uses."""


def main_of(command: Sequence[str]) -> int:
    """Call the `main` of the module in `command`."""
    _, _, _, module, *arguments = command
    code: int = importlib.import_module(module).main(arguments)
    return code


def _run(
    command: Sequence[str],
    fds: Mapping[int, int],
    env: Mapping[str, str],
    group: bool,
    be: Callable[[Sequence[str]], int] = main_of,
) -> NoReturn:
    """Run `command` in a process that was just forked. fds: {number in the child: descriptor of this process}."""
    code = 1
    try:
        gc.freeze()  # finalizers of the parent's objects must not close descriptors of this process
        high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for number, fd in fds.items()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in high.values():
                with contextlib.suppress(OSError):
                    os.close(int(name))
        for number, fd in high.items():
            os.dup2(fd, number)
            os.close(fd)
        if group:
            os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(env)
        code = be(command)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


class _Pipes:
    """Standard input and output of a child, as in `subprocess.Popen`, and the numbers of the child's descriptors."""

    def __init__(self, pass_fds: Sequence[int]) -> None:
        stdin, own_stdin = os.pipe()
        own_stdout, stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(own_stdin, "wb", 0), os.fdopen(own_stdout, "rb", 0)
        self.fds = {0: stdin, 1: stdout, 2: 2, **{fd: fd for fd in pass_fds}}

    def close(self) -> None:
        """Close the child's ends in this process."""
        os.close(self.fds[0])
        os.close(self.fds[1])


class Forked(_Pipes):
    """Replaces `subprocess.Popen` in processes that were forked. be: the function that the child runs."""

    be = staticmethod(main_of)

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        process_group: int | None,
        **_: Any,
    ) -> None:
        super().__init__(pass_fds)
        self.pid = os.fork()
        if not self.pid:
            _run(command, self.fds, env, process_group == 0, self.be)
        self.close()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Served(_Pipes):
    """Replaces `subprocess.Popen` in the test process, and asks the server to fork. Other programs start as usual."""

    def __new__(cls, command: Sequence[str], **options: Any) -> Any:
        if command[1:3] != ["-P", "-m"] or command[3] not in (*MODULES, "tests.plainwriter"):
            return subprocess.Popen(command, **options)
        return super().__new__(cls)

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        process_group: int | None,
        **_: Any,
    ) -> None:
        super().__init__(pass_fds)
        self._code: int | None = None
        self._lock = threading.Lock()
        self._server, self.pid = ask(MODULE, command, env, self.fds, process_group == 0)
        self.close()

    def wait(self) -> int:
        with self._lock:
            if self._code is None:
                self._code = int(self._server.recv(100))
                self._server.close()
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def ask(
    module: str,
    command: Sequence[str],
    env: Mapping[str, str],
    fds: Mapping[int, int],
    group: bool,
    directory: Path | None = None,
) -> tuple[socket.socket, int]:
    """Ask the server `module` to fork a process. Returns the socket for its exit status, and the process id."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(_server(module))
    request = {"command": command, "env": dict(env), "group": group, "fds": list(fds), "umask": _umask()}
    request |= {"directory": str(directory or Path.cwd()), "cores": sorted(os.sched_getaffinity(0))}
    data = json.dumps(request).encode()
    assert len(data) < _REQUEST_BYTES
    socket.send_fds(server, [data], list(fds.values()))
    return server, int(server.recv(100))


def _umask() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


_started: dict[tuple[int, str], str] = {}
"""{(process that started the server, module): address of the server}."""


def _server(module: str) -> str:
    started = os.getpid(), module
    if started not in _started:
        life, server_life = socket.socketpair()
        subprocess.Popen([sys.executable, "-m", module, str(server_life.fileno())], pass_fds=[server_life.fileno()])
        server_life.close()
        _started[started] = life.recv(100).decode()
        _lives.append(life)
    return _started[started]


_lives: list[socket.socket] = []
"""A server ends when the other end of its socket is closed."""


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Fork the processes of the store instead of starting interpreters, during the `with` block."""
    with mock.patch.object(child_process, "subprocess", SimpleNamespace(Popen=Served, PIPE=subprocess.PIPE)):
        yield


# ---- the server ---------------------------------------------------------------------------------------------------


def _fork(data: bytes, received: Sequence[int], be: Callable[[Sequence[str]], int]) -> int:
    request = json.loads(data)
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(request["directory"])
        os.umask(request["umask"])
        os.sched_setaffinity(0, request["cores"])
        fds = dict(zip(request["fds"], received, strict=True))
        _run(request["command"], fds, request["env"], request["group"], be)
    if request["group"]:
        os.setpgid(pid, pid)  # the child does the same, but maybe only after this process has answered
    for fd in received:
        os.close(fd)
    return pid


def main(life: int) -> None:
    """Entry point of the server process."""
    for module in (*MODULES, *_ENCODING):
        importlib.import_module(module)
    child_process.subprocess = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    serve(life, main_of)


def serve(life: int, be: Callable[[Sequence[str]], int]) -> None:
    """Fork a process per request until the process that started the server ends. be: what a child runs."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel chooses an abstract address
    listener.listen(64)
    wakeup, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(life, listener.getsockname())
    asked: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (listener, wakeup, life):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == life:
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                data, received, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 100)
                pid = _fork(data, received, be)
                asked[pid] = connection
                connection.send(str(pid).encode())
            else:
                os.read(wakeup, 1000)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with asked.pop(ended[0]) as connection, contextlib.suppress(BrokenPipeError):
                    connection.send(str(os.waitstatus_to_exitcode(ended[1])).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
