# SPDX-License-Identifier: Apache-2.0
"""`dmi verify`: which stores are damaged."""

from __future__ import annotations

import argparse
import sys

from dmi_connector.cli import places
from dmi_connector.store.read.index import is_store
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import begun_stores, stores_of, unseen, verify_store

_FEW = 10
"""Up to so many stores have a line each."""


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi verify`."""
    parser.add_argument("paths", metavar="STORE|DIR|URL", nargs="+")
    parser.add_argument("--verbose", action="store_true", help=f"a line for each store, as for {_FEW} and fewer")
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0; 1 if a store is damaged; else 3 if values are not finite."""
    kind = "a store (*.zarr, *.zip) or a directory of stores"
    found = [places.place(path, kind) for path in options.paths]
    stores = [store for place in found for store in ([place] if is_store(place) else stores_of(place))]
    begun = {parent: begun_stores(parent) for parent in {store.absolute().parent for store in stores}}
    damaged, not_finite, incomplete, old = 0, 0, 0, 0
    every = options.verbose or len(stores) <= _FEW
    for number, store in enumerate(stores):
        _progress(f"{number} of {len(stores)} checked, {damaged} damaged")
        problems = verify_store(store, begun[store.absolute().parent])
        harmed = any(problem.damage for problem in problems)
        damaged, not_finite = damaged + harmed, not_finite + (bool(problems) and not harmed)
        lines = list(map(str, problems))
        if not harmed:
            attrs = read_attrs(store)
            incomplete, old = incomplete + (not attrs["complete"]), old + (unseen(attrs) is not None)
            if every or problems:
                verdict = "every byte as written, but values are not finite" if problems else "sound"
                lacking = None if attrs["complete"] else f"but incomplete: {attrs['reason']}"
                lines.append(", ".join(filter(None, (f"{store}: {verdict}", lacking, unseen(attrs)))))
        if lines:
            _progress("")
            print("\n".join(lines))
    _progress("")
    counts = [f"{len(stores)} checked", f"{damaged} damaged"]
    counts += [f"{not_finite} not finite"] if not_finite else []
    if not every:
        counts += [f"{incomplete} incomplete"] if incomplete else []
        counts += [f"{old} of an old format, in which some damage is not seen"] if old else []
    print(", ".join(counts))
    return 1 if damaged else 3 if not_finite else 0


def _progress(text: str) -> None:
    """Write over the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
