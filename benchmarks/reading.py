# SPDX-License-Identifier: Apache-2.0
"""Speed of reading stores, compared with limits of the machine: raw reads of the same files, and the codec alone.

    python -m benchmarks.reading --out benchmarks/results/cpu-reading.json
    python -m benchmarks.reading --only export --out export.json
    taskset -c 1 python -m benchmarks.reading --before DIR --out before.json

Stores hold normally distributed bf16 values of one hook, `resid_pre`, in memory (/dev/shm). Each round measures every
limit and every read once. A ratio is the speed of a read divided by the speed of its limit in the same round; the
result has the median over the rounds. A second ratio compares their processor times. The second ratio varies less if
other programs use the cores too.

`--before DIR` also measures another checkout of this repository, with the program and stores of that checkout. The
rounds of both alternate, and each round is a process. A ratio is the median over the pairs of rounds.

`--only` selects what to measure: whole (with float32 and zarr), random, batches, export, ranks, open. export needs the
environment that `make types TYPES=sae-lens` builds: `.types/sae-lens/bin/python -m benchmarks.reading`.

| name | measures |
|---|---|
| whole | `Capture.numpy(hook, convert=False)` of all layers, store by store |
| float32 | `Capture.numpy(hook)` of all layers, which converts to float32 |
| random | `RowView.read` of 4,096 random tokens of one layer from all stores |
| in order | raw reads of the chunks of "random" in the order of the files. With `zstd`, the codec alone decodes them |
| batches | an epoch of `TokenDataset` over all stores, in batches of 4,096 tokens of one layer |
| in that order | raw reads of the chunks of "batches" in the order of the epoch, decoded like those of "in order" |
| codec alone | the codec alone on the chunks of "whole", into memory that is reused |
| codec, new memory | the codec alone on the chunks of "whole", into new memory for each store, as a reader needs |
| files and codec | raw reads of the chunks of "whole", and the codec alone: a reader without checksums |
| zarr | `Capture.array(hook)[:]`, by zarr-python |
| export | `dmi export --to saelens` of a fifth of the stores, in GB of stored values. Left out without `datasets` |
| read and written | raw reads of the chunks of "export", then a write of as many float32 values: twice the bytes |
| one rank | reads of stores of two layers that one rank wrote |
| two ranks, two ranks by layer | the same stores, of which each of two ranks wrote half of the columns, or one layer |
| open | `open_captures`, then open and close each store |
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.beside import beside, lines
from benchmarks.limits import (
    CHUNK,
    HOOK,
    THREADS,
    WIDTH,
    chunks_in_order,
    decode_alone,
    decode_anew,
    epoch_chunks,
    frames,
    in_threads,
    read_raw,
    shard_files,
    whole_chunks,
    write_alone,
)
from dmi_connector import TokenDataset, open_captures
from dmi_connector.analysis.export.targets import export
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.row_view import RowView
from dmi_connector.layout import HEADER_SENT_BYTES, ArraySpec, PayloadLayout
from dmi_connector.store.write.coordinator.captures import Captures as Writing
from dmi_connector.store.write.ring import Ring
from dmi_connector.store.write.settings import WriteSettings

TOKENS = 256
CODECS = ("none", "zstd")
BARS = (
    ("whole none", "raw files", 0.7),
    ("whole zstd", "codec alone", 0.8),
    ("whole zstd", "codec, new memory", 0.8),
    ("whole zstd", "files and codec", 0.8),
    ("random none", "in order none", 0.5),
    ("random zstd", "in order zstd", 0.5),
    ("batches none", "in that order none", 0.7),
    ("batches zstd", "in that order zstd", 0.7),
    ("export none", "read and written none", 0.7),
    ("export zstd", "read and written zstd", 0.7),
    *(
        (f"{ranks}, {how}", f"one rank, {how}", 0.9)
        for ranks in ("two ranks", "two ranks by layer")
        for how in ("whole none", "whole zstd", "random none", "random zstd")
    ),
)
"""(read, limit with which it is compared, minimum ratio of their speeds)."""


def make_stores(directory: Path, codec: str, stores: int, layers: int, ranks: int = 1, part_layers: int = 0) -> None:
    """Write finished stores of 256 tokens, with an index. ranks: number of ranks that write each store.

    part_layers: number of layers that each rank writes; 0: each rank writes its part of the columns.
    """
    directory.mkdir(parents=True)
    whole = ArraySpec(HOOK, "bfloat16", tuple(range(layers)), WIDTH, ranks, part_layers=part_layers)
    specs = [replace(whole, rank=rank) for rank in range(ranks)]
    layouts = [PayloadLayout((spec,), CHUNK, 1024, codec) for spec in specs]
    layout = layouts[0]
    ring = Ring(4 * layout.token_bytes * CHUNK + (1 << 20))
    writing = Writing(ring, 1, WriteSettings(), lambda _record: None)
    numbers = [writing.register(one) for one in layouts]
    values = common.activations(layout.header_base * CHUNK)
    attrs = {"prompt_len": TOKENS, "num_layers": layers}
    for store, rank in itertools.product(range(stores), range(ranks)):
        record = writing.open(numbers[rank], str(directory / f"{store:05}.zarr"), attrs, rank=rank, ranks=ranks)
        for first in range(0, TOKENS, CHUNK):
            extent = ring.alloc(layout.token_bytes * CHUNK)
            assert extent is not None
            memory = ring.view(extent)
            memory[: values.nbytes] = values
            header = memory[values.nbytes :].view("<i4").reshape(CHUNK, HEADER_SENT_BYTES // 4)
            header[:, 0], header[:, 1] = 7, np.arange(first, first + CHUNK)
            writing.chunk(record, extent, first, CHUNK)
            ring.release(extent)
        writing.close(record, TOKENS, token_ids=np.full(TOKENS, 7))
    writing.flush()
    assert writing.stats()["complete"] == stores * ranks
    writing.shutdown()


def read_whole(captures: Captures, convert: bool) -> None:
    """Read all layers of each store, and drop the values. convert: whether values are converted to float32."""
    for capture in captures:
        capture.numpy(HOOK, convert=convert)


def read_by_zarr(captures: Captures) -> None:
    """Read all layers of each store with zarr-python, and drop the values."""
    for capture in captures:
        capture.array(HOOK)[:]


def read_epoch(data: TokenDataset) -> None:
    """Read the batches of one epoch."""
    assert sum(1 for _ in data) == data.batches()


class Clock:
    """Measures speeds.

    wall: {name: GB/s by elapsed time}. cores: {name: GB/s by the processor time of all threads, times THREADS}.
    """

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cores: dict[str, float] = {}

    def rate(self, name: str, nbytes: float, work: Callable[[], object]) -> float:
        """Call `work`, which reads or writes `nbytes` bytes, and record its speed. Returns its seconds."""
        begin, used = time.perf_counter(), time.process_time()
        work()
        seconds, busy = time.perf_counter() - begin, time.process_time() - used
        self.wall[name] = nbytes / seconds / 1e9
        self.cores[name] = nbytes / busy / 1e9 * THREADS
        return seconds


class Round:
    """Measures the parts that --only selects, with stores of one codec. Stores are written when a part needs them."""

    def __init__(self, root: Path, codec: str, args: argparse.Namespace) -> None:
        self.root, self.codec, self.args = root, codec, args
        self.memory = np.zeros((64, CHUNK * WIDTH * 2 + 64), np.uint8)
        self.clock = Clock()

    @functools.cached_property
    def few(self) -> Captures:
        """The stores that are read whole."""
        make_stores(self.root / "few", self.codec, self.args.few, self.args.layers)
        return open_captures(self.root / "few")

    @functools.cached_property
    def encoded(self) -> list[bytes]:
        """The encoded chunks of `few`."""
        return frames(self.few)

    @functools.cached_property
    def many(self) -> Captures:
        """The stores from which single rows are read."""
        make_stores(self.root / "many", self.codec, self.args.many, 2)
        return open_captures(self.root / "many")

    @functools.cached_property
    def of_ranks(self) -> dict[str, Captures]:
        """{name in the table above: its stores, which have two layers}."""
        ways = {"one rank": (1, 0), "two ranks": (2, 0), "two ranks by layer": (2, 1)}
        for name, way in ways.items():
            make_stores(self.root / name, self.codec, self.args.few, 2, *way)
        return {name: open_captures(self.root / name) for name in ways}

    @functools.cached_property
    def view(self) -> RowView:
        """The rows of one layer of `many`."""
        return self.many.rows(HOOK, layer=1)

    @functools.cached_property
    def data(self) -> TokenDataset:
        """Batches of the rows of `view`."""
        return TokenDataset(self.many, f"{HOOK}@1", min(self.args.batch, len(self.view)))

    @functools.cached_property
    def buffer(self) -> np.ndarray:
        """Memory for raw reads, as large as a buffer of `data`."""
        return np.zeros((self.data.buffer_tokens // CHUNK, self.memory.shape[1]), np.uint8)

    def measure(self, seed: int) -> Clock:
        """Run one round. Returns the speeds, in GB/s of decoded values in the stored dtype.

        Figures in other units end with the unit, as in "random zstd, ms". seed: seed of the random tokens.
        """
        self.clock = Clock()
        for name in self.args.only:
            PARTS[name](self, seed)
        return self.clock

    def whole(self, _seed: int) -> None:
        """Measure reads of all layers: in the stored dtype, as float32, and with zarr-python."""
        codec, rate = self.codec, self.clock.rate
        nbytes, files = len(self.few) * self.args.layers * TOKENS * WIDTH * 2, shard_files(self.few)
        if codec == "none":
            rate("raw files", nbytes, lambda: in_threads(read_raw, files))
        else:
            planned, encoded = [p for capture in self.few for p in whole_chunks(capture)], self.encoded
            rate("codec alone", nbytes, lambda: decode_alone(encoded))
            rate("codec, new memory", nbytes, lambda: decode_anew(encoded, len(self.few)))
            rate("files and codec", nbytes, lambda: chunks_in_order(planned, self.memory))
        for name, convert in (("whole", False), ("float32", True)):
            rate(f"{name} {codec}", nbytes, functools.partial(read_whole, self.few, convert))
        some = self.few[: max(1, len(self.few) // 10)]
        rate(f"zarr {codec}", nbytes * len(some) / len(self.few), lambda: read_by_zarr(some))

    def random(self, seed: int) -> None:
        """Measure reads of random tokens of one layer."""
        codec, view, clock, batch = self.codec, self.view, self.clock, self.args.batch
        rows = np.random.default_rng(seed).integers(0, len(view), batch)
        planned = view._plan(np.unique(rows), np.empty((1, batch, WIDTH), np.uint16), [0])
        chunks = chunks_in_order(planned, self.memory)
        nbytes = chunks * CHUNK * WIDTH * 2
        clock.rate(f"in order {codec}", nbytes, lambda: chunks_in_order(planned, self.memory))
        seconds = clock.rate(f"random {codec}", nbytes, lambda: view.read(rows, convert=False))
        clock.wall |= {f"random {codec}, ms": seconds * 1e3, f"random {codec}, chunks": chunks}

    def batches(self, _seed: int) -> None:
        """Measure one epoch of the data set."""
        codec, data = self.codec, self.data
        data.set_epoch(0)
        planned, nbytes = epoch_chunks(data), data.batches() * data.batch_size * WIDTH * 2
        self.clock.rate(f"in that order {codec}", nbytes, lambda: chunks_in_order(planned, self.buffer))
        self.clock.rate(f"batches {codec}", nbytes, lambda: read_epoch(data))

    def export(self, _seed: int) -> None:
        """Measure an export for SAELens, and the raw reads and the write that it needs."""
        codec, clock = self.codec, self.clock
        some = self.many[: max(1, len(self.many) // 5)]
        rows = len(some) * TOKENS
        planned = some.rows(HOOK, layer=1)._plan(np.arange(rows), np.empty((1, rows, WIDTH), np.uint16), [0])
        nbytes, values = rows * WIDTH * 2, np.ones(16 << 20, np.uint8)
        read = clock.rate(f"read to export {codec}", nbytes, lambda: chunks_in_order(planned, self.memory))
        busy = nbytes / clock.cores[f"read to export {codec}"]
        written = clock.rate(f"written {codec}", nbytes, lambda: write_alone(self.root / "written", values, 2 * nbytes))
        busy += nbytes / clock.cores[f"written {codec}"]
        clock.wall[f"read and written {codec}"] = nbytes / (read + written) / 1e9
        clock.cores[f"read and written {codec}"] = nbytes / busy
        out = self.root / "export"
        clock.rate(f"export {codec}", nbytes, lambda: export(some, "saelens", out, {"hook": f"{HOOK}@1"}))
        shutil.rmtree(out)

    def ranks(self, seed: int) -> None:
        """Measure reads of stores of one and of two ranks: of all layers, and of random tokens of one layer."""
        nbytes, batch = self.args.few * 2 * TOKENS * WIDTH * 2, min(self.args.batch, self.args.few * TOKENS)
        rows = np.random.default_rng(seed).integers(0, self.args.few * TOKENS, batch)
        for name, captures in self.of_ranks.items():
            whole = functools.partial(read_whole, captures, False)
            some = functools.partial(captures.rows(HOOK, layer=1).read, rows, convert=False)
            self.clock.rate(f"{name}, whole {self.codec}", nbytes, whole)
            self.clock.rate(f"{name}, random {self.codec}", batch * WIDTH * 2, some)

    def open(self, _seed: int) -> None:
        """Measure opening and closing each store."""
        directory = self.root / "many"
        assert len(self.many)
        seconds = self.clock.rate("open", 0, lambda: [None for _ in open_captures(directory)])
        del self.clock.wall["open"], self.clock.cores["open"]
        self.clock.wall[f"open {self.codec}, s"] = seconds


PARTS: dict[str, Callable[[Round, int], None]] = {
    "whole": Round.whole,
    "random": Round.random,
    "batches": Round.batches,
    "export": Round.export,
    "ranks": Round.ranks,
    "open": Round.open,
}
"""{value of `--only`: method that measures it}."""


def chosen(only: list[str]) -> list[str]:
    """The parts to measure. only: values of --only; empty: all, without export if `datasets` is not installed.

    Raises ValueError if `only` has export and `datasets` is not installed.
    """
    lacks = importlib.util.find_spec("datasets") is None
    how = "needs the package datasets: make types TYPES=sae-lens, then .types/sae-lens/bin/python -m benchmarks.reading"
    if lacks and "export" in only:
        raise ValueError(f"--only export {how}")
    if lacks and not only:
        print(f"export is left out, which {how}", file=sys.stderr)
    return only or [name for name in PARTS if name != "export" or not lacks]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.reading", __doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--directory", default="/dev/shm/dmi-reading")
    p.add_argument("--only", nargs="+", choices=PARTS, default=[], help="what to measure (default: all)")
    p.add_argument("--few", type=int, default=60, help="stores that are read whole (default: %(default)s)")
    p.add_argument("--layers", type=int, default=12, help="layers of stores that are read whole (default: %(default)s)")
    p.add_argument("--many", type=int, default=1000, help="stores from which rows are read (default: %(default)s)")
    p.add_argument("--batch", type=int, default=4096, help="random tokens, and rows per batch (default: %(default)s)")
    p.add_argument("--repeat", type=int, default=7, help="rounds (default: %(default)s)")
    p.add_argument("--before", type=Path, help="another checkout of this repository, which is measured too")
    args = p.parse_args(argv)
    try:
        args.only = chosen(args.only)
    except ValueError as error:
        p.error(str(error))
    header = common.header("benchmarks.reading", argv)
    if args.before:
        results = {"header": header, **beside(args)}
        common.save(args.out, results)
        print(common.markdown(lines(results)))
        return 0
    wall: dict[str, list[float]] = {}
    cores: dict[str, list[float]] = {}
    for codec in CODECS:  # one codec at a time, because the stores of both would take twice the memory
        root = Path(args.directory)
        try:
            measured = Round(root, codec, args)
            for turn in range(args.repeat + 1):
                clock = measured.measure(turn)
                for found, runs in ((clock.wall, wall), (clock.cores, cores)) if turn else ():  # the first warms up
                    for name, value in found.items():
                        runs.setdefault(name, []).append(common.three_digits(value))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    stores = {"whole": [args.few, args.layers, TOKENS, WIDTH], "random": [args.many, 2, TOKENS, WIDTH]}
    results = {"header": header, "stores": stores, **summary(wall, cores)}
    common.save(args.out, results)
    print(common.markdown([["", "GB/s"], *([name, f"{value:g}"] for name, value in results["median"].items())]))
    names = ("read", "limit", "bar", "ratio", "ratio_processor_time")
    print(common.markdown([list(names), *([str(one[name]) for name in names] for one in results["of_limit"])]))
    return 0


def summary(wall: dict[str, list[float]], cores: dict[str, list[float]]) -> dict[str, Any]:
    """Median, minimum and maximum of each figure over the rounds, and the ratio of each read to its limit.

    wall, cores: {name: values of the rounds}, as in `Clock`.
    """
    pick: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "least": min, "most": max}
    return {
        "rounds": len(next(iter(wall.values()))),
        **{name: {what: of(values) for what, values in wall.items()} for name, of in pick.items()},
        "of_limit": [of_limit(wall, cores, *bar) for bar in BARS if bar[0] in wall],
    }


def of_limit(
    wall: dict[str, list[float]], cores: dict[str, list[float]], read: str, limit: str, bar: float
) -> dict[str, Any]:
    """The ratio of the speed of a read to that of its limit: median, minimum and maximum over the rounds."""
    both = [[a / b for a, b in zip(runs[read], runs[limit], strict=True)] for runs in (wall, cores)]
    return {
        **{"read": read, "limit": limit, "bar": bar},
        **{"ratio": common.three_digits(statistics.median(both[0]))},
        **{"ratio_processor_time": common.three_digits(statistics.median(both[1]))},
        **{name: common.three_digits(of(both[0])) for name, of in (("least", min), ("most", max))},
    }


if __name__ == "__main__":
    sys.exit(main())
