# SPDX-License-Identifier: Apache-2.0
"""What a thread that computes and waits in turn, as an engine's does, loses to processes that write files on all cores.

    python -m benchmarks.niceness --out results.json [--directory /dev/shm] [--seconds 4] [--repeat 3]

Needs neither a GPU nor vLLM. A step is 2.4 ms of Python in three parts, with a short wait after each.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import common
from dmi_connector.store.write.pace import Pace, Shares

_SHARES = {"a quarter of the time": 0.25, "a tenth of the time": 0.1}
WAYS = ("none", "nice 5", "nice 19", "idle class", "nice 5, a core free") + tuple(
    f"{priority}, {share}" for priority in ("nice 19", "idle class") for share in _SHARES
)


def write(path: str, way: str, megabytes: int, stop: Any, written: Any) -> None:
    """Child process: write files until told to stop."""
    priority, _, rest = way.partition(", ")
    if priority == "idle class":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(int(priority.removeprefix("nice ")))
    data = os.urandom(1 << 20) * megabytes
    pace = Pace()
    pace.shares = Shares(_SHARES.get(rest, 1.0), 1.0)
    while not stop.is_set():
        began = time.process_time()
        with open(path, "wb", 0) as file:
            for _ in range(4):
                written.value += file.write(data)
        pace.rest(time.process_time() - began, generated=True, since=time.monotonic())
    os.unlink(path)


def steps(seconds: float) -> list[float]:
    """Seconds of each step."""
    found, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        for _ in range(3):
            computed = time.process_time() + 0.0008
            while time.process_time() < computed:
                pass
            time.sleep(0.0003)
        found.append(time.perf_counter() - begin)
    return found


def measure(directory: Path, way: str, seconds: float, megabytes: int) -> dict[str, float]:
    """Steps a second, the longest of a hundred steps, GB/s of the writers meanwhile, and all the GB they wrote."""
    context = get_context("spawn")
    stop, written = context.Event(), []
    cores = len(os.sched_getaffinity(0))
    writers = []
    for number in range(0 if way == "none" else cores - way.endswith("free")):
        written.append(context.Value("q", 0, lock=False))
        args = (str(directory / f"niceness-{os.getpid()}-{number}"), way, megabytes, stop, written[-1])
        writers.append(context.Process(target=write, args=args))
        writers[-1].start()
    while any(count.value == 0 for count in written):
        if any(writer.exitcode is not None for writer in writers):
            raise RuntimeError(f"a writer ({way}) ended before it had written anything")
        time.sleep(0.05)
    before, begin = sum(count.value for count in written), time.perf_counter()
    found = sorted(steps(seconds))
    rate = (sum(count.value for count in written) - before) / (time.perf_counter() - begin) / 1e9
    stop.set()
    for writer in writers:
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"a writer ({way}) ended with exit code {writer.exitcode}")
    longest, total = found[int(len(found) * 0.99)] * 1e3, sum(count.value for count in written) / 1e9
    return {"steps_per_s": len(found) / sum(found), "p99_ms": longest, "writers_GBps": rate, "written_GB": total}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.niceness", __doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    p.add_argument("--seconds", type=float, default=4.0)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--megabytes", type=int, default=23, help="of a write: a chunk of one hook of 36 layers has 23")
    p.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    args = p.parse_args(argv)
    header = common.header("benchmarks.niceness", argv)
    ways = [(way, args.seconds, args.megabytes) for way in args.ways]
    runs = [{way[0]: measure(args.directory, *way) for way in ways} for _ in range(args.repeat)]
    results: dict[str, Any] = {"header": header, "ways": {}}
    for way in args.ways:
        medians = {key: statistics.median(run[way][key] for run in runs) for key in runs[0][way]}
        results["ways"][way] = {key: common.three_digits(value) for key, value in medians.items()}
        print(f"{way:32s} {results['ways'][way]}")
    common.save(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
