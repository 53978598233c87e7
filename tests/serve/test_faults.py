# SPDX-License-Identifier: Apache-2.0
"""A server with a file of configs/ and an architecture from a plugin (docs/HOOKS.md) gets SIGTERM in the middle of
requests. Every exported row ends up in a store.

By default (`--shutdown-timeout 0`), vLLM kills its engines and their child processes on SIGTERM. The coordinator is not
a child, and finishes. An engine that has enough time answers its requests first (finish reason "abort"). Otherwise its
clients get no response. Both happen. A response does not imply a complete store, because the worker may be killed
before it learns of the end. The test checks what each store says about itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI
from openai.types import Completion

from dmi_connector import find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, compare
from dmi_connector.cli.tiny_models import make_model
from tests.engine.faults import MANY, check_rows, gone, group_of, kill, processes, runs
from tests.engine.test_configs import CONFIGS, EXPECTED
from tests.ports import free_port
from tests.programs import Program
from tests.serve.conftest import MODEL, _wait

SECONDS = 90
"""Timeout for the engine's processes, above the default of `shutdown_seconds`. The server and the resource tracker of
multiprocessing wait until the clients have disconnected.
"""

CHUNK = 128
"""Rows per chunk: the default, which the file does not change."""
HOMEMADE = "HomemadeForCausalLM"
PLUGIN = f'''
from dmi_connector.engine.model.architectures import Architecture, register_architecture


def register() -> None:
    register_architecture(Architecture("{HOMEMADE}", "vllm.model_executor.models.llama:LlamaForCausalLM"))
'''


@dataclass(frozen=True)
class Served:
    """A running server. client: its OpenAI client. folder: its store directory. oracle: the oracle of its model."""

    process: Program
    client: OpenAI
    folder: Path
    oracle: Oracle


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, known_models: None, vllm_cache_root: Path) -> Iterator[Served]:
    """A server of a model whose architecture vLLM does not know."""
    root = tmp_path_factory.mktemp("configured")
    # transformers knows this architecture for the same weights
    known, model = make_model("llama", root / "known"), root / "model"
    shutil.copytree(known, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [HOMEMADE]}))
    site = root / "site"
    info = site / "my_models-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_models_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmy_models = my_models_plugin:register\n")
    port, log = free_port(), root / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--config", str(CONFIGS / "full.yaml")]
    command += ["--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"]
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(vllm_cache_root), "PYTHONPATH": paths}
    with log.open("wb") as out:
        process = Program(command, cwd=root, stdout=out, stderr=out, env=environment, group=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
        yield Served(process, client, root / "captures", Oracle(known))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)


def test_a_server_with_a_config_and_a_plugin_captures(served: Served) -> None:
    body: dict[str, Any] = {"ignore_eos": True, "kv_transfer_params": {"include_output_tokens": True}}
    reply = served.client.completions.create(
        model=MODEL, prompt="once upon a time", max_tokens=8, temperature=0, extra_body=body
    )
    capture = open_capture(reply.model_extra["kv_transfer_params"]["dmi_store"], timeout=300)
    assert capture.path.parent == served.folder
    assert capture.attrs["architecture"] == HOMEMADE and capture.attrs["codec"] == "lz4"
    assert set(capture.attrs["hooks"]) == EXPECTED["full.yaml"][1]
    assert len(capture.token_ids) == capture.prompt_len + 7
    errors = compare(capture, served.oracle)
    assert all(error <= 1e-5 for error in errors.values()), errors


def test_sigterm_leaves_a_finished_store_for_every_capture(served: Served) -> None:
    process, client, folder = served.process, served.client, served.folder
    pool = ThreadPoolExecutor(MANY)
    try:

        def ask(i: int, tokens: int) -> Completion:
            wanted = {"include_output_tokens": True, "dmi": {"key": f"term-{i}"}}
            body = {"kv_transfer_params": wanted, "ignore_eos": True}
            return client.completions.create(model=MODEL, prompt="hello " * i, max_tokens=tokens, extra_body=body)

        for i in range(1, 3):
            ask(i, 40)
        futures = [pool.submit(ask, i, 1500) for i in range(3, MANY + 1)]
        first_chunk = "*term-*/resid_pre/c/0/0/0"
        engine = processes("EngineCore", process.pid)
        deadline = time.monotonic() + 600
        # run the engine for short times, so that no request ends, however slow the test is
        while len(list(folder.glob(first_chunk))) < MANY:
            assert time.monotonic() < deadline, "captures have not written their first chunk"
            kill(engine, signal.SIGCONT)
            time.sleep(0.1)
            kill(engine, signal.SIGSTOP)
            time.sleep(0.1)
        server, *below = group_of(psutil.Process(process.pid))
        below = [p for p in below if runs(p) and not any("resource_tracker" in word for word in p.cmdline())]
        process.send_signal(signal.SIGTERM)
        kill(engine, signal.SIGCONT)
        print(f"the engine and its processes ended {gone(below, SECONDS):.1f} s after SIGTERM")
        time.sleep(1)  # let the last responses arrive
        kill([server], signal.SIGKILL)  # if it has not ended by itself
        process.wait(120)
        answers = [future.result(60) for future in futures if not future.exception(60)]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)
        pool.shutdown()
    reasons = [answer.choices[0].finish_reason for answer in answers]
    assert set(reasons) <= {"abort", "length"}, "on a busy machine, some requests had ended before"
    found = [info for info in find_captures(folder) if str(info.key).startswith("term-")]
    assert len(found) == MANY and not list(folder.glob("*.partial"))
    captures = [open_capture(info.store, timeout=0, allow_incomplete=True) for info in found]
    assert [capture.complete for capture in captures[:2]] == [True] * 2
    ended = 0
    for capture in captures[2:]:
        if not capture.complete:
            assert capture.reason == "the engine ended before the request did"
        elif capture.attrs["finish_reason"] != "abort":
            assert capture.attrs["finish_reason"] == "length" and len(capture.token_ids) >= 1500
            ended += 1
    assert ended < MANY / 2, "no request was interrupted"
    rows = [check_rows(capture, served.oracle) for capture in captures]
    assert sum(rows) > CHUNK * MANY / 2
