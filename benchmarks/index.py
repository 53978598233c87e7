# SPDX-License-Identifier: Apache-2.0
"""Time and memory to read the index of a store directory, by the number of captures in the index.

    python -m benchmarks.index --entries 100000,1000000 --out benchmarks/results/cpu-index.json

The program writes an index of finished captures, without their stores. It then finds one capture by its key, finds one
by its request id, lists all captures, and appends a line. Each measurement runs in a process of its own, so that its
memory can be measured.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common

MODULE = "benchmarks.index"
WHAT = ("key", "request id", "all", "append")
MOST_LISTED = 2_000_000
"""Maximum number of captures that are listed. Listing takes 2.5 GB of memory per million captures."""


def write(directory: Path, entries: int) -> int:
    """Write an index of `entries` captures. Returns its size in bytes."""
    from dmi_connector.store.format.paths import store_name
    from dmi_connector.store.format.schema import INDEX_NAME

    directory.mkdir(parents=True)
    with open(directory / INDEX_NAME, "w") as index:
        for i in range(entries):
            key, request, when = f"k{i}", f"cmpl-{i:032x}-0", f"2026-01-01T00:00:00.{i % 10**6:06d}Z"
            line = {"store": store_name(key, request), "key": key, "request_id": request, "created": when}
            end = {"state": "complete", "reason": None, "finished": when, "num_tokens": 511, "prompt_len": 128}
            end |= {"model": "model", "bytes": 60_000_000, "bytes_raw": 97_000_000}
            index.write(json.dumps({"event": "start", "state": "started", **line}) + "\n")
            index.write(json.dumps({"event": "finish", **line, **end}) + "\n")
    return (directory / INDEX_NAME).stat().st_size


def measure(directory: Path, entries: int, what: str) -> dict[str, Any]:
    """Make measurement `what` of WHAT. Returns seconds, number of captures found, and memory in MiB."""
    from dmi_connector import find_captures
    from dmi_connector.store.write.finish.commit import append_index

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if what == "append":
        append_index(str(directory), {"event": "start", "store": "one.zarr", "state": "started", "created": "2026"})
        found = 0
    else:
        middle = f"cmpl-{entries // 2:032x}"
        key = f"k{entries // 2}" if what == "key" else None
        found = len(find_captures(directory, key, middle if what == "request id" else None))
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": round(seconds, 4), "found": found, "memory_MiB": memory // 1024}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser(MODULE, __doc__)
    p.add_argument("--out", default="benchmarks/results/last.json")
    p.add_argument("--directory", default="/dev/shm/dmi-index")
    p.add_argument("--entries", default="1000,100000,1000000", help="comma-separated (default: %(default)s)")
    p.add_argument("--what", choices=WHAT, help="make one measurement of an existing index, and print its result")
    args = p.parse_args(argv)
    numbers = [int(number) for number in args.entries.split(",")]
    if args.what:
        print(json.dumps(measure(Path(args.directory), numbers[0], args.what)))
        return 0
    results: dict[str, Any] = {"header": common.header(MODULE, argv), "entries": {}}
    for entries in numbers:
        directory = Path(args.directory) / str(entries)
        shutil.rmtree(directory, ignore_errors=True)
        try:
            found: dict[str, Any] = {"index_bytes": write(directory, entries)}
            for what in WHAT if entries <= MOST_LISTED else ("key", "request id", "append"):
                command = [sys.executable, "-m", MODULE, "--directory", str(directory), "--entries", str(entries)]
                done = subprocess.run([*command, "--what", what], check=True, capture_output=True, text=True)
                found[what] = json.loads(done.stdout)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        results["entries"][str(entries)] = found
        print(entries, json.dumps(found), flush=True)
        common.save(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
