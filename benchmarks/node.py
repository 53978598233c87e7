# SPDX-License-Identifier: Apache-2.0
"""Costs of capture on a node with 1 to 8 ranks, and a prediction of the limits of a node with eight GPUs.

    python -m benchmarks.node --out benchmarks/results/cpu-node.json            # measure
    python -m benchmarks.node --out benchmarks/results/cpu-node.json --table    # predict (docs/SCALE.md)

Each rank is a process with a ring, a coordinator and writers, without a model, an engine or a GPU. Its payloads (the
bytes of its chunks) are those of a real rank, with fewer layers. The machine may have fewer cores than ranks, so CPU
seconds are measured instead of speeds. Waiting times for locks do not include waiting times for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks import common, stores
from benchmarks.scale import MODELS, STORE_ROWS, Machine, Numbers, node_table, split_layout
from dmi_connector.codecs import CODECS
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import ArraySpec, PayloadLayout, hook_reductions, row_layouts
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.locks import PartialLock
from dmi_connector.store.format.paths import no_follow
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.finish import retention
from dmi_connector.store.write.finish.commit import append_index, finish_line, now
from dmi_connector.store.write.settings import WriteSettings

SELECTIONS = {
    "`hidden-states`": ServerOptions("", ("hidden-states",)),
    "four layers": ServerOptions("", ("mlp_post@-4--1", "resid_post@-4--1")),
    "`int8` of all": ServerOptions("", ("vllm-full", "-logits"), "lz4", reduce=(("*", "int8"),)),
}
LAYOUTS, SHOWN = ("DP 1", "DP 2", "DP 4", "DP 8", "TP 4", "TP 8"), ("DP 8", "TP 8")
"""Layouts that are measured, and layouts that the table shows. "DP n": n data-parallel engines. "TP n": one engine with
n tensor-parallel ranks. All are compared with the first.
"""
SHORT_ROWS = 4
"""Number of rows of a short store. It has as many chunks as a store of STORE_ROWS, but each chunk is one row of one
layer. So a short store shows the fixed cost per store.
"""
THOROUGH, QUICK = (STORE_ROWS, 96, 0.5, 5, CODECS, 20), (130, 4, 0.0, 1, ("zstd",), 1)
"""(rows per store, number of short stores, GB written at a time, rounds, codecs, effort). At least one store is written
per rank. effort: factor of the numbers of repetitions in `measure_shared`.
"""
RING_BYTES, RANK_WRITERS = 160 << 20, 4
"""Bytes of the ring and number of writers of a simulated rank. The ring holds two of the largest chunks."""
FILES, COPIED_BYTES = 8, 64_000_000
"""Number of files per directory in the measurement of files, and bytes per copy in the measurement of copies."""
Ranks = list[ProcessPoolExecutor]


def payloads(dims: ModelDims, options: ServerOptions, layout: str) -> list[PayloadLayout]:
    """The payload layout of each rank of an engine, computed as the engine does."""
    from dmi_connector.engine.context import CaptureContext
    from dmi_connector.engine.owners import OWNERS
    from dmi_connector.engine.transfer.chunk_layout import chunk_layout

    tensor, n = split_layout(layout)
    selection, tp = parse_selection(options.hooks, dims), n if tensor else 1
    rows = row_layouts(selection, dims, "bfloat16", tp, hook_reductions(options.reduce, selection, dims, tp))
    context = CaptureContext(options, cast(Any, None), dims, selection, rows, "bfloat16", tp, OWNERS["target"])
    return [chunk_layout(context, selection.hooks, rank).payload for rank in range(tp)]


def row_of(dims: ModelDims, options: ServerOptions, layout: str) -> Numbers:
    """Facts about a row: bytes over all ranks of an engine, the largest share of the node's bytes on a rank, codec."""
    sizes = [one.header_base for one in payloads(dims, options, layout)]
    share = max(sizes) / sum(sizes) / (1 if len(sizes) > 1 else split_layout(layout)[1])
    return {"bytes": sum(sizes), "largest_share": common.three_digits(share), "codec": options.codec}


def short(layout: PayloadLayout) -> PayloadLayout:
    """The layout of a short store, see SHORT_ROWS."""

    def first(spec: ArraySpec) -> ArraySpec:
        """The array with one layer per file."""
        parts = spec.shards if spec.part_layers else 1
        return replace(spec, layers=spec.layers[:parts], part_layers=min(1, spec.part_layers))

    arrays, elsewhere = (tuple(map(first, specs)) for specs in (layout.arrays, layout.elsewhere))
    return PayloadLayout(arrays, 1, SHORT_ROWS, layout.codec, elsewhere)


# ---- the process of a rank ---------------------------------------------------------------------------------------

client: StoreClient


def start() -> None:
    """Make the client of a simulated rank, with its ring, coordinator and writers."""
    global client
    client = StoreClient(RING_BYTES, RANK_WRITERS, WriteSettings(always_compress=True))


def fill(reduced: bool) -> None:
    """Fill the ring with normally distributed values, in bf16 or (`reduced`) as `int8` encodes them, with 127 for 4
    standard deviations.
    """
    values = common.activations(16 << 20)
    if reduced:
        values = (np.random.default_rng(0).standard_normal(16 << 20) * 127 / 4).clip(-127, 127).astype(np.int8)
    client.ring.memory[:] = np.resize(values.view(np.uint8), len(client.ring.memory))


def feed(layout: PayloadLayout, paths: Sequence[str], rows: int, rank: int, ranks: int) -> Numbers:
    """Write stores as one rank. Returns CPU seconds of the rank's processes, and the counts of its client."""

    def so_far() -> Numbers:
        found: Numbers = {**client.counts(), "kernel_s": stores.cpu_seconds("dmi-writer", client.group)[1]}
        for name in ("writer", "coordinator"):
            pids = [pid for pid, *_ in stores.processes(f"dmi-{name}", client.group)]
            # The id of another process's CPU clock (see clock_getcpuclockid). The ticks in /proc, of 10 ms each, are
            # too coarse for one store.
            found[f"{name}_s"] = sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
        return found | {"rank_s": time.process_time()}

    number, before = client.register(layout), so_far()
    stores.feed(client, layout, number, paths, rows, rank, ranks)
    spent = time.process_time()  # before `so_far`, which takes time too
    return {name: value - before[name] for name, value in {**so_far(), "rank_s": spent}.items()}


def repeat(what: str, directory: str, rank: int, count: int) -> Numbers:
    """Do one operation `count` times. Returns {"cpu_s": CPU seconds, "lock_s": seconds of waiting, but not for a core}.

    what: "append" (a line of the index), "create" (a directory of FILES files), "quota" (the size of all stores), or
    "copy" (COPIED_BYTES bytes).
    """
    source, target = np.ones((2, COPIED_BYTES if what == "copy" else 1), np.uint8)
    attrs: Numbers = {"complete": True, "reason": None, "created": now(), "finished": now(), "files": {}}

    def create(i: int) -> None:
        partial = f"{directory}/{rank}-{i}.zarr.partial"
        lock = PartialLock(partial)
        for file in range(FILES):
            os.close(no_follow(f"{partial}/{file}", os.O_RDWR | os.O_CREAT))
        os.rename(partial, partial.removesuffix(".partial"))
        lock.release()

    act: Callable[[int], Any] = {
        "append": lambda i: append_index(directory, finish_line(f"{rank}-{i}.zarr", attrs | {"key": f"{rank}-{i}"})),
        "create": create,
        "quota": lambda _: retention.measure(directory),
        "copy": lambda _: np.copyto(target, source),
    }[what]
    before = _clocks()
    for i in range(count):
        act(i)
    total, ran, queued = _clocks() - before
    return {"cpu_s": ran, "lock_s": max(0.0, total - ran - queued)}


def _clocks() -> np.ndarray:
    """Seconds of this thread so far: [elapsed, on a core, waiting for a core]."""
    queued = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return np.array([time.perf_counter(), time.thread_time(), int(queued) / 1e9])


# ---- measurements ------------------------------------------------------------------------------------------------


def new_rank() -> ProcessPoolExecutor:
    """Start the process of a simulated rank."""
    return ProcessPoolExecutor(1, get_context("spawn"), start)


def together(ranks: Ranks, act: Callable[..., Any], given: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call `act` on the first ranks at the same time, with one entry of `given` each. Returns the results."""
    futures = [rank.submit(act, *arguments) for rank, arguments in zip(ranks, given, strict=False)]
    return [future.result() for future in futures]


def write(ranks: Ranks, directory: Path, layout: str, sent: list[PayloadLayout], rows: int, count: int) -> Numbers:
    """Write `count` stores of `rows` rows. Returns the mean costs of a store, summed over the ranks.

    sent: payload layouts of the ranks of an engine. Raises RuntimeError if a store is not complete.
    """
    tensor, n = split_layout(layout)
    paths = [f"{directory}/{i}.zarr" for i in range(count)]
    parts = [(sent[i], paths, rows, i, n) if tensor else (sent[0], paths[i::n], rows, 0, 1) for i in range(n)]
    directory.mkdir()
    answers = together(ranks, feed, parts)
    found = {name: sum(answer[name] for answer in answers) / count for name in answers[0]}
    if found["complete"] != (n if tensor else 1):
        raise RuntimeError(f"{layout}: stores are not complete: {found}")
    return found | {"GB": found["bytes_raw"] / 1e9}


def problems(directory: Path, count: int) -> list[str]:
    """The problems with `count` stores and their index. Each key must begin once and end once in the index."""
    lines = Counter((line["event"], line["key"], line["state"]) for line in read_index(directory))
    ends = ("start", "started"), ("finish", "complete")
    lines.subtract((event, str(i), state) for i in range(count) for event, state in ends)
    found = [f"index: {line} {times:+d}" for line, times in lines.items() if times]
    return found + [text for i in range(count) for text in common.store_problems(directory / f"{i}.zarr")]


def measure_case(
    ranks: Ranks, dims: ModelDims, options: ServerOptions, directory: Path, args: argparse.Namespace, check: bool
) -> Numbers:
    """Measure one round of a model and selection. Returns, for each layout, CPU seconds per store and per GB and codec.

    Only a sixteenth of the layers is captured, so that eight payloads fit on a small machine. The costs of a codec
    depend on the width of rows. check: whether to verify all stores.
    """
    few = replace(dims, layers=max(4, dims.layers // 16))

    def took(layout: str, sent: list[PayloadLayout], rows: int, count: int) -> Numbers:
        spent = write(ranks, directory, layout, sent, rows, count)
        if check and (wrong := problems(directory, count)):
            raise RuntimeError(f"{layout}: {len(wrong)} problems, the first: {wrong[0]}")
        shutil.rmtree(directory)
        return spent

    found: Numbers = {"store": {}, **{codec: {} for codec in args.codecs}}
    for layout in args.layouts:
        sent, (tensor, n) = payloads(few, options, layout), split_layout(layout)
        least = took(layout, [short(one) for one in sent], SHORT_ROWS, max(n, args.stores))
        found["store"][layout] = {"cpu_s": least["writer_s"] + least["coordinator_s"] + least["rank_s"]}
        count = n * (1 + int(args.gigabytes * 1e9 / args.rows / n / sum(one.header_base for one in sent)))
        for codec in args.codecs:
            spent = took(layout, [replace(one, codec=codec) for one in sent], args.rows, count)
            more = {name: spent[name] - least[name] for name in ("writer_s", "kernel_s", "GB")}
            found[codec][layout] = {name: more[name] / more["GB"] for name in ("writer_s", "kernel_s")}
            found[codec][layout] |= {
                "elsewhere_s": (spent["coordinator_s"] + spent["rank_s"]) / spent["GB"],
                "coordinator_s_a_store": spent["coordinator_s"] / (n if tensor else 1),
                "compression": spent["bytes_raw"] / spent["bytes_stored"],
            }
    for costs in found.values():
        for cost in costs.values():
            what = next(iter(cost))
            cost["ratio"] = cost[what] / costs[args.layouts[0]][what]
    return found


def measure_shared(ranks: Ranks, directory: Path, numbers: Sequence[int], effort: int) -> Numbers:
    """Measure one round of operations on what ranks share, for each number of ranks in `numbers`.

    Returns seconds as `repeat` does: per line of the index, per file, per store for the quota, and per GB copied.
    """
    counts = {"append": 100 * effort, "create": 5 * effort, "quota": 1, "copy": (effort + 1) // 2}
    found: Numbers = {what: {} for what in counts}
    for n in numbers:
        directory.mkdir()
        units = {
            "create": counts["create"] * FILES,
            "quota": counts["create"] * n,
            "copy": counts["copy"] * COPIED_BYTES,
        }
        for what, count in counts.items():
            unit = units.get(what, count) / (1e9 if what == "copy" else 1)
            took = together(ranks, repeat, [(what, str(directory), rank, count) for rank in range(n)])
            found[what][str(n)] = {name: sum(one[name] for one in took) / n / unit for name in took[0]}
        keys = Counter(line["key"] for line in read_index(directory))
        if len(keys) != n * counts["append"] or max(keys.values()) > 1:
            raise RuntimeError(f"the index has {len(keys)} keys of {n * counts['append']}")
        shutil.rmtree(directory)
    return found


def rounds(args: argparse.Namespace) -> Iterator[Numbers]:
    """Yield the medians of the rounds so far, after each round. The first round checks stores, and does not count."""
    numbers, samples = sorted({split_layout(layout)[1] for layout in args.layouts}), list[Numbers]()
    with ExitStack() as stack:
        places = [TemporaryDirectory(prefix="dmi-node-", dir=place) for place in (args.directory, args.out.parent)]
        directory, disk = (Path(stack.enter_context(place)) for place in places)
        ranks = [stack.enter_context(new_rank()) for _ in range(numbers[-1])]
        for turn in range(args.rounds + 1):
            found = {"shared": measure_shared(ranks, directory / "shared", numbers, args.effort)}
            found["shared_disk"] = measure_shared(ranks, disk / "shared", numbers, args.effort)
            for case, (dims, options) in args.cases.items():
                together(ranks, fill, [(bool(options.reduce),)] * len(ranks))
                found[case] = measure_case(ranks, dims, options, directory / "stores", args, check=turn == 0)
            samples.append(found)
            if turn:
                yield medians(samples[1:])


def medians(rounds: list[Any]) -> Any:
    """Medians of nested dicts of numbers, as one nested dict."""
    if isinstance(rounds[0], dict):
        return {name: medians([one[name] for one in rounds]) for name in rounds[0]}
    return common.three_digits(statistics.median(rounds))


# ---- the program -------------------------------------------------------------------------------------------------


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the options of the program."""
    p = common.parser("benchmarks.node", __doc__)
    p.add_argument("--out", type=Path, required=True, help="result file; --table reads it")
    p.add_argument("--table", action="store_true", help="print the prediction, and measure nothing")
    p.add_argument("--codec", choices=CODECS, help="with --table: the codec of all selections (default: their own)")
    p.add_argument(
        "--directory",
        default="/dev/shm",
        help="directory in memory for stores (default: %(default)s); small files are also written beside --out",
    )
    p.add_argument("--layouts", type=lambda text: text.split(","), help="comma-separated, as in 'DP 1,TP 8'")
    p.add_argument("--quick", action="store_true", help="measure one selection and few rows, to test the program")
    for field in fields(Machine):
        flag, text = "--" + field.name.replace("_", "-"), f"{field.metadata['what']} (default: {field.default})"
        p.add_argument(flag, type=float, default=field.default, help=f"with --table: {text}")
    args = p.parse_args(argv)
    args.layouts = args.layouts or [*(SHOWN if args.table else LAYOUTS)]
    args.rows, args.stores, args.gigabytes, args.rounds, args.codecs, args.effort = QUICK if args.quick else THOROUGH
    cases = [(f"{model} {what}", (MODELS[model], SELECTIONS[what])) for what in SELECTIONS for model in MODELS]
    args.cases = dict(cases[3:4] if args.quick else cases)
    return args


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    machine = Machine(**{field.name: getattr(args, field.name) for field in fields(Machine)})
    if args.table:
        results = json.loads(args.out.read_text())
        known = list(next(iter(results["rows"].values())))
        if lacking := [layout for layout in args.layouts if layout not in known]:
            sys.exit(f"--layouts: {args.out} has no {', '.join(lacking)}; it has {', '.join(known)}")
        print(node_table(results, machine, args.layouts, args.codec))
        return 0
    header = common.header("benchmarks.node", argv)
    rows = {case: {layout: row_of(of[0], of[1], layout) for layout in args.layouts} for case, of in args.cases.items()}
    for costs in rounds(args):
        shared = {name: costs.pop(name) for name in ("shared", "shared_disk")}
        results = {"header": header, "rows": rows, **shared, "costs": costs}
        common.save(args.out, results)
    print(node_table(results, machine, args.layouts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
