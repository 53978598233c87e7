# SPDX-License-Identifier: Apache-2.0
"""Capture under sustained load: a fixed number of requests in flight, and a consumer that removes stores.

    python -m benchmarks.sustained --model DIR --out results.json --loads short64,short256
    python -m benchmarks.report results.json

Each setup has an engine in a process of its own. All engines of a group are up at once, and one works at a time. So
give each engine a part of the GPU's memory (--kv-gigabytes), or a GPU of its own (--gpus). A consumer in another
process removes finished stores, except every 16th, which is verified after the measurement. The result file is
rewritten after every measurement.

With --slice S, engines with the same load run in turn for S seconds each, while the processes of the others are stopped
(`benchmarks.slices`). Their ratio to stock then has an interval of 95 %.

If the backlog of bytes that wait to be written grows, the speed cannot be sustained. `sustained_tok_per_s` is then the
estimated speed at which writing would keep up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import common, drafts, fitted, slices
from benchmarks.capture import note, serve_engine
from benchmarks.engine import Bench
from benchmarks.loads import LOADS, Client, Load, growth, latency_ms
from benchmarks.report import busy_table
from benchmarks.setups import Sustained, sustained_setups
from benchmarks.summary import base_of
from benchmarks.worker import worker_backlog, worker_graph_mode, worker_profile, worker_python_us, worker_writers_s

MODULE = "benchmarks.sustained"
_GROWS = 0.02
"""A backlog counts as growing if it grows by more than this share of the exported bytes."""


class Busy(Bench):
    """One engine under continuous load."""

    def __init__(self, args: argparse.Namespace, setup: Sustained) -> None:
        engine_args = {**args.engine_args}
        graphs = {"cudagraph_mode": setup.graphs} if setup.graphs else {}
        engine_args["compilation_config"] = {**engine_args.get("compilation_config", {}), **graphs}
        if setup.drafts:
            folder = Path(args.store_dir).absolute() / f"{setup.engine} head"
            engine_args["speculative_config"] = drafts.speculative_config(
                setup.drafts, args.model, folder, weights=False
            )
        options = {"sink": setup.sink, "codec": setup.codec, **args.options} if setup.hooks else {}
        options |= args.options_of.get(setup.name, {})
        if setup.encoding or setup.probes:
            options |= self._fitted(args, setup)
        if setup.owner == "pool" and (gigabytes := args.pool_gigabytes.get(setup.name, args.pool_gigabytes.get("*"))):
            options["pool_bytes"] = int(gigabytes * 1e9)
        if setup.hooks and setup.graphs:
            options["cuda_graphs"] = "vllm"
        mine = argparse.Namespace(**{**vars(args), "engine_args": engine_args, "options": options, "together": False})
        super().__init__(mine, setup.engine, setup)
        self.setup, self._current = setup, setup
        self._clock = slices.ActiveClock(args.stops) if args.stops else time.perf_counter
        self.facts["cudagraph_mode"] = self.llm.collective_rpc(worker_graph_mode)[0]
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.facts["context_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size

    @staticmethod
    def _fitted(args: argparse.Namespace, setup: Sustained) -> dict[str, Any]:
        """The server options of an encoding or of probes. Writes their files to a directory beside --store-dir."""
        folder = Path(args.store_dir).absolute().with_name(f"{Path(args.store_dir).name} {setup.name} files")
        if setup.probes:
            return {"probes": fitted.probes(setup.probes, args.model, folder)}
        return {"reduce": fitted.rules(setup.encoding, setup.hooks, args.model, folder)}

    def measure(self, name: str) -> dict[str, Any]:
        """Run the load `name`. Returns speed and latencies, and whether writing kept up."""
        setup, load = self.setup, LOADS[name].shrunk(self.args.shrink)
        self.clean()
        kept = self.store_dir.with_name(f"{self.store_dir.name}-kept")
        consumer = self._consumer(kept) if setup.stores else None
        self._seed += 1
        client = Client(self.llm.llm_engine, load, self.vocab, setup.hooks != "", self._seed, setup.probes, self._clock)
        client.run(self.args.warm, lambda: None)
        samples: list[tuple[float, dict[str, float]]] = []
        speeds: list[float] = []
        counts: list[int] = []
        began = self._clock()

        def look() -> None:
            counts.append(client.tokens)
            samples.append((self._clock() - began, self._backlog()))
            speeds.append(self.llm.collective_rpc(worker_python_us)[0])

        writers_s = self._writers_s()
        seconds = client.run(self.args.seconds, look)
        writers_s = self._writers_s() - writers_s
        result: dict[str, Any] = {**load._asdict(), "seconds": round(seconds, 1), "requests": client.requests}
        result |= {"tok_per_s": round(client.tokens / seconds, 1), "python_us": speeds}
        if self.args.slice:
            result["tokens_each_s"] = [after - before for before, after in pairwise(counts)]
        result |= {"first_token_ms": latency_ms(client.first_s), "between_tokens_ms": latency_ms(client.between_s)}
        if setup.hooks:
            result |= flow(samples, result["tok_per_s"])
        if setup.stores:
            result["writers_cores"] = round(writers_s / seconds, 2)
        if self.args.profile:
            self.llm.collective_rpc(worker_profile, args=(True,))
            client.run(self.args.profile, lambda: None)
            result["profile"] = self.llm.collective_rpc(worker_profile, args=(False,))[0]
            result["profile"].get("step", {}).pop("each_us", None)
        client.finish()
        ended = self._clock()
        self.drain()
        result["drained_s"] = round(self._clock() - ended, 2)
        if consumer is not None:
            answer, _ = consumer.communicate()
            result |= json.loads(answer) | self._verify(kept, load)
            if result["stores"] and not load.captured:
                raise RuntimeError(f"{name}: requests that are not to be captured gave {result['stores']} stores")
            result["lost_rows"] = self._backlog()["lost_rows"]
        return result

    def _consumer(self, kept: Path) -> subprocess.Popen[str]:
        """Start the consumer, which moves every 16th store to `kept`."""
        command = [sys.executable, "-m", "benchmarks.loads", str(self.store_dir), str(kept)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT)

    def _backlog(self) -> dict[str, float]:
        """`worker_backlog`, summed over ranks. Stock is asked too, so that asking costs all engines the same time."""
        found: list[dict[str, float]] = self.llm.collective_rpc(worker_backlog)
        return {name: sum(one[name] for one in found) for name in found[0]}

    def _writers_s(self) -> float:
        """CPU seconds of all writers so far."""
        return sum(self.llm.collective_rpc(worker_writers_s)) if self.setup.stores else 0.0

    def _verify(self, kept: Path, load: Load) -> dict[str, Any]:
        """Check the stores that the consumer kept."""
        paths = sorted(str(path) for path in kept.glob("*.zarr"))
        threads = max(1, self.args.processes // max(1, len(paths)))
        jobs = [self.pool.submit(check_kept, path, load.rows, threads) for path in paths]
        problems = [problem for job in jobs for problem in job.result()]
        shutil.rmtree(kept)
        return {"verified": not problems, **({"problems": problems[:5]} if problems else {})}


def flow(samples: list[tuple[float, dict[str, float]]], tok_per_s: float) -> dict[str, Any]:
    """Export rate and backlog. samples: (seconds, result of `Busy._backlog`). tok_per_s: the measured speed."""
    bytes_of = lambda name: [(at, one[name]) for at, one in samples]  # noqa: E731
    rate, grows = growth(bytes_of("exported")), growth(bytes_of("waiting"))
    result: dict[str, Any] = {
        "exported_GB_per_s": round(rate / 1e9, 3),
        "waiting_GB": [round(one["waiting"] / 1e9, 3) for _, one in samples],
        "waiting_grows_GB_per_s": round(grows / 1e9, 3),
        "keeps_up": grows <= _GROWS * rate or rate == 0,
    }
    if not result["keeps_up"]:
        result["sustained_tok_per_s"] = round(tok_per_s * (1 - grows / rate), 1)
    return result


def check_kept(path: str, most_rows: int, threads: int = 1) -> list[str]:
    """The problems with a store, which must be complete and have at most `most_rows` rows.

    threads: number of threads that check it.
    """
    from dmi_connector import open_capture

    problems = common.store_problems(path, threads)
    capture = open_capture(path, timeout=0, allow_incomplete=True)
    if not capture.complete:
        problems.append(f"{Path(path).name}: it is incomplete: {capture.reason}")
    rows, prompt = len(capture.token_ids), capture.prompt_len
    if not prompt <= rows <= most_rows:
        problems.append(f"{Path(path).name}: {rows} rows, for a prompt of {prompt} tokens and at most {most_rows} rows")
    return problems


# ---- the parent -------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-sustained")
    p.add_argument("--model", help="model directory (weights are random); default: a tiny Qwen3")
    p.add_argument(
        "--setups", default="stock,hidden-states zstd", help="comma-separated; semicolons separate groups of engines"
    )
    p.add_argument("--loads", default="short64", help=f"comma-separated: {', '.join(LOADS)}")
    p.add_argument(
        "--loads-of", type=json.loads, default={}, help='JSON: other loads of a setup, as in {"stock": "short16"}'
    )
    p.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (default: %(default)s)")
    p.add_argument("--warm", type=float, default=6.0, help="seconds of load before a measurement (%(default)s)")
    p.add_argument("--profile", type=float, default=0.0, help="seconds after a measurement while steps are timed")
    p.add_argument("--repeat", type=int, default=1, help="rounds (default: %(default)s)")
    p.add_argument("--shrink", type=int, default=1, help="divide requests and tokens of all loads, for small machines")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--max-model-len", type=int, default=0, help="0: the length that the loads need")
    p.add_argument("--options", type=json.loads, default={}, help="JSON: more server options of engines that capture")
    p.add_argument(
        "--options-of",
        type=json.loads,
        default={},
        help='JSON: more options of one setup, as in {"full none:a": {"writers": 4}}. A label, such as ":a", lets a '
        "setup come several times",
    )
    p.add_argument("--owner", default="target", help=argparse.SUPPRESS)
    p.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="processes that check stores")
    p.add_argument("--kv-gigabytes", type=json.loads, default={}, help='JSON: GB of KV cache of each setup, or of "*"')
    p.add_argument(
        "--pool-gigabytes", type=json.loads, default={}, help='JSON: GB of the pool of each setup, or of "*"'
    )
    p.add_argument("--gpus", type=int, default=0, help="number of GPUs; engine i of a group gets GPU i modulo this")
    p.add_argument(
        "--slice",
        type=float,
        default=0.0,
        help="seconds per slice; 0: engines take turns by whole rounds",
    )
    p.add_argument("--stops", default="", help=argparse.SUPPRESS)
    p.add_argument("--starts", type=int, default=0, help="only measure this number of starts of each engine")
    p.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    return p


def groups(text: str, known: list[str]) -> list[list[str]]:
    """Parse --setups: groups of names of setups. `NAME:LABEL` is setup NAME. Raises ValueError for an unknown name."""
    found = [[name.strip() for name in group.split(",") if name.strip()] for group in text.split(";")]
    for name in (name for group in found for name in group):
        if name.split(":")[0] not in known:
            raise ValueError(f"--setups: {name!r} is unknown; choose from {', '.join(known)}")
    return found


def run(args: argparse.Namespace, argv: list[str], chosen: list[list[str]]) -> dict[str, Any]:
    """Start the engines of one group at a time, and measure all loads of each engine."""
    results: dict[str, Any] = {"header": common.header(MODULE, argv), "engines": {}}
    for group in chosen:
        with ExitStack() as stack:
            turns = {name: stack.enter_context(closing(slices.Slice())) for name in group} if args.slice else {}
            with common.turn(alone=False):
                children = {
                    name: _start(name, argv, i % args.gpus if args.gpus else None, turns.get(name))
                    for i, name in enumerate(group)
                }
                for child in children.values():
                    stack.callback(child.close)
                for name in [*children]:
                    answer = children[name].answer()
                    results["engines"][name] = {"loads": {}, **(answer.get("ready") or answer)}
                    note(f"{name}: {json.dumps(answer)}")
                    if "failed" in answer:
                        del children[name]
            common.save(args.out, results)
            with common.turn(alone=True):
                if args.slice:
                    _take_slices(args, children, turns, results)
                else:
                    _take_turns(args, children, results)
    return results


def _take_turns(args: argparse.Namespace, children: dict[str, common.Child], results: dict[str, Any]) -> None:
    """Measure each load of each engine, round by round."""
    for _ in range(args.repeat):
        for load in args.loads.split(","):
            for name in [n for n in children if load in args.loads_of.get(n, args.loads).split(",")]:
                _keep(name, load, children[name].answer({"load": load}), children, results)
                common.save(args.out, results)


def _take_slices(
    args: argparse.Namespace,
    children: dict[str, common.Child],
    turns: dict[str, slices.Slice],
    results: dict[str, Any],
) -> None:
    """Measure each load. Engines with the same stock engine take turns in slices."""
    for load in args.loads.split(",") * args.repeat:
        asked = [name for name in children if load in args.loads_of.get(name, args.loads).split(",")]
        for base in dict.fromkeys(base_of(name) for name in asked):
            group = {name: children[name] for name in asked if base_of(name) == base}
            answers = slices.take_slices(group, turns, {"load": load}, args.slice)
            stock = answers.get(base, {}).get("tokens_each_s")
            for name, answer in answers.items():
                if stock and name != base and "failed" not in answer:
                    answer["of_stock"] = slices.ratio(answer["tokens_each_s"], stock)
                _keep(name, load, answer, children, results)
            common.save(args.out, results)


def _keep(
    name: str, load: str, answer: dict[str, Any], children: dict[str, common.Child], results: dict[str, Any]
) -> None:
    """Add an answer to the results. A child that failed is removed from `children`."""
    note(f"{name:32s} {load:9s} {json.dumps(answer)}")
    if "failed" in answer:
        results["engines"][name]["failed"] = answer["failed"]
        del children[name]
    else:
        results["engines"][name]["loads"].setdefault(load, []).append(answer)


def starts(args: argparse.Namespace, argv: list[str], chosen: list[list[str]]) -> dict[str, Any]:
    """Start each engine alone, several times. After the first time the compiled model is in vLLM's cache."""
    results: dict[str, Any] = {"header": common.header(MODULE, argv), "engines": {}}
    for _ in range(args.starts):
        for name in (name for group in chosen for name in group):
            with closing(_start(name, argv)) as child:
                answer = child.answer()
            note(f"{name}: {json.dumps(answer)}")
            found = results["engines"].setdefault(name, {"start_s": []})
            found["start_s"].append(answer["ready"]["start_s"] if "ready" in answer else answer["failed"])
            common.save(args.out, results)
    return results


def _start(name: str, argv: list[str], gpu: int | None = None, turn: slices.Slice | None = None) -> common.Child:
    """Start the child process of an engine.

    gpu: the GPU that it uses; None: those that this process sees. turn: stops and continues its processes.
    """
    env = common.child_env(VLLM_ALLOW_INSECURE_SERIALIZATION="1")  # `collective_rpc` pickles functions
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    more = [] if turn is None else ["--stops", turn.path]
    child = common.Child(common.child_command(MODULE, [*argv, *more], name), env)
    if turn is not None:
        turn.session = child.pid
    return child


def sound(results: dict[str, Any]) -> bool:
    """Whether every engine ran, every kept store was verified, no store vanished and no row was lost."""
    found = [one for e in results["engines"].values() for runs in e.get("loads", {}).values() for one in runs]
    failed = any("failed" in engine for engine in results["engines"].values())
    lacks = any(one.get("lost_rows") or one.get("vanished") for one in found)
    return not failed and not lacks and all(one.get("verified", True) for one in found)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    child_argv = argv
    if args.model is None:
        args.model = common.tiny_model(args.store_dir)
        child_argv = [*argv, "--model", args.model]
    if not args.max_model_len:
        loads = [LOADS[name].shrunk(args.shrink) for name in args.loads.split(",")]
        args.max_model_len = max(load.most_tokens for load in loads)
    setups = {setup.name: setup for setup in sustained_setups(args.model)}
    if args.child:
        setup = replace(setups[args.child.split(":")[0]], name=args.child, engine=args.child)
        serve_engine(args.fd, lambda: Busy(args, setup), lambda bench, asked: bench.measure(asked["load"]))
        return 0
    try:
        chosen = groups(args.setups, list(setups))
    except ValueError as error:
        parser().error(str(error))
    common.end_with_children()
    results = (starts if args.starts else run)(args, child_argv, chosen)
    common.save(args.out, results)
    print(busy_table(results))
    return 0 if sound(results) else 1


if __name__ == "__main__":
    sys.exit(main())
