# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to a server in the middle of requests: every row that was exported ends up in a store.

By default (`--shutdown-timeout 0`) vLLM kills its engines on SIGTERM, with every process below them. The coordinator is
not below them, and finishes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from openai import OpenAI

from dmi_connector import find_captures, open_capture
from dmi_connector.oracle import Oracle
from tests.engine.faults import MANY, check_rows, gone, group_of, until
from tests.serve.conftest import MODEL, _free_port, _wait

SECONDS = 30
"""Bound for the engine's processes. The server itself waits until its clients have gone."""


def test_sigterm(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path, vllm_cache_root: Path
) -> None:
    port, log, folder = _free_port(), tmp_path / "server.log", tmp_path / "captures"
    command = [sys.executable, "-m", "dmi_connector.cli", "serve", str(tiny_model("qwen3"))]
    command += ["--hooks", "hidden-states,q,logits", "--store-dir", str(folder), "--chunk-tokens", "32"]
    command += ["--segment-tokens", "64", "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"]
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(vllm_cache_root)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    pool = ThreadPoolExecutor(MANY)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS)

        def ask(i: int, tokens: int) -> object:
            wanted = {"include_output_tokens": True, "dmi": {"key": f"term-{i}"}}
            body = {"kv_transfer_params": wanted, "ignore_eos": True}
            return client.completions.create(model=MODEL, prompt="hello " * i, max_tokens=tokens, extra_body=body)

        for i in range(1, 3):
            ask(i, 40)
        futures = [pool.submit(ask, i, 1500) for i in range(3, MANY + 1)]
        until(lambda: len(list(folder.glob("*.partial/.journal-*"))) >= len(futures), "captures have not begun")
        time.sleep(1)
        below = group_of(psutil.Process(process.pid))[1:]
        process.send_signal(signal.SIGTERM)
        print(f"the engine and its processes ended {gone(below, SECONDS):.1f} s after SIGTERM")
        assert all(future.exception(2 * SECONDS) for future in futures), "they were cut short"
        process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        pool.shutdown()
    found = find_captures(folder)
    assert [info.state for info in found] == ["complete"] * 2 + ["incomplete"] * (MANY - 2)
    assert {info.reason for info in found[2:]} == {"the engine ended before the request did"}
    captures = [open_capture(path, timeout=0, allow_incomplete=True) for path in folder.glob("*.zarr")]
    rows = [check_rows(capture, oracle("qwen3")) for capture in captures]
    assert sum(rows) > 32 * MANY / 2 and not list(folder.glob("*.partial"))
