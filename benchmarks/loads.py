# SPDX-License-Identifier: Apache-2.0
"""Continuous load: a client that keeps a fixed number of requests in flight, and a consumer of their stores.

python -m benchmarks.loads STORE_DIR KEEP_DIR       # the consumer
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import common
from benchmarks.fitted import asked


class Load(NamedTuple):
    """A continuous load. in_flight: number of requests in flight.

    prompt_tokens, output_tokens: tokens per request. shared: number of tokens at the start that all prompts share, so
    that they are in the prefix cache. captured: whether these requests are captured in an engine that captures. spread:
    requests generate between output_tokens - spread and output_tokens + spread tokens, at random.
    """

    in_flight: int
    prompt_tokens: int
    output_tokens: int
    shared: int = 0
    captured: bool = True
    spread: int = 0

    def shrunk(self, by: int) -> Load:
        """This load with numbers divided by `by`, for small machines."""
        requests, prompt = max(1, self.in_flight // by), max(1, self.prompt_tokens // by)
        output = max(2, self.output_tokens // by)
        return Load(requests, prompt, output, self.shared // by, self.captured, self.spread // by)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a request."""
        return self.prompt_tokens + self.output_tokens + self.spread

    @property
    def rows(self) -> int:
        """Maximum number of rows of a request's store. The last generated token has no row."""
        return self.most_tokens - 1


LOADS = {
    "short1": Load(1, 128, 384),
    "short16": Load(16, 128, 384),
    "short32": Load(32, 128, 384),
    "short64": Load(64, 128, 384),
    "short128": Load(128, 128, 384),
    "short256": Load(256, 128, 384),
    "mixed64": Load(64, 128, 384, spread=128),
    "mixed256": Load(256, 128, 384, spread=128),
    "decode64": Load(64, 128, 1500, spread=500),
    "long16": Load(16, 4000, 200),
    "long32": Load(32, 15_996, 4),  # few generated tokens: a store of vllm-full in int8 already takes 20 GB
    "long128": Load(128, 5000, 400),
    "cached64": Load(64, 1600, 200, shared=1280),
    "reasoning128": Load(128, 500, 6000),
    "prompts16": Load(16, 2000, 2),
    "uncaptured64": Load(64, 128, 384, captured=False),
    "uncaptured-prompts16": Load(16, 2000, 2, captured=False),
}
EVERY = 16
"""The consumer keeps one of this many stores."""
_LOOK_S = 0.05
"""Seconds between two looks of the consumer at the directory."""


def prompts(load: Load, vocab: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts of random tokens without end. vocab: size of the vocabulary."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        drawn: list[int] = common.random_tokens(rng, vocab, count)
        return drawn

    shared = draw(load.shared)
    while True:
        yield shared + draw(load.prompt_tokens - load.shared)


def lengths(load: Load, seed: int) -> Iterator[int]:
    """Yield the number of tokens that each request generates, without end.

    The first `in_flight` numbers differ, so that requests end one by one instead of all at once. Without `spread`, all
    later requests have the same number and continue to end one by one in an engine with regular steps. Other engines
    then have more steps with several new prompts. With `spread`, requests end at random in all engines.
    """
    rng = np.random.default_rng(seed)
    first = np.linspace(2, load.output_tokens, load.in_flight).astype(int)
    yield from rng.permutation(first).tolist()
    while True:
        yield int(rng.integers(load.output_tokens - load.spread, load.output_tokens + load.spread + 1))


class Client:
    """Keeps `load.in_flight` requests in an engine, and records when their tokens come.

    captures: whether the engine captures. probes: one of `benchmarks.fitted.PROBES` whose scores requests ask for, or
    "". clock: returns seconds. tokens, requests: numbers of generated tokens and of finished requests in the latest
    `run`. first_s, between_s: seconds from the start of a request to its first token, and between its tokens.
    """

    def __init__(
        self,
        engine: Any,
        load: Load,
        vocab: int,
        captures: bool,
        seed: int,
        probes: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.engine, self.load, self._captures, self._probes, self._clock = engine, load, captures, probes, clock
        self._prompts, self._lengths = prompts(load, vocab, seed), lengths(load, seed)
        self._make = lambda count, extra: SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        self._seed, self._sent = seed, 0
        self._began: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.tokens = self.requests = 0
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        for _ in range(load.in_flight):
            self._send()

    def _send(self) -> None:
        name = f"{self._seed}-{self._sent}"
        dmi = {"key": name, **asked(self._probes, self._sent)} if self.load.captured else {"enabled": False}
        params = {"include_output_tokens": True, "dmi": dmi}
        extra = {"kv_transfer_params": params} if self._captures else {}
        self._sent += 1
        self._began[name] = self._clock()
        self.engine.add_request(name, {"prompt_token_ids": next(self._prompts)}, self._make(next(self._lengths), extra))

    def run(self, seconds: float, each_second: Callable[[], None]) -> float:
        """Run steps of the engine for `seconds`, with counts reset to 0. Returns the actual duration in seconds.

        each_second: called once per second.
        """
        self.tokens = self.requests = 0
        self.first_s, self.between_s = [], []
        begin = self._clock()
        due = begin
        while (now := self._clock()) < begin + seconds:
            if now >= due:
                each_second()
                due += 1
            self._step(refill=True)
        return self._clock() - begin

    def finish(self) -> None:
        """Run steps until all requests in flight have ended."""
        while self.engine.has_unfinished_requests():
            self._step(refill=False)

    def _step(self, refill: bool) -> None:
        outputs, now = self.engine.step(), self._clock()
        for output in outputs:
            name, count = output.request_id, len(output.outputs[0].token_ids)
            if count:
                self.tokens += count
                if name in self._last:
                    self.between_s.append(now - self._last[name])
                else:
                    self.first_s.append(now - self._began[name])
                self._last[name] = now
            if output.finished:
                self.requests += 1
                del self._last[name], self._began[name]
                if refill:
                    self._send()


def latency_ms(seconds: list[float]) -> dict[str, float]:
    """{"p50": median, "p99": 99th percentile} in milliseconds; {} without samples."""
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50": round(float(p50) * 1e3, 2), "p99": round(float(p99) * 1e3, 2)}


def growth(samples: list[tuple[float, float]]) -> float:
    """Slope of samples (seconds, bytes) by least squares, in bytes per second."""
    if len(samples) < 2:
        return 0.0
    at, value = np.array(samples).T
    return float(np.polyfit(at, value, 1)[0])


def consume(stores: Path, keep: Path) -> None:
    """Remove finished stores, but move every 16th to `keep`, until the standard input ends.

    Then print the numbers of finished stores and of kept stores as JSON. `vanished` is the number of stores that
    another process removed first.
    """
    keep.mkdir(parents=True, exist_ok=True)
    seen = vanished = 0
    while True:
        over = bool(select.select([sys.stdin], [], [], _LOOK_S)[0])
        for entry in sorted(os.scandir(stores), key=lambda entry: entry.name):
            if entry.name.endswith(".zarr"):
                seen += 1
                try:
                    if seen % EVERY:
                        shutil.rmtree(entry.path)
                    else:
                        os.rename(entry.path, keep / entry.name)
                except FileNotFoundError:
                    vanished += 1
        if over:
            break
    print(json.dumps({"stores": seen, "kept": seen // EVERY, "vanished": vanished}))


if __name__ == "__main__":
    consume(Path(sys.argv[1]), Path(sys.argv[2]))
