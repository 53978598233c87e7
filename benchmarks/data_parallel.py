# SPDX-License-Identifier: Apache-2.0
"""Throughput under continuous load of servers with one engine and with several data-parallel engines.

    python -m benchmarks.data_parallel --model DIR --out results.json --engines 2,4

Servers with and without capture are measured: with one engine on the first GPU, and with each number of data-parallel
engines in `--engines`. All servers are up at once, and are measured in turn. The engines of a server share its store
directory. Clients keep the same number of requests in flight for each engine. A consumer process removes finished
stores, except every 16th, which is verified after the measurement. The tokens of each engine are read from the server's
metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.bulk import flags
from benchmarks.capture import note
from benchmarks.engine import DRAIN_S
from benchmarks.loads import LOADS, Load, lengths, prompts
from benchmarks.report import servers_table
from benchmarks.setups import HIDDEN
from benchmarks.summary import summarise
from benchmarks.sustained import check_kept

MODULE = "benchmarks.data_parallel"
START_S = 900
"""Maximum start-up time of a server in seconds."""
_TOKENS = "vllm:generation_tokens_total"
_PAUSE_S = 0.2
_ENDING_S = 60


class Kind(NamedTuple):
    """A kind of server. hooks: the captured hooks; "" for stock vLLM. engines: number of data-parallel engines."""

    hooks: str
    engines: int

    @property
    def name(self) -> str:
        return f"{'capture' if self.hooks else 'stock'}, {self.engines} engine{'s' if self.engines > 1 else ''}"


# ---- clients -----------------------------------------------------------------------------------------------------


async def _ask(session: Any, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {answer}")


async def _client(url: str, load: Load, vocab: int, seed: int) -> int:
    """Keep `load.in_flight` requests in flight until the standard input ends. Returns the number of answers."""
    import aiohttp

    drawn, counts, over = prompts(load, vocab, seed), lengths(load, seed), asyncio.Event()
    answered = 0

    async def one(session: Any) -> None:
        nonlocal answered
        while not over.is_set():
            tokens = next(counts)
            body = {"model": "model", "prompt": next(drawn), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            await _ask(session, f"{url}/v1/completions", body)
            answered += 1

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(one(session) for _ in range(load.in_flight)))
    return answered


def client(url: str, load: Load, vocab: int, seed: int) -> None:
    """Run a client in a process of its own, and print the number of answered requests as JSON."""
    print(json.dumps({"answered": asyncio.run(_client(url, load, vocab, seed))}))


# ---- servers -----------------------------------------------------------------------------------------------------


class Server:
    """A server process in a session of its own. Its log is beside its store directory."""

    def __init__(self, args: argparse.Namespace, kind: Kind, port: int) -> None:
        self.kind, self.url = kind, f"http://127.0.0.1:{port}"
        self.directory = Path(args.store_dir) / kind.name.replace(", ", "-").replace(" ", "-")
        self.directory.mkdir(parents=True)
        self.log = self.directory.with_suffix(".log")
        ours = ["-m", "dmi_connector.cli", "serve", args.model]
        command = [sys.executable, *(ours if kind.hooks else ["-m", "vllm.entrypoints.openai.api_server"])]
        engine_args = {**args.engine_args}
        if kind.hooks:
            command += ["--hooks", kind.hooks, "--store-dir", str(self.directory), "--owner", args.owner]
            command += flags(args.options)
        else:
            command += ["--model", args.model]
        gigabytes = args.kv_gigabytes.get("capture" if kind.hooks else "stock")
        if gigabytes:
            engine_args["kv_cache_memory_bytes"] = int(gigabytes * 1e9)
        command += [*flags(engine_args), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
        env = common.child_env()
        if kind.engines > 1:
            command += ["--data-parallel-size", str(kind.engines)]
        else:
            env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=common.ROOT, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until the server is healthy. Raises RuntimeError if it ends, or after START_S seconds."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.kind.name}: the server ended:\n{self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(_PAUSE_S)
        raise RuntimeError(f"{self.kind.name}: no answer after {START_S} s:\n{self.log.read_text()[-3000:]}")

    def generated(self) -> dict[str, float]:
        """{engine: number of tokens that it has generated}."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _TOKENS:
                    engine = sample.labels["engine"]
                    found[engine] = found.get(engine, 0.0) + sample.value
        return found

    def close(self) -> None:
        """Stop the server, and kill processes of its session that are left."""
        self._process.terminate()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            note(f"{self.kind.name}: the server did not end in {_ENDING_S} s")
        with suppress(ProcessLookupError):  # all processes have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def measure(self, args: argparse.Namespace, load: Load, vocab: int, seed: int) -> dict[str, Any]:
        """Measure the server under continuous load: for `--seconds`, after `--warm` seconds that do not count."""
        kept = self.directory.with_name(f"{self.directory.name}-kept")
        consumer = _piped("benchmarks.loads", str(self.directory), str(kept)) if self.kind.hooks else None
        asked = json.dumps(load._asdict())
        clients = [
            _piped(MODULE, "--client", self.url, "--load", asked, "--vocab", str(vocab), "--seed", str(seed + i))
            for i in range(self.kind.engines)
        ]
        time.sleep(args.warm)
        first, begin = self.generated(), time.perf_counter()
        time.sleep(args.seconds)
        last, seconds = self.generated(), time.perf_counter() - begin
        answered = sum(_answer(one)["answered"] for one in clients)
        by_engine = {engine: round((last[engine] - first.get(engine, 0.0)) / seconds, 1) for engine in sorted(last)}
        result: dict[str, Any] = {"seconds": round(seconds, 1), "tok_per_s": round(sum(by_engine.values()), 1)}
        result |= {"by_engine": by_engine, "answered": answered}
        if consumer is not None:
            deadline = time.monotonic() + DRAIN_S
            while any(entry.name.endswith((".partial", ".zarr")) for entry in os.scandir(self.directory)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.kind.name}: stores were not finished in {DRAIN_S} s")
                time.sleep(_PAUSE_S)
            result |= _answer(consumer)
            problems = [p for path in sorted(kept.glob("*.zarr")) for p in check_kept(str(path), load.rows)]
            result |= {"verified": not problems, **({"problems": problems[:5]} if problems else {})}
            shutil.rmtree(kept)
        return result


def _piped(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a module as a process. It works until its standard input is closed, and then prints JSON."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Close the standard input of a process, and parse the JSON that it prints. Raises RuntimeError if it failed."""
    text, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r}: exit status {process.returncode}")
    answer: dict[str, Any] = json.loads(text)
    return answer


# ---- the parent --------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Parse comma-separated numbers of engines. Raises ArgumentTypeError for a number below 2."""
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give numbers above 1, as in 2,4")
    return found


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-data-parallel")
    p.add_argument("--model", help="model directory (weights are random); default: a tiny Qwen3")
    p.add_argument(
        "--engines", type=numbers, default="2", help="data-parallel engines of the larger servers, as in 2,4"
    )
    p.add_argument("--hooks", default=HIDDEN)
    p.add_argument("--owner", default="target", choices=("draft", "target", "pool"))
    p.add_argument("--options", type=json.loads, default={}, help="JSON: more server options of servers that capture")
    p.add_argument("--load", default="short64", help=f"load of each engine: {', '.join(LOADS)}")
    p.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (default: %(default)s)")
    p.add_argument("--warm", type=float, default=6.0, help="seconds of load before a measurement (%(default)s)")
    p.add_argument("--repeat", type=int, default=2, help="rounds (default: %(default)s)")
    p.add_argument("--shrink", type=int, default=1, help="divide requests and tokens of the load, for small machines")
    p.add_argument("--port", type=int, default=18200, help="port of the first server (default: %(default)s)")
    p.add_argument("--kv-gigabytes", type=json.loads, default={}, help='JSON: GB of KV cache of "stock" and "capture"')
    p.add_argument("--client", default="", help=argparse.SUPPRESS)
    p.add_argument("--vocab", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return p


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Start all servers, and measure each once per round."""
    load = LOADS[args.load].shrunk(args.shrink)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    kinds = [Kind(hooks, engines) for engines in (1, *args.engines) for hooks in ("", args.hooks)]
    results: dict[str, Any] = {"header": common.header(MODULE, argv), "load": load._asdict(), "servers": {}}
    with ExitStack() as stack:
        with common.turn(alone=False):
            servers = [Server(args, kind, args.port + i) for i, kind in enumerate(kinds)]
            for server in servers:
                stack.callback(server.close)
            for server in servers:
                server.wait()
        note("all servers are up")
        with common.turn(alone=True):
            for number in range(args.repeat):
                for server in servers:
                    found = server.measure(args, load, vocab, seed=100 * number)
                    note(f"{server.kind.name:20s} {json.dumps(found)}")
                    results["servers"].setdefault(server.kind.name, []).append(found)
                    common.save(args.out, results)
    return results


def sound(results: dict[str, Any]) -> bool:
    """Whether each answered request has a store, no store vanished, and each kept store was verified."""
    runs = [one for found in results["servers"].values() for one in found if "stores" in one]
    whole = [one["verified"] and not one["vanished"] and one["stores"] == one["answered"] for one in runs]
    return bool(whole) and all(whole)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.client:
        client(args.client, Load(**json.loads(args.load)), args.vocab, args.seed)
        return 0
    if args.load not in LOADS:
        parser().error(f"--load: {args.load!r} is unknown; choose from {', '.join(LOADS)}")
    shutil.rmtree(args.store_dir, ignore_errors=True)
    if args.model is None:
        args.model = common.tiny_model(args.store_dir)
    common.end_with_children()
    results = run(args, argv)
    common.save(args.out, results)
    print(servers_table(summarise(results)))
    return 0 if sound(results) else 1


if __name__ == "__main__":
    sys.exit(main())
