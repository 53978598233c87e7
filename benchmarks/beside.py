# SPDX-License-Identifier: Apache-2.0
"""Two checkouts of this repository in turns: `benchmarks.reading --before DIR`.

On a machine with other work, compare what part of its limit a read reaches by processor time: that varies least.
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
"""Last word of figures that say how much was read, not how fast."""
_COLUMNS = ("before", "after", "ratio", "least", "most")


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both checkouts in turns, and say what each figure is of that of the checkout before.

    A round is one process of each checkout. It measures twice, and the first warms up. The checkout that begins changes
    from round to round.
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
    """Speeds and times of a round, and what part of its limit each read reaches by processor time."""
    figures = {name: value for name, value in results["median"].items() if not name.endswith(COUNTS)}
    return figures | {f"{one['read']} of {one['limit']}": one["ratio_processor_time"] for one in results["of_limit"]}


def compared(before: list[float], after: list[float]) -> dict[str, float]:
    """Medians of one figure in both checkouts, and the ratio after / before: its median, least and most in a round."""
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    values = [*map(statistics.median, (before, after, ratios)), min(ratios), max(ratios)]
    return dict(zip(_COLUMNS, map(common.three_digits, values), strict=True))


def lines(results: dict[str, Any]) -> list[list[str]]:
    """A table of `beside`."""
    return [["", *_COLUMNS], *([name, *(f"{v:g}" for v in of.values())] for name, of in results["of_before"].items())]
