# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `dmi run`, compared with `LLM.generate` that captures the same prompts.

    python -m benchmarks.bulk --model DIR --out results.json [--requests 400] [--max-tokens 32]

Each of the two has its own engine with the same arguments, and reads the same token ids from files of JSON lines. Their
rounds alternate, and one engine works at a time. A round of `LLM.generate` is one call with all prompts. The time of a
round includes reading the file, writing the manifest, and finishing the last store. It does not include the start of
the engines. With `--engines` above 1, only `dmi run` is measured, with this number of engines.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.capture import note, serve_engine
from benchmarks.report import bulk_table
from benchmarks.summary import summarise

MODULE = "benchmarks.bulk"
TARGET = 0.97
"""Minimum ratio of the speed of `dmi run` to the speed of `LLM.generate`."""
_PAUSE_S = 0.005


def write_prompts(path: Path, args: argparse.Namespace, seed: int) -> None:
    """Write a file of prompts. Their lengths are uniformly distributed around `--prompt-tokens`."""
    rng = np.random.default_rng(seed)
    mean = args.prompt_tokens
    lengths = rng.integers(max(1, mean // 2), mean + mean // 2 + 1, args.requests)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    with open(path, "w") as file:
        for length in lengths.tolist():
            ids = common.random_tokens(rng, vocab, length)
            file.write(json.dumps({"prompt_token_ids": ids}) + "\n")


def clear(directory: Path) -> None:
    """Remove all stores of a directory, and its index."""
    for path in directory.glob("*.zarr"):
        shutil.rmtree(path)
    (directory / "index.jsonl").unlink(missing_ok=True)


class ByHand:
    """`LLM.generate` in an engine that captures.

    facts: facts about the engine, for the log.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        from dmi_connector import capture_args

        self.args, self.directory = args, Path(args.store_dir) / "by-hand"
        captured = capture_args(args.hooks, self.directory, args.owner, **args.options)
        self.llm = LLM(args.model, **captured, **args.engine_args)
        self.facts: dict[str, Any] = {"max_num_seqs": self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs}

    def round(self, path: Path) -> dict[str, Any]:
        """Capture all prompts of a file. Returns the seconds and tokens of the round."""
        from vllm import SamplingParams

        begin = time.perf_counter()
        prompts: list[Any] = [json.loads(line) for line in path.read_text().splitlines()]
        sampling = [
            SamplingParams(
                max_tokens=self.args.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"include_output_tokens": True, "dmi": {"key": f"row-{row}"}}},
            )
            for row in range(len(prompts))
        ]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        stores = [Path((output.kv_transfer_params or {})["dmi_store"]) for output in outputs]
        answered = time.perf_counter()
        for store in stores:
            while not store.exists():
                time.sleep(_PAUSE_S)
        seconds = time.perf_counter() - begin
        tokens = sum(len(o.prompt_token_ids or ()) + len(o.outputs[0].token_ids) for o in outputs)
        drained = time.perf_counter() - answered
        clear(self.directory)
        return {"seconds": round(seconds, 3), "tokens": tokens, "drained_s": round(drained, 3)}

    def close(self) -> None:
        """Stop the engine."""
        self.llm.llm_engine.engine_core.shutdown()


class Bulk:
    """`dmi run`, whose engine processes stay up between rounds. Each round is a run of its own.

    facts: facts about the engines, for the log.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from dmi_connector.bulk.engines import EngineProcesses
        from dmi_connector.bulk.settings import RunSettings

        class Kept(EngineProcesses):
            def finish(self) -> None:
                """Does nothing: the engines stay for the next round."""

        self.args, self.directory = args, Path(args.store_dir) / "dmi-run"
        self.directory.mkdir(parents=True)
        capture = {"hooks": args.hooks, "owner": args.owner, **args.options}
        sampling = {"ignore_eos": True}
        settings = RunSettings(args.model, capture, tuple(flags(args.engine_args)), sampling, args.max_tokens)
        self.life = self.directory / ".life.lock"
        self.life.touch()
        self.engines = Kept(args.engines, settings.engine_message(self.directory), self.directory, self.life)
        self.engines.start()
        while self.engines.room() <= 0:
            if found := self.engines.events(1.0):
                raise RuntimeError(str(found[0]))
        self.facts = {"window": self.engines.room()}

    def round(self, path: Path) -> dict[str, Any]:
        """Capture all prompts of a file. Returns the seconds, tokens and stored GB of the round."""
        from dmi_connector.bulk.budget import Budget
        from dmi_connector.bulk.manifest import Manifest
        from dmi_connector.bulk.order import Order
        from dmi_connector.bulk.progress import Progress
        from dmi_connector.bulk.prompts import Columns
        from dmi_connector.bulk.recovery import Recovered
        from dmi_connector.bulk.run import Run
        from dmi_connector.bulk.sources import open_source

        begin = time.perf_counter()
        with closing(Manifest(self.directory / f"{path.stem}.manifest")) as manifest:
            rows = Order().rows(open_source(path, Columns()), self.directory)
            progress, budget = Progress(True, io.StringIO()), Budget(self.directory)
            run = Run(
                path.stem,
                self.directory,
                rows,
                Recovered(),
                self.engines,
                manifest,
                io.StringIO(),
                budget,
                progress,
                lambda: False,
            )
            outcome = run.go()
        seconds = time.perf_counter() - begin
        counts = outcome.counts
        if not outcome.all_done or counts.done != self.args.requests or counts.rejected:
            raise RuntimeError(f"dmi run did not capture every prompt: {outcome}")
        clear(self.directory)
        return {"seconds": round(seconds, 3), "tokens": counts.tokens, "stored_GB": round(counts.bytes / 1e9, 4)}

    def close(self) -> None:
        """Stop the engines."""
        from dmi_connector.bulk.engines import EngineProcesses

        EngineProcesses.finish(self.engines)
        self.engines.close()


def flags(engine_args: dict[str, Any]) -> Iterator[str]:
    """Arguments of `LLM` as flags of vLLM's command line."""
    for name, value in engine_args.items():
        flag = "--" + name.replace("_", "-")
        if value is False:
            yield "--no-" + flag[2:]
        else:
            yield flag
            if value is not True:
                yield value if isinstance(value, str) else json.dumps(value)


SETUPS = {"generate": ByHand, "run": Bulk}


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure `LLM.generate` and `dmi run` in alternating rounds. The first round of each is a warm-up."""
    setups = list(SETUPS) if args.engines == 1 else ["run"]
    results: dict[str, Any] = {"header": common.header(MODULE, argv), "rounds": {name: [] for name in setups}}
    names = ("engines", "requests", "prompt_tokens", "max_tokens", "hooks", "owner", "options", "engine_args")
    results["settings"] = {name: getattr(args, name) for name in names}
    with ExitStack() as stack:
        children = {}
        with common.turn(alone=False):
            for name in setups:
                children[name] = common.Child(common.child_command(MODULE, argv, name), common.child_env())
                stack.callback(children[name].close)
                note(f"{name}: {children[name].answer()}")
        stack.enter_context(common.turn(alone=True))
        for number in range(args.rounds + 1):
            path = Path(args.store_dir) / f"round{number}.jsonl"
            write_prompts(path, args, number)
            for name in setups if number % 2 else setups[::-1]:
                answer = children[name].answer({"round": str(path)})
                note(f"round {number} {name}: {answer}")
                if "failed" in answer:
                    results["failed"] = f"{name}: {answer['failed']}"
                    common.save(args.out, results)
                    return results
                if number:
                    speed = round(answer["tokens"] / answer["seconds"], 1)
                    results["rounds"][name].append({**answer, "tok_per_s": speed})
            path.unlink()
            if number and len(setups) > 1:
                results["ratios"] = [
                    round(ours["tok_per_s"] / theirs["tok_per_s"], 4)
                    for ours, theirs in zip(results["rounds"]["run"], results["rounds"]["generate"], strict=True)
                ]
                results["ratio"] = round(statistics.median(results["ratios"]), 4)
            common.save(args.out, results)
    return results


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-bulk")
    p.add_argument("--model", help="model directory; default: a tiny Qwen3")
    p.add_argument("--hooks", default="hidden-states")
    p.add_argument("--owner", default="draft")
    p.add_argument("--options", type=json.loads, default={}, help="JSON: more server options")
    p.add_argument("--engines", type=int, default=1, help="engines of `dmi run` (default: %(default)s)")
    p.add_argument("--requests", type=int, default=400, help="prompts per round (default: %(default)s)")
    p.add_argument("--prompt-tokens", type=int, default=64, help="mean tokens per prompt (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=32, help="generated tokens per prompt (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=9, help="rounds after the first one (default: %(default)s)")
    p.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    return p


@contextmanager
def own_directory(path: Path) -> Iterator[None]:
    """Create an empty directory for the `with` block, and remove it at the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(path)


def main(argv: list[str] | None = None) -> int:
    """Measure. Returns 0 if the ratio of speeds is at least TARGET, or if only `dmi run` was measured."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    args.model = args.model or str(Path(args.store_dir) / "tiny-qwen3")
    if args.child:
        serve_engine(args.fd, lambda: SETUPS[args.child](args), lambda setup, asked: setup.round(Path(asked["round"])))
        return 0
    with own_directory(Path(args.store_dir)):
        if not os.path.exists(args.model):
            from dmi_connector.cli.tiny_models import make_model

            make_model("qwen3", Path(args.model))
        results = run(args, argv)
    if "failed" in results:
        return 1
    print(bulk_table(summarise(results)))
    return 0 if results.get("ratio", TARGET) >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
