# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to a server in the middle of requests: every row that was exported ends up in a store.

By default (`--shutdown-timeout 0`) vLLM kills its engines on SIGTERM, with every process below them. The coordinator is
not below them, and finishes. An engine that has the time answers its requests first (finish reason "abort"); one that
has not leaves its clients waiting. Both happen. An answer does not promise a complete store: the worker may be killed
before it hears of the end. What a store says of itself is checked.
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
from openai.types import Completion

from dmi_connector import find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.faults import MANY, check_rows, gone, group_of, kill, processes, runs
from tests.ports import free_port
from tests.serve.conftest import MODEL, _wait

SECONDS = 90
"""Bound for the engine's processes, beyond the default of `shutdown_seconds`. The server and multiprocessing's tracker
wait until the clients have gone.
"""


def test_sigterm_leaves_a_finished_store_for_every_capture(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path, vllm_cache_root: Path
) -> None:
    port, log, folder = free_port(), tmp_path / "server.log", tmp_path / "captures"
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
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)

        def ask(i: int, tokens: int) -> Completion:
            wanted = {"include_output_tokens": True, "dmi": {"key": f"term-{i}"}}
            body = {"kv_transfer_params": wanted, "ignore_eos": True}
            return client.completions.create(model=MODEL, prompt="hello " * i, max_tokens=tokens, extra_body=body)

        for i in range(1, 3):
            ask(i, 40)
        futures = [pool.submit(ask, i, 1500) for i in range(3, MANY + 1)]
        first_chunk = "*/resid_pre/c/0/0/0"
        engine = processes("EngineCore", process.pid)
        deadline = time.monotonic() + 600
        while len(list(folder.glob(first_chunk))) < MANY:  # by small steps: no request may end, however slow this is
            assert time.monotonic() < deadline, "captures have not come to their first chunk"
            kill(engine, signal.SIGCONT)
            time.sleep(0.1)
            kill(engine, signal.SIGSTOP)
            time.sleep(0.1)
        server, *below = group_of(psutil.Process(process.pid))
        below = [p for p in below if runs(p) and not any("resource_tracker" in word for word in p.cmdline())]
        process.send_signal(signal.SIGTERM)
        kill(engine, signal.SIGCONT)
        print(f"the engine and its processes ended {gone(below, SECONDS):.1f} s after SIGTERM")
        time.sleep(1)  # for the answers that are on their way
        server.kill()
        process.wait(120)
        answers = [future.result(60) for future in futures if not future.exception(60)]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)
        pool.shutdown()
    reasons = [answer.choices[0].finish_reason for answer in answers]
    assert set(reasons) <= {"abort", "length"}, "on a busy machine some had come to their end before"
    found = find_captures(folder)
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
    rows = [check_rows(capture, oracle("qwen3")) for capture in captures]
    assert sum(rows) > 32 * MANY / 2
