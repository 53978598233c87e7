# SPDX-License-Identifier: Apache-2.0
"""Throughput of capture against stock vLLM and against vLLM's own extraction, in one run on one machine.

    python -m benchmarks.capture --model DIR --out results.json [--cases decode1,decode32,decode128,prefill32]

Every engine runs in a process of its own. One engine of ours serves several sinks and codecs: they do not change the
compiled graph, so the benchmark swaps them in the running worker. Numbers with persistence count only if the stores
verify and are complete; both are checked here and recorded beside the number.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CASES = {
    # name: (requests, prompt tokens, output tokens)
    "decode1": (1, 64, 128),
    "decode32": (32, 64, 128),
    "decode128": (128, 64, 128),
    "prefill1": (1, 512, 1),
    "prefill8": (8, 512, 1),
    "prefill32": (32, 512, 1),
    "prefill32x4": (128, 512, 1),
}
FULL = "vllm-full,-logits"


@dataclass(frozen=True)
class Setup:
    """One configuration to measure. engine: those with the same one share an engine process."""

    name: str
    engine: str
    hooks: str = ""
    sink: str = "disk"
    codec: str = "zstd"
    policy: str = "block"
    cases: tuple[str, ...] = ()


def setups(default_codec: str) -> list[Setup]:
    """Stock, vLLM's own extraction, then ours from the narrow to the full selection."""
    decode, prefill = ("decode1", "decode32", "decode128"), ("prefill32",)
    everything = (*decode, *prefill)
    return [
        Setup("stock", "stock", cases=everything),
        Setup("ehs", "ehs", cases=everything),
        Setup("hidden-states disk", "hidden", "hidden-states", codec=default_codec, cases=everything),
        Setup("full null", "full", FULL, sink="null", cases=everything),
        Setup("full host", "full", FULL, sink="host", cases=(*everything, "prefill32x4")),
        Setup("full disk none", "full", FULL, codec="none", cases=("decode1", "decode32", "prefill32")),
        Setup("full disk lz4", "full", FULL, codec="lz4", cases=("prefill32",)),
        Setup("full disk zstd", "full", FULL, codec="zstd", cases=("prefill32",)),
    ]


# ---- functions that run inside the worker (sent by collective_rpc) --------------------------------------------


def _exporter() -> Any:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return get_kv_transfer_group()


def worker_switch(worker: Any, changes: dict[str, Any]) -> None:
    """Replace the exporter by one with other options."""
    connector = _exporter()
    connector.exporter.shutdown()
    connector.context = replace(connector.context, options=replace(connector.context.options, **changes))
    from dmi_connector.engine.export import Exporter

    old = connector.exporter
    connector.exporter = None
    layer, rank, gathered = old.layer, old.rank, old.gathered
    del old
    connector.exporter = Exporter(connector.context, layer, rank, connector._vllm_config)
    connector.exporter.gathered = gathered


def worker_pending(worker: Any) -> int:
    """Bytes and captures still on their way to finished stores."""
    return int(_exporter().exporter.pending())


def worker_profile(worker: Any, start: bool) -> dict[str, Any]:
    """Count the engine thread's time in our code: wraps the methods on start, gives microseconds a call on stop."""
    from dmi_connector.engine import export, tracker

    targets = {
        "before_forward": (export.Exporter, "before_forward"),
        "after_forward": (export.Exporter, "after_forward"),
        "build_meta": (tracker.Tracker, "step"),
    }
    if start:
        for owner, method in targets.values():
            original = getattr(owner, method)
            samples: list[float] = []

            def timed(*args: Any, _original: Any = original, _samples: list[float] = samples) -> Any:
                begin = time.perf_counter()
                result = _original(*args)
                _samples.append((time.perf_counter() - begin) * 1e6)
                return result

            timed.original, timed.samples = original, samples  # type: ignore[attr-defined]
            setattr(owner, method, timed)
        return {}
    result = {}
    for name, (owner, method) in targets.items():
        timed = getattr(owner, method)
        setattr(owner, method, timed.original)
        values = sorted(timed.samples) or [0.0]
        result[name] = {
            "calls": len(timed.samples),
            "mean_us": sum(values) / len(values),
            "median_us": values[len(values) // 2],
            "p99_us": values[int(len(values) * 0.99)],
            "max_us": values[-1],
        }
    return result


# ---- one engine -------------------------------------------------------------------------------------------------


class Bench:
    """One engine and the cases measured on it."""

    def __init__(self, args: argparse.Namespace, engine: str, hooks: str) -> None:
        from vllm import LLM

        self.args, self.engine = args, engine
        self.store_dir = Path(args.store_dir) / engine
        extra: dict[str, Any] = {}
        if engine == "ehs":
            self.store_dir.mkdir(parents=True, exist_ok=True)
            extra = _ehs_args(args, str(self.store_dir))
        elif hooks:
            from dmi_connector import capture_args

            extra = capture_args(hooks=hooks, store_dir=self.store_dir, owner=args.owner, **json.loads(args.options))
        begin = time.perf_counter()
        self.llm = LLM(
            model=args.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            seed=0,
            **json.loads(args.engine_args),
            **extra,
        )
        self.start_s = time.perf_counter() - begin
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self._seed = 0

    def prompts(self, count: int, length: int) -> list[Any]:
        """Fresh random prompts, so that nothing is a prefix-cache hit."""
        import numpy as np

        self._seed += 1
        rng = np.random.default_rng(self._seed)
        return [{"prompt_token_ids": rng.integers(10, self.vocab - 10, length).tolist()} for _ in range(count)]

    def generate(self, case: str) -> float:
        from vllm import SamplingParams

        count, prompt, output = (max(1, x // self.args.shrink) if i < 2 else x for i, x in enumerate(CASES[case]))
        transfer = {"kv_transfer_params": {"include_output_tokens": True}}
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, extra_args=transfer
        )
        prompts = self.prompts(count, prompt)
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(o.outputs[0].token_ids) == output for o in outputs)
        return seconds

    def drain(self) -> None:
        """Wait until everything captured has reached its sink."""
        while any(self.llm.collective_rpc(worker_pending)):
            time.sleep(0.01)

    def measure(self, setup: Setup, case: str) -> dict[str, Any]:
        """Median of several runs of one case. tok/s counts generated tokens (decode) or prompt tokens (prefill)."""
        count, prompt, output = CASES[case]
        shrunk = max(1, count // self.args.shrink), max(1, prompt // self.args.shrink)
        tokens = shrunk[0] * (output if output > 1 else shrunk[1])
        ours = setup.engine not in ("stock", "ehs")
        if ours and setup.sink == "disk":
            self.clean()
        self.generate(case)
        if ours:
            self.drain()
        rates, walls, finished = [], [], []
        repeat = self.args.repeat
        for _ in range(repeat):
            if (ours and setup.sink == "disk") or setup.engine == "ehs":
                self.clean()
            begin = time.perf_counter()
            seconds = self.generate(case)
            rates.append(tokens / seconds)
            walls.append(seconds)
            if ours:
                self.drain()
            finished.append(time.perf_counter() - begin)
        result: dict[str, Any] = {"tok_per_s": statistics.median(rates), "runs": [round(r, 1) for r in rates]}
        if ours and setup.sink != "null":
            rows = shrunk[0] * (shrunk[1] + output - 1)
            nbytes = rows * self.token_bytes
            result |= {
                "exported_GB": nbytes / 1e9,
                "finished_s": statistics.median(finished),
                "GB_per_s": nbytes / 1e9 / statistics.median(finished),
            }
            if setup.sink == "disk":
                result |= self.check(shrunk[0], rows)
        return result

    @property
    def token_bytes(self) -> int:
        if not hasattr(self, "_token_bytes"):
            self._token_bytes = self.llm.collective_rpc(_worker_token_bytes)[0]
        return int(self._token_bytes)

    def clean(self) -> None:
        shutil.rmtree(self.store_dir, ignore_errors=True)
        self.store_dir.mkdir(parents=True, exist_ok=True)

    def check(self, stores: int, rows: int) -> dict[str, Any]:
        """Verify every store of the last run and count its rows."""
        paths = sorted(str(p) for p in self.store_dir.glob("*.zarr"))
        with get_context("spawn").Pool(self.args.processes) as pool:
            results = pool.map(_verify, paths)
        stored = sum(size for _, _, size in results)
        problems = [p for found, _, _ in results for p in found]
        good = len(paths) == stores and sum(n for _, n, _ in results) == rows and not problems
        result: dict[str, Any] = {"stores": len(paths), "verified": good, "stored_GB": stored / 1e9}
        return result if good else {**result, "problems": problems[:5]}

    def profile(self, case: str) -> dict[str, Any]:
        self.llm.collective_rpc(worker_profile, args=(True,))
        self.generate(case)
        return self.llm.collective_rpc(worker_profile, args=(False,))[0]  # type: ignore[no-any-return]


def _worker_token_bytes(worker: Any) -> int:
    exporter = _exporter().exporter
    plan = next(iter(exporter.plans.values()))
    return int(plan.token_bytes - 8)


def _verify(path: str) -> tuple[list[str], int, int]:
    from dmi_connector.store.reader import open_capture
    from dmi_connector.store.verify import verify_store

    problems = [str(p) for p in verify_store(path)]
    capture = open_capture(path, timeout=0, allow_incomplete=True)
    if not capture.complete:
        problems.append(f"{path}: {capture.reason}")
    size = sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file())
    return problems, len(capture.token_ids), size


def _ehs_args(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    layers = json.loads((Path(args.model) / "config.json").read_text())["num_hidden_layers"]
    ids = list(range(layers + 1))
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": directory},
        },
    }


def run_engine(args: argparse.Namespace, engine: str) -> None:
    """Child process: measure every setup of one engine and print the results as one JSON line."""
    mine = [s for s in setups(args.default_codec) if s.engine == engine]
    if args.only:
        mine = [s for s in mine if s.name in args.only.split(",")]
    if not mine:
        return
    bench = Bench(args, engine, mine[0].hooks)
    results: dict[str, Any] = {"start_s": round(bench.start_s, 1), "setups": {}}
    wanted = args.cases.split(",") if args.cases else list(CASES)
    for setup in mine:
        if setup.hooks:
            changes = {"sink": setup.sink, "codec": setup.codec, "policy": setup.policy}
            bench.llm.collective_rpc(worker_switch, args=(changes,))
        measured: dict[str, Any] = {}
        for case in setup.cases:
            if case in wanted:
                measured[case] = bench.measure(setup, case)
                print(f"  {setup.name:22s} {case:12s} {json.dumps(measured[case])}", file=sys.stderr, flush=True)
                _save_part(args, engine, {**results, "setups": {**results["setups"], setup.name: measured}})
        if setup.hooks and "decode32" in setup.cases and "decode32" in wanted:
            measured["profile decode32"] = bench.profile("decode32")
            bench.drain()
        results["setups"][setup.name] = measured
        _save_part(args, engine, results)
    shutil.rmtree(bench.store_dir, ignore_errors=True)


def _save_part(args: argparse.Namespace, engine: str, results: dict[str, Any]) -> None:
    Path(f"{args.out}.{engine}.part").write_text(json.dumps(results))


# ---- the whole run ----------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where this ran and with what."""
    import platform
    from importlib.metadata import version

    import torch

    info: dict[str, Any] = {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }
    info["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    for package in ("torch", "zarr", "numcodecs"):
        info[package] = version(package)
    import vllm

    import dmi_connector

    return {**info, "vllm": vllm.__version__, "dmi_connector": dmi_connector.__version__}


def table(results: dict[str, Any]) -> str:
    """Markdown: tok/s and the ratio to stock for each setup and case, GB/s where stores or the link took part."""
    stock = results["engines"].get("stock", {}).get("setups", {}).get("stock", {})
    cases = [c for c in CASES if any(c in s for e in results["engines"].values() for s in e["setups"].values())]
    lines = ["| setup | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for engine in results["engines"].values():
        for name, measured in engine["setups"].items():
            cells = []
            for case in cases:
                got = measured.get(case)
                if got is None:
                    cells.append("")
                    continue
                cell = f"{got['tok_per_s']:,.0f}"
                if case in stock and name != "stock":
                    cell += f" ({got['tok_per_s'] / stock[case]['tok_per_s']:.3f})"
                if "GB_per_s" in got:
                    cell += f" {got['GB_per_s']:.1f} GB/s"
                    link = results["limits"].get("link_d2h_GBps")
                    if link:
                        cell += f" = {got['GB_per_s'] / link:.0%} of link"
                if got.get("verified") is False:
                    cell += " NOT VERIFIED"
                cells.append(cell)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__.splitlines()[0])
    p.add_argument("--model", help="model directory (weights are random); default: a tiny Qwen3")
    p.add_argument("--out", default="benchmarks/results/last.json")
    p.add_argument("--engines", default="stock,ehs,hidden,full")
    p.add_argument("--only", default="", help="comma-separated setup names")
    p.add_argument("--cases", default="")
    p.add_argument("--store-dir", default="/dev/shm/dmi-bench")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--shrink", type=int, default=1, help="divide request counts and prompt lengths, for small machines")
    p.add_argument("--owner", default="draft", choices=["draft", "target"])
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--max-model-len", type=int, default=2048)
    p.add_argument("--default-codec", default="zstd")
    p.add_argument("--options", default="{}", help="JSON: more server options of ours")
    p.add_argument("--engine-args", default="{}", help="JSON: engine arguments for every engine")
    p.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--limit-seconds", type=float, default=1.0)
    p.add_argument("--run-engine", default="", help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.model is None:
        from dmi_connector.tiny import make_model

        args.model = str(make_model("qwen3", Path(args.store_dir) / "tiny-qwen3"))
        argv = [*argv, "--model", args.model]
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the functions above travel to the worker
    if args.run_engine:
        run_engine(args, args.run_engine)
        return 0
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    from benchmarks import limits

    results: dict[str, Any] = {
        "command": "python -m benchmarks.capture " + " ".join(argv),
        "machine": machine(),
        "limits": {},
        "engines": {},
    }
    child = "import json; from benchmarks import limits; print(json.dumps(limits.gpu_limits()))"
    results["limits"] |= json.loads(subprocess.check_output([sys.executable, "-c", child]).splitlines()[-1])
    results["limits"] |= limits.cpu_limits(args.store_dir, args.processes, args.limit_seconds)
    print(json.dumps(results["limits"], indent=1), file=sys.stderr, flush=True)
    for engine in args.engines.split(","):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "benchmarks.capture", *argv, "--run-engine", engine], check=False)
        part = Path(f"{args.out}.{engine}.part")
        if part.exists():
            results["engines"][engine] = json.loads(part.read_text())
            part.unlink()
        if done.returncode:
            results["engines"].setdefault(engine, {"setups": {}})["failed"] = done.returncode
        print(f"{engine}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0 if all("failed" not in e for e in results["engines"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
