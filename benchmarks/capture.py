# SPDX-License-Identifier: Apache-2.0
"""Throughput of capture against stock vLLM and against vLLM's own extraction, in one run on one machine.

    python -m benchmarks.capture --model DIR --out results.json [--cases decode1,decode32,decode128,prefill32]
    python -m benchmarks.capture --model DIR --out hooks.json --curves hooks --engines stock,hooks-1,hooks-2,hooks-3
    python -m benchmarks.report results.json hooks.json

Every engine runs in a process of its own. One engine of ours serves several sinks and codecs: they do not change the
compiled graph, so the benchmark swaps them in the running worker. Numbers with persistence count only if the stores
verify and account for every row; both are checked here and recorded beside the number. The result file is rewritten
after every measurement, so that a run that was cut off leaves what it had. Exit status 1: an engine failed, or
something did not verify.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.report import machine, report
from benchmarks.setups import CASES, CURVES, Setup, choose

MODULE = "benchmarks.capture"


def run_engine(args: argparse.Namespace, engine: str, setups: list[Setup]) -> None:
    """Child process: measure every setup of one engine and add it to the result file."""
    from benchmarks.engine import Bench

    results = json.loads(Path(args.out).read_text())
    found: dict[str, Any] = {"setups": {}}
    results["engines"][engine] = found
    try:
        with closing(Bench(args, engine, setups[0])) as bench:
            found |= bench.facts
            for setup in setups:
                numbers = found["setups"][setup.name] = {}
                for case, numbers[case] in bench.measure_all(setup):
                    print(f"  {setup.name:22s} {case:16s} {json.dumps(numbers[case])}", file=sys.stderr, flush=True)
                    common.save(args.out, results)
    except Exception as error:
        found["failed"] = common.without_directories(f"{type(error).__name__}: {error}")
        common.save(args.out, results)
        raise


def parser() -> argparse.ArgumentParser:
    p = common.parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-bench")
    p.add_argument("--model", help="model directory (weights are random); default: a tiny Qwen3")
    p.add_argument("--engines", default="", help="comma-separated; default: all that setups and curves need")
    p.add_argument("--only", default="", help="comma-separated setup names")
    p.add_argument("--cases", default="", help=f"comma-separated: {', '.join(CASES)}")
    p.add_argument("--curves", default="", help=f"comma-separated growth curves, beside the cases: {', '.join(CURVES)}")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--shrink", type=int, default=1, help="divide request counts and prompt lengths, for small machines")
    p.add_argument("--owner", default="draft", choices=["draft", "target"])
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--max-model-len", type=int, default=2048)
    p.add_argument("--default-codec", default="zstd")
    p.add_argument("--options", type=json.loads, default={}, help="JSON: more server options of ours")
    p.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--limit-seconds", type=float, default=1.0)
    return p


def _limits(args: argparse.Namespace) -> dict[str, float]:
    from benchmarks import limits

    child = "import json; from benchmarks import limits; print(json.dumps(limits.gpu_limits()))"
    found: dict[str, float] = json.loads(subprocess.check_output([sys.executable, "-c", child]).splitlines()[-1])
    return found | limits.cpu_limits(args.store_dir, args.processes, args.limit_seconds)


def _run_all(args: argparse.Namespace, argv: list[str], engines: list[str]) -> dict[str, Any]:
    """Parent process: the limits of the machine, then one engine after the other."""
    results: dict[str, Any] = {"command": common.command_line(MODULE, argv), "machine": machine()}
    results |= {"limits": _limits(args), "engines": {}}
    print(json.dumps(results["limits"], indent=1), file=sys.stderr, flush=True)
    for engine in engines:
        if engine == "ehs" and results["machine"]["gpu"] is None:
            reason = "vLLM's own connector copies over a CUDA stream into pinned memory, and there is no GPU"
            results["engines"][engine] = {"setups": {}, "not_run": reason}
            continue
        common.save(args.out, results)
        begin = time.perf_counter()
        status = common.run_child(MODULE, argv, engine, VLLM_ALLOW_INSECURE_SERIALIZATION="1")  # functions travel
        results = json.loads(Path(args.out).read_text())
        if status:
            results["engines"].setdefault(engine, {"setups": {}}).setdefault("failed", f"exit status {status}")
        print(f"{engine}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    common.save(args.out, results)
    return results


def _sound(results: dict[str, Any]) -> bool:
    engines = results["engines"].values()
    cases = [case for engine in engines for setup in engine["setups"].values() for case in setup.values()]
    return not any("failed" in e for e in engines) and all(case.get("verified", True) for case in cases)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    child_argv = argv
    if args.model is None:
        from dmi_connector.tiny import make_model

        args.model = str(make_model("qwen3", Path(args.store_dir) / "tiny-qwen3"))
        child_argv = [*argv, "--model", args.model]
    try:
        setups = choose(args)
    except ValueError as error:
        parser().error(str(error))
    if args.child:
        run_engine(args, args.child, [s for s in setups if s.engine == args.child])
        return 0
    results = _run_all(args, child_argv, list(dict.fromkeys(s.engine for s in setups)))
    print(report({Path(args.out).stem: results}))
    return 0 if _sound(results) else 1


if __name__ == "__main__":
    sys.exit(main())
