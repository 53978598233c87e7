# SPDX-License-Identifier: Apache-2.0
"""One engine of the capture benchmark, which runs the cases and checks their stores."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import random_tokens, store_problems
from benchmarks.setups import CASES, PROFILED, Case, Setup
from benchmarks.worker import (
    worker_pending,
    worker_pin,
    worker_profile,
    worker_python_us,
    worker_sizes,
    worker_stand_still,
    worker_switch,
)

DRAIN_S = 300
"""Maximum seconds until all captures reach their sink after the last token."""
_SLOW_ROUNDS = 2
"""Maximum number of rounds of a case with a slow sink, whose rounds take many times as long."""
_SLOW_BYTES = 1 << 20
"""Bytes of the host buffer of a slow sink, in addition to two chunks. The package accepts no fewer."""
_MOST_FULL = 0.9
"""Maximum share of the free space that the stores of a round may take."""
_MOST_PROBLEMS = 5
"""Maximum number of problems that a result lists."""

# ---- checks -----------------------------------------------------------------------------------------------------


def account(rows: int, there: set[int], missing: set[int], claimed: set[int]) -> list[str]:
    """The problems with the rows of a store that should have `rows` rows.

    there: rows that the store holds. missing: rows that the store lists as missing. Each row must be in exactly one of
    the two. claimed: rows that the response lists as missing. The store must list them too.
    """
    problems = []
    if there & missing or there | missing != set(range(rows)):
        problems.append(f"{len(there)} rows are there and {len(missing)} listed as missing, of {rows}")
    if claimed - missing:
        problems.append(f"the response lists {len(claimed - missing)} rows as missing that the store does not list")
    return problems


def check_store(path: str, rows: int, claimed: list[list[int]] | None, drop: bool) -> dict[str, Any]:
    """Verify one store, and check its rows with `account`.

    rows: number of rows that it should have. claimed: `dmi_missing` of the response, [start, stop) ranges of positions.
    drop: whether rows may be missing. Returns {"problems", "missing": number of missing rows, "bytes": bytes on disk}.
    """
    from dmi_connector import open_capture

    name, problems = Path(path).name, store_problems(path)
    capture = open_capture(path, timeout=0, allow_incomplete=True)
    if not capture.complete and not drop:
        problems.append(f"{name}: it is incomplete: {capture.reason}")
    missing = _rows_of(capture.missing)
    # Missing rows are read as zeros. A row of the residual stream is never all zeros.
    there = set(np.flatnonzero(capture.numpy("resid_pre", layer=0).any(axis=1)).tolist())
    problems += [f"{name}: {what}" for what in account(rows, there, missing, _rows_of(claimed or []))]
    size = sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file())
    return {"problems": problems, "missing": len(missing), "bytes": size}


def _rows_of(ranges: list[list[int]]) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}


def check_ehs_file(path: str, rows: int, layers: int) -> dict[str, Any]:
    """Check the shape of the tensor in a file of vLLM's own connector. Returns as `check_store` does."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        shape = file.get_slice("hidden_states").get_shape()
    problems = [] if shape[:2] == [rows, layers] else [f"{Path(path).name}: {shape}, not {rows} rows, {layers} layers"]
    return {"problems": problems, "missing": 0, "bytes": Path(path).stat().st_size}


# ---- numbers ----------------------------------------------------------------------------------------------------


def rates(case: Case, seconds: Sequence[float]) -> dict[str, Any]:
    """Tokens per second: the median, and the value of each round. seconds: duration of each round."""
    runs = [case.tokens / s for s in seconds]
    return {"tok_per_s": statistics.median(runs), "runs": [round(rate, 1) for rate in runs]}


def exported(nbytes: float, finished: Sequence[float], missing: int) -> dict[str, float]:
    """How fast `nbytes` bytes reached their sink. finished: seconds of each round until its last byte reached the sink.

    Without missing rows, the median of all rounds is used. With missing rows, rounds differ in their number of bytes.
    Then the last round is used, to which `nbytes` belongs.
    """
    seconds = finished[-1] if missing else statistics.median(finished)
    return {"exported_GB": nbytes / 1e9, "finished_s": seconds, "GB_per_s": nbytes / 1e9 / seconds}


# ---- the engine -------------------------------------------------------------------------------------------------


class Bench:
    """One engine. Sinks and codecs do not change the compiled graph, so a running worker can switch between setups.

    facts: facts about the engine for the result. replies: `kv_transfer_params` of the last round's responses. ours:
    whether the engine captures with this package.
    """

    def __init__(self, args: argparse.Namespace, engine: str, setup: Setup) -> None:
        from vllm import LLM

        from dmi_connector import capture_args

        hooks, owner = setup.hooks, setup.owner or args.owner
        self.args, self.engine, self.ours = args, engine, bool(hooks)
        self.store_dir = Path(args.store_dir).absolute() / engine
        self.clean()
        extra: dict[str, Any] = {}
        if engine == "ehs":
            extra = self._ehs_args()
        elif hooks:
            options = {"reduce": dict(setup.reduce), **args.options}
            extra = capture_args(hooks, self.store_dir, owner, **options)
        engine_args = {"dtype": args.dtype, "max_model_len": args.max_model_len, "seed": 0, **args.engine_args}
        if gigabytes := args.kv_gigabytes.get(engine, args.kv_gigabytes.get("*")):
            engine_args["kv_cache_memory_bytes"] = int(gigabytes * 1e9)
        begin = time.perf_counter()
        self.llm = LLM(args.model, load_format="dummy", skip_tokenizer_init=True, **{**engine_args, **extra})
        self.facts: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 1)}
        if hooks:
            self.token_bytes, self.chunk_tokens, self.chunk_bytes = self.llm.collective_rpc(worker_sizes)[0]
            self.facts |= {"hooks": hooks, "reduce": dict(setup.reduce), "bytes_per_token": self.token_bytes}
            self.facts["owner"] = owner
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.replies: list[dict[str, Any]] = []
        self._current: Setup | None = None
        self._case = CASES["decode1"]
        self._rounds: list[tuple[float, float]] = []
        self._python_us: list[float] = []
        if self.ours and args.together:  # the engine then takes no host memory until its turn
            self.llm.collective_rpc(worker_switch, args=({"sink": "null"},))
        self._seed = 0

    def _ehs_args(self) -> dict[str, Any]:
        config = json.loads((Path(self.args.model) / "config.json").read_text())
        self.ehs_layers = config["num_hidden_layers"] + 1
        ids = list(range(self.ehs_layers))
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self.store_dir)},
            },
        }

    def _switch(self, setup: Setup) -> None:
        """Switch the worker of an engine that captures to the options of `setup`."""
        if not self.ours or setup == self._current:
            return
        base = self.args.options
        changes: dict[str, Any] = {"sink": setup.sink, "codec": setup.codec, "policy": setup.policy}
        if setup.slow:
            changes |= {"writers": 1, "host_buffer_bytes": 2 * self.chunk_bytes + _SLOW_BYTES}
        else:
            changes |= {k: base.get(k, 0) for k in ("writers", "host_buffer_bytes")}
        self.llm.collective_rpc(worker_switch, args=(changes, setup.share))
        self._current = setup

    def clean(self) -> None:
        """Remove all stores of the engine."""
        shutil.rmtree(self.store_dir, ignore_errors=True)
        self.store_dir.mkdir(parents=True)

    def close(self) -> None:
        if "pool" in self.__dict__:
            self.pool.shutdown(cancel_futures=True)
        shutil.rmtree(self.store_dir)

    @cached_property
    def pool(self) -> ProcessPoolExecutor:
        """Processes that check stores. If a process is killed, its job raises an error."""
        return ProcessPoolExecutor(self.args.processes, get_context("spawn"))

    def generate(self, case: Case) -> float:
        """Run one round of `case`. Returns its seconds. Random prompts prevent prefix-cache hits."""
        from vllm import SamplingParams

        self._seed += 1
        rng = np.random.default_rng(self._seed)
        ids = random_tokens(rng, self.vocab, (case.requests, case.prompt_tokens))
        # Without a connector, vLLM warns about these parameters at each request.
        transfer = {} if self.engine == "stock" else {"kv_transfer_params": {"include_output_tokens": True}}
        params = SamplingParams(
            temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True, detokenize=False, extra_args=transfer
        )
        prompts = [{"prompt_token_ids": row} for row in ids]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(o.outputs[0].token_ids) == case.output_tokens for o in outputs)
        self.replies = [o.kv_transfer_params or {} for o in outputs]
        return seconds

    def drain(self) -> None:
        """Wait until all captures have reached their sink. Raises TimeoutError after DRAIN_S seconds."""
        deadline = time.monotonic() + DRAIN_S
        while self.ours and any(pending := self.llm.collective_rpc(worker_pending)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"captures did not reach their sink in {DRAIN_S} s: {pending} pending")
            time.sleep(0.01)
        for reply in self.replies if self.engine == "ehs" else []:
            with open(reply["hidden_states_path"] + ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # vLLM's writer holds the lock until the file is complete

    def round(self, setup: Setup, case: Case, still: bool = False) -> tuple[float, float]:
        """Run one round. Returns (seconds until the last token, seconds until all captures reached their sink).

        still: whether the writers are stopped until the last token.
        """
        if setup.stores or self.engine == "ehs":
            self.clean()
        begin = time.perf_counter()
        with self._standing_still() if still else nullcontext():
            seconds = self.generate(case)
        self.drain()
        return seconds, time.perf_counter() - begin

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Stop the writers during the `with` block. The first request starts them, so run a round before."""
        try:
            stopped = self.llm.collective_rpc(worker_stand_still, args=(True,))
            assert all(stopped), "the writers were not found"
            yield
        finally:
            self.llm.collective_rpc(worker_stand_still, args=(False,))

    def begin(self, setup: Setup, name: str) -> dict[str, Any]:
        """Prepare case `name` of a setup: switch to the setup, and run one round that warms up.

        That round is short if the sink is slow. Returns {"rounds": number of calls of `again`}. If the case cannot run,
        `rounds` is 0 and `not_run` is the reason.
        """
        self._switch(setup)
        self._case = CASES[name].shrunk(self.args.shrink)
        self._rounds, self._python_us = [], []
        if setup.stores and (lack := self._lacks_space(self._case)):
            return {**self._case._asdict(), "not_run": lack, "rounds": 0}
        self.round(setup, CASES["decode1"].shrunk(self.args.shrink) if setup.slow else self._case)
        return {"rounds": self._repeat(setup)}

    def _repeat(self, setup: Setup) -> int:
        repeat: int = self.args.repeat
        return min(_SLOW_ROUNDS, repeat) if setup.slow else repeat

    def again(self, setup: Setup, cores: list[int] | None = None) -> dict[str, Any]:
        """Run one round of the case. Returns {}, or after the last round the numbers of the case.

        The stores of the last round are checked, and its missing rows are counted. cores: the cores on which the
        engine's thread runs in this round; None: all.
        """
        case = self._case
        if cores:
            self.llm.collective_rpc(worker_pin, args=(cores,))
        still = self.args.stand_still and setup.slow and setup.policy == "drop"
        self._rounds.append(self.round(setup, case, still))
        self._python_us += self.llm.collective_rpc(worker_python_us)[:1]
        if cores:  # otherwise processes that the engine starts later would inherit the cores
            self.llm.collective_rpc(worker_pin, args=(sorted(os.sched_getaffinity(0)),))
        if len(self._rounds) < self._repeat(setup):
            if setup.stores:
                self.clean()  # the next engine needs the space
            return {}
        seconds, finished = zip(*self._rounds, strict=True)
        result = {**case._asdict(), **rates(case, seconds), "python_us": self._python_us}
        found: dict[str, Any] = {}
        if setup.stores:
            found = self.check(case, setup.policy == "drop")
        elif self.engine == "ehs":
            found = self.check_ehs(case)
        if self.engine == "ehs" or (self.ours and setup.sink != "null"):
            missing = found.get("missing_rows", 0)
            stored = (case.requests * case.rows - missing) * self.token_bytes if self.ours else found["stored_GB"] * 1e9
            result |= exported(stored, finished, missing)
        if found:
            self.clean()
        return result | found

    def _lacks_space(self, case: Case) -> str:
        """Why there is not enough space for the stores of a case; "" if there is.

        Each store counts whole chunks, without compression.
        """
        need = case.requests * -(-case.rows // self.chunk_tokens) * self.chunk_bytes
        free = shutil.disk_usage(self.store_dir).free
        return f"{need / 1e9:.0f} GB of stores, {free / 1e9:.0f} GB free" if need > _MOST_FULL * free else ""

    def check(self, case: Case, drop: bool) -> dict[str, Any]:
        """Check every store of the last round with `check_store`. drop: whether rows may be missing."""
        replies = {reply.get("dmi_store"): reply.get("dmi_missing") for reply in self.replies}
        paths = sorted(str(p) for p in self.store_dir.glob("*.zarr"))
        problems = [] if set(paths) == set(replies) else [f"{len(paths)} stores for {len(replies)} responses"]
        jobs = [self.pool.submit(check_store, path, case.rows, replies.get(path), drop) for path in paths]
        result = _summary([job.result() for job in jobs], problems)
        claimed = sum(stop - start for ranges in replies.values() for start, stop in ranges or ())
        return result | {"rows": case.requests * case.rows, "claimed_rows": claimed}

    def check_ehs(self, case: Case) -> dict[str, Any]:
        """Check the files of vLLM's own connector."""
        paths = [reply["hidden_states_path"] for reply in self.replies]
        return _summary([check_ehs_file(path, case.rows, self.ehs_layers) for path in paths], [])

    def profile(self, setup: Setup) -> dict[str, Any]:
        """Run a round of PROFILED. Returns the times of `worker_profile` on the engine's thread."""
        self._switch(setup)
        self.llm.collective_rpc(worker_profile, args=(True,))
        self.generate(CASES[PROFILED].shrunk(self.args.shrink))
        result: dict[str, Any] = self.llm.collective_rpc(worker_profile, args=(False,))[0]
        self.drain()
        self.clean()
        return result


def _summary(checks: list[dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """The numbers of a round's files. checks: results of `check_store` or `check_ehs_file`. problems: other ones."""
    problems = problems + [problem for check in checks for problem in check["problems"]]
    result = {
        "stores": len(checks),
        "stored_GB": sum(check["bytes"] for check in checks) / 1e9,
        "missing_rows": sum(check["missing"] for check in checks),
        "verified": not problems,
    }
    return result | ({"problems": problems[:_MOST_PROBLEMS]} if problems else {})
