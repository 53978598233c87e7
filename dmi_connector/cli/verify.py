# SPDX-License-Identifier: Apache-2.0
"""`dmi verify`: checks every byte of stores, and that values are finite."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from dmi_connector.cli import places
from dmi_connector.store.format.remote_path import Place, is_gone
from dmi_connector.store.read.index import is_store
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import Problem, begun_stores, stores_of, unseen, verify_store

_FEW = 10
"""Maximum number of stores for which a line is printed for each store."""
_LOG_EVERY_S = 10
"""Seconds between lines of progress, if standard error is not a terminal."""


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi verify`."""
    parser.add_argument("paths", metavar="STORE|DIR|URL", nargs="+")
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--verbose", action="store_true", help=f"print a line for each store, also for more than {_FEW} stores"
    )
    output.add_argument("--quiet", action="store_true", help="print only problems: no progress, no counts")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of cores to use (default: 1)")
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if a store is damaged, else 3 if values are not finite, else 0."""
    kind = "a store (*.zarr, *.zip) or a directory of stores"
    found = [places.place(path, kind) for path in options.paths]
    stores = [store for place in found for store in ([place] if is_store(place) else stores_of(place))]
    begun = {parent: begun_stores(parent) for parent in {store.absolute().parent for store in stores}}
    damaged, not_finite, incomplete, old, gone = 0, 0, 0, 0, 0
    every = options.verbose or (len(stores) <= _FEW and not options.quiet)
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs} is not valid; use 1 or more")
    show = _Progress(options.quiet)
    work = [(store, _line_of(store, begun)) for store in stores]
    for number, (store, problems) in enumerate(zip(stores, _checked(work, options.jobs), strict=True)):
        show(f"{number + 1} of {len(stores)} checked, {damaged} damaged")
        if is_gone(store):  # retention or dmi prune removed it meanwhile
            gone += 1
            continue
        harmed = any(problem.damage for problem in problems)
        damaged, not_finite = damaged + harmed, not_finite + (bool(problems) and not harmed)
        lines = list(map(str, problems))
        if not harmed:
            attrs = read_attrs(store)
            incomplete, old = incomplete + (not attrs["complete"]), old + (unseen(attrs) is not None)
            if every or problems:
                verdict = "no damage, but values are not finite" if problems else "sound"
                lacking = None if attrs["complete"] else f"but incomplete: {attrs['reason']}"
                lines.append(", ".join(filter(None, (f"{store}: {verdict}", lacking, unseen(attrs)))))
        if lines:
            show.clear()
            print("\n".join(lines))
    show.clear()
    counts = [f"{len(stores) - gone} checked", f"{damaged} damaged"]
    counts += [f"{gone} removed meanwhile"] if gone else []
    counts += [f"{not_finite} not finite"] if not_finite else []
    if not every:
        counts += [f"{incomplete} incomplete"] if incomplete else []
        counts += [f"{old} of an old format, in which some damage is not detected"] if old else []
    if not options.quiet:
        print(", ".join(counts))
    return 1 if damaged else 3 if not_finite else 0


def _line_of(store: Place, begun: dict[Place, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """{store name: its line in the index}; {} if the index does not list the store. begun: directory -> its index."""
    lines = begun[store.absolute().parent]
    return {store.name: lines[store.name]} if store.name in lines else {}


def _checked(work: Sequence[tuple[Place, dict[str, dict[str, Any]]]], jobs: int) -> Iterator[list[Problem]]:
    """Yield the problems of each store, in the order of `work`. work: arguments of `verify_store`.

    jobs: number of cores. Each process checks one store, with several threads if there are fewer stores than cores.
    """
    processes = min(jobs, len(work))
    threads = [jobs // processes] * len(work)
    arguments = *zip(*work, strict=True), threads
    if processes == 1:
        yield from map(verify_store, *arguments)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(verify_store, *arguments)


class _Progress:
    """Shows progress on standard error: in one line on a terminal, else in a new line every 10 seconds."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._shown = quiet, time.monotonic()

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown >= _LOG_EVERY_S:
            self._shown = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the progress line from the terminal."""
        if sys.stderr.isatty():
            self("")
