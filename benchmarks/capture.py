# SPDX-License-Identifier: Apache-2.0
"""Throughput of capture compared with stock vLLM and with vLLM's own extraction, in one run on one machine.

    python -m benchmarks.capture --model DIR --out results.json [--cases decode1,decode32,decode128,prefill32]
    python -m benchmarks.report results.json

Every engine runs in a process of its own. Sinks and codecs do not change the compiled graph, so several setups share an
engine that captures, and the benchmark switches sink and codec in the running worker. After the last round of a case,
every store is verified, and its rows are counted. The result says beside each number whether that succeeded. The result
file is rewritten after every measurement, so that an interrupted run leaves its results. The exit status is 1 if an
engine failed, or if the check of a store failed.

With --together all engines are up at once, and the rounds of a case alternate between engines. Numbers that are
compared are then measured within seconds of each other. The engines share one GPU, so give each a part of its memory
with --kv-gigabytes.

With --before DIR each setup that captures is also measured with the code in DIR, another checkout of this repository.
Give --together too: alternating rounds show a change although the speed of the machine varies.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common
from benchmarks.report import table
from benchmarks.setups import (
    BEFORE,
    CASES,
    CURVES,
    PROFILE,
    Setup,
    Turn,
    choose,
    in_groups,
    in_phases,
    in_sequence,
    with_before,
)
from benchmarks.summary import runs

if TYPE_CHECKING:
    from benchmarks.engine import Bench

MODULE = "benchmarks.capture"
_BEGIN = time.monotonic()
"""Start of the program. Lines of progress begin with the seconds since then."""
_PINNED = 3
"""Number of cores for an engine's thread with --pin. Other threads of the process need cores too."""
Stock = dict[tuple[int, str], list[float]]
"""{(phase, case): tokens per second of each round of stock}."""


def serve_engine(fd: int, make: Callable[[], Any], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Run one engine in a child process. Answer the parent's requests on the socket `fd` until the parent closes it.

    make: starts the engine, and returns an object with `facts` and `close`. answer: takes that object and a request,
    and returns the answer. Both are JSON objects.
    """
    with socket.socket(fileno=fd) as parent, parent.makefile() as requests:

        def say(found: dict[str, Any]) -> None:
            parent.sendall((json.dumps(found) + "\n").encode())

        try:
            with closing(make()) as bench:
                say({"ready": bench.facts})
                for line in requests:
                    say(answer(bench, json.loads(line)))
        except Exception as error:
            say({"failed": common.without_directories(f"{type(error).__name__}: {error}")})
            raise


def answer(setups: list[Setup], bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request of the parent, in the process of an engine. setups: the setups of that engine."""
    named = {setup.name: setup for setup in setups}
    match request:
        case {"begin": name, "case": case}:
            return bench.begin(named[name], case)
        case {"again": name, "cores": cores}:
            return bench.again(named[name], cores)
        case {"profile": name}:
            return bench.profile(named[name])
    raise ValueError(f"unknown request {request}")


class Run:
    """The engines that are up, and the results so far, in the parent process.

    start: starts the child process of an engine. results: the results, which are saved to the file `out` after every
    answer. pin: move engines' threads to the fastest cores before each round (--pin).
    """

    def __init__(self, start: Callable[[str], common.Child], results: dict[str, Any], out: str, pin: bool) -> None:
        self._start, self._results, self._out, self._pin = start, results, out, pin
        self._engines: dict[str, dict[str, Any]] = results["engines"]
        self._children: dict[str, common.Child] = {}
        self._stock: Stock = {}

    def measure(self, turns: list[Turn], together: bool) -> None:
        """Measure all turns. together: start all engines at once; otherwise start each when it is first needed."""
        last = {turn.engine: turn for turn in turns}
        if together:
            with common.turn(alone=False):
                self._up(list(last))
        for group in in_groups(turns, together):
            for turn in group:
                if turn.engine not in self._engines:
                    self._up([turn.engine])
            with common.turn(alone=True):
                self._take([turn for turn in group if turn.engine in self._children])
            self._down([turn.engine for turn in group if turn is last[turn.engine]])

    def close(self) -> None:
        """Stop all engines."""
        self._down(list(self._children))

    def _up(self, engines: list[str]) -> None:
        for engine in engines:
            self._engines[engine] = {"setups": {}}
            self._children[engine] = self._start(engine)
        for engine in engines:
            answer = self._answer(engine)
            if answer is not None:
                self._engines[engine] = answer["ready"] | self._engines[engine]
                note(f"{engine} is ready: {json.dumps(answer['ready'])}")

    def _take(self, group: list[Turn]) -> None:
        """Measure the turns of a group, whose rounds alternate."""
        left: dict[Turn, int] = {}
        alternate = len(group) > 1
        for turn in group:
            name = turn.setup.name.removesuffix(BEFORE)  # the name that its engine knows
            if turn.case == PROFILE:
                self._add(turn, self._answer(turn.engine, {"profile": name}), False)
                continue
            answer = self._answer(turn.engine, {"begin": name, "case": turn.case})
            left[turn] = answer.pop("rounds") if answer else 0
            self._add(turn, answer, alternate)
        while any(left.values()):
            for turn in [turn for turn in left if left[turn]]:
                cores = common.quickest_cores(_PINNED) if self._pin else None
                name = turn.setup.name.removesuffix(BEFORE)
                answer = self._answer(turn.engine, {"again": name, "cores": cores})
                left[turn] = left[turn] - 1 if answer is not None else 0
                self._add(turn, answer, alternate)

    def _add(self, turn: Turn, numbers: dict[str, Any] | None, alternate: bool) -> None:
        if numbers:
            note(f"{turn.setup.name:24s} {turn.case:16s} {json.dumps(numbers)}")
            add(self._results, turn, numbers, self._stock, alternate)
            common.save(self._out, self._results)

    def _answer(self, engine: str, request: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Send `request`, if given. Returns the engine's next answer; stops an engine that failed, and returns None."""
        answer = self._children[engine].answer(request)
        if "failed" not in answer:
            return answer
        self._failed(engine, answer["failed"])
        self._down([engine])
        return None

    def _down(self, engines: list[str]) -> None:
        """Stop those of `engines` that are up. They stop at the same time, because each takes seconds."""
        children = {engine: self._children.pop(engine) for engine in engines if engine in self._children}
        for child in children.values():
            child.end()
        for engine, child in children.items():
            if status := child.close():
                self._failed(engine, f"exit status {status}")

    def _failed(self, engine: str, why: str) -> None:
        if "failed" not in self._engines[engine]:  # later reasons are consequences of the first
            self._engines[engine]["failed"] = why
            note(f"{engine} failed: {why}")
            common.save(self._out, self._results)


def note(text: str) -> None:
    """Print a line of progress to standard error."""
    print(f"{time.monotonic() - _BEGIN:6.1f} {text}", file=sys.stderr, flush=True)


def add(results: dict[str, Any], turn: Turn, numbers: dict[str, Any], stock: Stock, alternate: bool) -> None:
    """Add the numbers of a turn to `results`, and those of stock to `stock` too.

    The rounds of stock in all phases are joined. Numbers of other setups get `stock_tok_per_s`, the median of stock in
    the same phase. If their rounds alternated with those of stock (`alternate`), the numbers also get `ratio`, the
    median of the ratios of each round to the round of stock just before it.
    """
    cases = results["engines"][turn.engine]["setups"].setdefault(turn.setup.name, {})
    key = turn.phase, turn.case
    if turn.engine == "stock" and turn.case != PROFILE:
        stock[key] = numbers["runs"]
        if turn.case in cases:
            former = cases[turn.case]
            both = {name: former[name] + numbers[name] for name in ("runs", "python_us") if name in numbers}
            numbers = numbers | both | {"tok_per_s": statistics.median(both["runs"])}
    elif key in stock and "tok_per_s" in numbers:
        runs, then = numbers["runs"], stock[key]
        numbers = {**numbers, "stock_tok_per_s": statistics.median(then)}
        if alternate and len(runs) == len(then):
            numbers["ratio"] = statistics.median(mine / before for mine, before in zip(runs, then, strict=True))
    cases[turn.case] = numbers


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-bench")
    p.add_argument("--model", help="model directory (weights are random); default: a tiny Qwen3")
    p.add_argument("--engines", default="", help="comma-separated; default: all engines of the setups")
    p.add_argument("--only", default="", help="comma-separated setup names")
    p.add_argument("--cases", default="", help=f"comma-separated: {', '.join(CASES)}")
    p.add_argument("--profile", help="comma-separated setup names whose decode is profiled; default: all")
    p.add_argument("--curves", default="", help=f"comma-separated, setups of growing selections: {', '.join(CURVES)}")
    p.add_argument("--repeat", type=int, default=5, help="rounds of each case (default: %(default)s)")
    p.add_argument("--shrink", type=int, default=1, help="divide requests and tokens of all cases, for small machines")
    p.add_argument("--owner", default="draft", choices=["draft", "target", "pool"], help="server option owner")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--max-model-len", type=int, default=2048)
    p.add_argument("--default-codec", default="zstd", help="codec of hidden-states setups (default: %(default)s)")
    p.add_argument("--options", type=json.loads, default={}, help="JSON: more server options of engines that capture")
    p.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that check stores and measure limits (default: %(default)s)",
    )
    p.add_argument(
        "--limit-seconds", type=float, default=1.0, help="seconds to measure each limit of the machine; 0: measure none"
    )
    p.add_argument("--limits-from", type=Path, help="result or summary of this machine, from which limits are copied")
    p.add_argument("--together", action="store_true", help="start all engines at once and alternate their rounds")
    p.add_argument("--before", type=Path, help="another checkout of this repository, which is measured too")
    p.add_argument(
        "--stand-still",
        action="store_true",
        help="with policy drop, stop the writer of a slow sink while requests run, so that rows are dropped even if "
        "the engine is slower than the writer",
    )
    p.add_argument(
        "--pin",
        action="store_true",
        help=f"before each round, move the engine's thread to the {_PINNED} cores that are fastest at that moment; "
        "other guests of a virtual machine may halve the speed of a core",
    )
    p.add_argument(
        "--kv-gigabytes",
        type=json.loads,
        default={},
        help='JSON: GB of KV cache of each engine, as in {"stock": 8, "*": 14}. For other engines, vLLM decides by the '
        "free memory. vLLM does not start if less memory is free than the share gpu_memory_utilization, even if the "
        """engine reserves less. So with --together also pass --engine-args '{"gpu_memory_utilization": 0.05}'""",
    )
    p.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    return p


def _limits(args: argparse.Namespace) -> dict[str, float]:
    from benchmarks import limits

    copied: dict[str, float] = {}
    if args.limits_from:
        copied = next(run["limits"] for run in runs(args.limits_from).values() if run.get("limits"))
    if not args.limit_seconds:
        return copied
    child = "import json; from benchmarks import limits; print(json.dumps(limits.gpu_limits()))"
    found: dict[str, float] = json.loads(subprocess.check_output([sys.executable, "-c", child]).splitlines()[-1])
    return copied | found | limits.cpu_limits(args.store_dir, args.processes, args.limit_seconds)


def _run_all(args: argparse.Namespace, argv: list[str], setups: list[Setup]) -> dict[str, Any]:
    """Measure the limits of the machine, then the engines, in the parent process."""
    header = common.header(MODULE, argv)
    results: dict[str, Any] = {"header": header, "limits": _limits(args), "engines": {}}
    note(json.dumps(results["limits"]))
    if header["machine"]["gpu"] is None and any(s.engine == "ehs" for s in setups):
        reason = "vLLM's own connector copies over a CUDA stream into pinned memory, and there is no GPU"
        results["engines"]["ehs"] = {"setups": {}, "not_run": reason}
        setups = [s for s in setups if s.engine != "ehs"]

    path_before = ""
    if args.before:
        setups = with_before(setups)
        results["before"] = common.commit(args.before, "DMI_BEFORE")
        path_before = python_path(args.before, Path(f"{args.store_dir}-before") / "metadata")

    def start(engine: str) -> common.Child:
        env = common.child_env(VLLM_ALLOW_INSECURE_SERIALIZATION="1")  # `collective_rpc` pickles functions
        if not engine.endswith(BEFORE):
            return common.Child(common.child_command(MODULE, argv, engine), env)
        command = common.child_command(MODULE, before_argv(argv, args), engine.removesuffix(BEFORE))
        path = os.pathsep.join([path_before, *filter(None, [env.get("PYTHONPATH")])])
        return common.Child(command, env | {"PYTHONPATH": path}, args.before)

    with closing(Run(start, results, args.out, args.pin)) as run:
        run.measure((in_phases if args.together else in_sequence)(setups), args.together)
    common.save(args.out, results)
    return results


def before_argv(argv: list[str], args: argparse.Namespace) -> list[str]:
    """The options of an engine with the code of another checkout: without --before, and with another --store-dir."""
    at = next(i for i, word in enumerate(argv) if word.split("=")[0] == "--before")
    rest = argv[:at] + argv[at + (1 if "=" in argv[at] else 2) :]
    absolute = {"--model": args.model, "--store-dir": f"{args.store_dir}-before"}
    return [*rest, *(word for name, path in absolute.items() for word in (name, os.path.abspath(path)))]


def python_path(checkout: Path, folder: Path) -> str:
    """A PYTHONPATH that acts as an installation of the package in `checkout`, with its entry points.

    folder: where the metadata of that installation is written.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return os.pathsep.join([str(checkout.absolute()), str(folder.absolute())])


def _sound(results: dict[str, Any]) -> bool:
    """Whether no engine failed and every check of stores succeeded."""
    engines = results["engines"].values()
    cases = [case for engine in engines for setup in engine["setups"].values() for case in setup.values()]
    return not any("failed" in e for e in engines) and all(case.get("verified", True) for case in cases)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    child_argv = argv
    if args.model is None:
        args.model = common.tiny_model(args.store_dir)
        child_argv = [*argv, "--model", args.model]
    try:
        setups = choose(args)
    except ValueError as error:
        parser().error(str(error))
    if args.child:
        from benchmarks.engine import Bench

        setups = [s for s in setups if s.engine == args.child]
        serve_engine(args.fd, lambda: Bench(args, args.child, setups[0]), functools.partial(answer, setups))
        return 0
    common.end_with_children()
    results = _run_all(args, child_argv, setups)
    print(table({Path(args.out).stem: results}))
    return 0 if _sound(results) else 1


if __name__ == "__main__":
    sys.exit(main())
