# SPDX-License-Identifier: Apache-2.0
"""Two real servers for all tests of this directory, one after the other: first with owner draft, then with owner
target. They are stopped before tests of other directories, because idle workers of two engines take a tenth of a core.

The first server is started as by a user, except that its engine core and worker are forked. All processes of the second
one are forked (tests/programs.py). It has two data-parallel engines and a logits processor, which vLLM supports only
with owner target. `make soak` also starts a server whose engine core is spawned, as vLLM does on a CPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from tests.forking.fork_workers import environment as forking
from tests.ports import free_port
from tests.programs import Program
from tests.shorter import soak

MODEL = "tiny"
START_SECONDS = 900
ROOT = Path(__file__).parents[2]
_TWO_ENGINES = ["--data-parallel-size", "2", "--logits-processors", "tests.engine.force_token:ForceToken"]
OWNERS = {"draft": [], "spawned": [], "target": _TWO_ENGINES, "pool": _TWO_ENGINES}
"""{server: more arguments}. "spawned" has owner draft."""


SERVERS: list[subprocess.Popen[bytes] | Program] = []
"""All servers that were started."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the servers after the last test of this directory."""
    here = Path(__file__).parent
    if nextitem is not None and here not in nextitem.path.parents:
        for process in SERVERS:
            end(process)


@dataclass(frozen=True)
class Server:
    """A running server. client: its OpenAI client. store_dir: its store directory. owner: owner of rows. pid, log: of
    its process.
    """

    client: OpenAI
    store_dir: Path
    owner: str
    pid: int
    log: Path


def _wait(process: subprocess.Popen[bytes] | Program, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{_cause(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    raise TimeoutError(f"the server was not up after {START_SECONDS} s:\n{_cause(log)}")


def _cause(log: Path) -> str:
    """The first errors in the log, which come long before the server gives up, and the end of the log."""
    text = log.read_text()
    errors = [line for line in text.splitlines() if "Error" in line or "error" in line]
    return "\n".join([*errors[:20], "...", text[-1500:]])


@pytest.fixture(scope="session", params=["draft", "target", *soak("pool", "spawned")])
def server(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    vllm_cache_root: Path,
) -> Iterator[Server]:
    name, root = request.param, tmp_path_factory.mktemp("serve")
    owner = "draft" if name == "spawned" else name
    port, log = free_port(), root / "server.log"
    command = [sys.executable, "-m", "dmi_connector.cli", "serve", str(tiny_model("qwen3"))]
    command += ["--hooks", "vllm-full,attention,mlp_pre*", "--store-dir", str(root / "captures")]
    command += ["--chunk-tokens", "32", "--segment-tokens", "64"]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--max-num-batched-tokens", "128", "--max-num-seqs", "16", "--owner", owner, *OWNERS[name]]
    command += ["--enable-log-requests"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for the logits processor
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(vllm_cache_root), "PYTHONPATH": paths}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # logs aborted requests
    process: subprocess.Popen[bytes] | Program
    with log.open("wb") as out:
        # A process group of its own, so that the engine's processes can be killed with it if it hangs.
        if owner == "draft":
            started = {**environment, **forking(cores=name != "spawned")}
            process = subprocess.Popen(command, stdout=out, stderr=out, env=started, process_group=0)
        else:
            process = Program(command, stdout=out, stderr=out, env=environment, group=True)
    SERVERS.append(process)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"), root / "captures", owner, process.pid, log
        )
    finally:
        end(process)


def end(process: subprocess.Popen[bytes] | Program) -> None:
    """Stop a server and its engines, if it still runs."""
    process.terminate()
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)
