# SPDX-License-Identifier: Apache-2.0
"""Measures two checkouts of this repository in alternating rounds, for `benchmarks.reading --before DIR`.

On a machine with other work, compare the ratios of reads to their limits by processor time, which vary least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import common

COUNTS = "chunks"
"""Last word of the names of figures that count chunks. The other figures are speeds and times."""
_COLUMNS = ("before", "after", "ratio", "least", "most")


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both checkouts in alternating rounds. Returns the result, with the ratio of each figure in `of_before`.

    In a round, each checkout measures in one process, which measures twice: the first measurement warms up. The order
    of the checkouts changes from round to round. args: the options of `benchmarks.reading`.
    """
    found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    flags = ["--only", *args.only, "--few", args.few, "--layers", args.layers, "--many", args.many]
    flags += ["--batch", args.batch, "--repeat", 1, "--directory", args.directory]
    part = args.out.absolute().with_name(args.out.name + ".round")
    places = [("before", args.before.absolute()), ("after", common.ROOT)]
    for turn in range(args.repeat):
        for side, root in places if turn % 2 == 0 else places[::-1]:
            command = [sys.executable, "-m", "benchmarks.reading", "--out", str(part), *map(str, flags)]
            env = {**os.environ, "PYTHONPATH": str(root)}
            subprocess.run(command, check=True, cwd=root, env=env, stdout=sys.stderr)
            found[side].append(_figures(json.loads(part.read_bytes())))
    part.unlink()
    return {
        "before": common.commit(args.before, "DMI_BEFORE"),
        "stores": {"whole": [args.few, args.layers], "random": [args.many, 2]},
        "rounds": args.repeat,
        "of_before": {
            name: compared(*([one[name] for one in rounds] for rounds in found.values())) for name in found["after"][0]
        },
    }


def _figures(results: dict[str, Any]) -> dict[str, float]:
    """{name: value} of a round: speeds, times, and the ratio of each read to its limit by processor time."""
    figures = {name: value for name, value in results["median"].items() if not name.endswith(COUNTS)}
    return figures | {f"{one['read']} of {one['limit']}": one["ratio_processor_time"] for one in results["of_limit"]}


def compared(before: list[float], after: list[float]) -> dict[str, float]:
    """{"before", "after": median of a figure in each checkout; "ratio", "least", "most": median, minimum and maximum of
    after / before over the rounds}.
    """
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    values = [*map(statistics.median, (before, after, ratios)), min(ratios), max(ratios)]
    return dict(zip(_COLUMNS, map(common.three_digits, values), strict=True))


def lines(results: dict[str, Any]) -> list[list[str]]:
    """The lines of a table of a result of `beside`."""
    return [["", *_COLUMNS], *([name, *(f"{v:g}" for v in of.values())] for name, of in results["of_before"].items())]
