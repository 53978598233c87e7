# SPDX-License-Identifier: Apache-2.0
"""`dmi sketch`: Frequent Directions sketches of captured rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dmi_connector.analysis.new_file import new_file
from dmi_connector.analysis.sketch import Sketch, is_sketch_of, sketch
from dmi_connector.captures.capture import open_capture
from dmi_connector.cli import places
from dmi_connector.cli.tables import format_table
from dmi_connector.store.format.remote_path import Place, local_path, place_of
from dmi_connector.store.read.index import FINISHED, find_captures, is_store
from dmi_connector.store.read.waiting import CaptureFailed
from dmi_connector.wording import format_bytes

_FILE = ".safetensors"


def add_sketch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi sketch`."""
    parser.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores, or directories of stores")
    parser.add_argument("--hooks", required=True, metavar="HOOKS", help="as in the server option: resid_post@10-20")
    parser.add_argument("-k", type=int, default=64, metavar="K", help="rows of a sketch (default: 64)")
    parser.add_argument(
        "-o", "--out", required=True, metavar="DIR|FILE", help="a directory, or a new .safetensors file"
    )
    parser.add_argument(
        "--follow", action="store_true", help="also read captures that are still being written, until they end"
    )
    parser.add_argument("--merge", action="store_true", help="one sketch of all captures, in a FILE")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one entry per file")
    parser.set_defaults(run=run_sketch)


def run_sketch(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if a followed capture failed."""
    if options.k < 1:
        raise ValueError(f"-k {options.k} is not valid; keep 1 row or more")
    stores = _begun(options.stores) if options.follow else places.stores(options.stores)
    failed: list[CaptureFailed] = []
    listed: list[dict[str, Any]] = []
    for out, group in _groups(stores, local_path(options.out), options.merge):
        try:
            found = None if out == local_path(options.out) else _made_before(out, group[0], options)
            if found is None:
                with new_file(out, "sketch") as partial:
                    found, lost = _merged(group, options)
                    found.save(partial)
                failed += lost
        except CaptureFailed as error:
            failed.append(error)
            continue
        if options.json:
            listed.append(_json(out, found))
        else:
            print(_text(out, found), flush=True)
    if options.json:
        print(json.dumps(listed, indent=1))
    for why in failed:
        print(f"dmi: {why}", file=sys.stderr)
    return 1 if failed else 0


def _made_before(out: Path, store: Place, options: argparse.Namespace) -> Sketch | None:
    """The sketch in a file that the same command has written before it was stopped; None if there is no file.

    Raises FileExistsError for a sketch of another capture, or with other options, and ValueError for another file.
    """
    if not os.path.lexists(out):
        return None
    found = Sketch.load(out)
    try:
        with open_capture(store, 0, allow_incomplete=True) as capture:
            same = is_sketch_of(found, capture, options.hooks, options.k)
    except TimeoutError:  # it is still being written
        same = False
    if not same:
        raise FileExistsError(f"{out} exists, but is a sketch of other rows, hooks or k; give another -o")
    return found


def _merged(stores: Sequence[Place], options: argparse.Namespace) -> tuple[Sketch, list[CaptureFailed]]:
    """(one sketch of all stores, why captures failed). Raises CaptureFailed if all failed."""
    found: Sketch | None = None
    failed: list[CaptureFailed] = []
    for store in stores:
        try:
            one = _sketch(store, options)
        except CaptureFailed as error:
            failed.append(error)
            continue
        if found is None:
            found = one
        else:
            found.merge(one)
    if found is None:
        raise failed[0]
    return found, failed


def _sketch(store: Place, options: argparse.Namespace) -> Sketch:
    if options.follow:
        with open_capture(store, follow=True) as followed:
            return sketch(followed, options.hooks, options.k)
    with open_capture(store, 0, allow_incomplete=True) as capture:
        return sketch(capture, options.hooks, options.k)


def _begun(paths: Sequence[str]) -> list[Place]:
    """The stores that `paths` name, and the finished and started stores of directories that they name."""
    found: list[Place] = []
    for path in map(place_of, paths):
        inside = (
            [path] if is_store(path) else [i.store for i in find_captures(path) if i.state in ("started", *FINISHED)]
        )
        if not inside:
            raise ValueError(f"--follow {path}: no capture has begun in it; give NAME.zarr, or wait for one")
        found += inside
    return places.once(found)


def _groups(stores: Sequence[Place], out: Path, merge: bool) -> list[tuple[Path, Sequence[Place]]]:
    """(file, its stores) pairs. Raises ValueError if `out` does not fit the stores, OSError if it cannot be made."""
    is_file = out.suffix == _FILE
    if merge and not is_file:
        raise ValueError(f"-o {out} is not a file name; --merge writes one file: give -o NAME{_FILE}")
    if is_file and not merge and len(stores) > 1:
        raise ValueError(f"-o {out} is one file for {len(stores)} captures; give a directory, or --merge")
    if is_file:
        return [(out, stores)]
    if out.exists() and not out.is_dir():
        raise ValueError(f"-o {out} is a file whose name does not end in {_FILE}; give a directory, or NAME{_FILE}")
    files = [out / f"{store.stem}{_FILE}" for store in stores]
    if len(set(files)) < len(files):
        raise ValueError(f"-o {out}: several captures have the same name; sketch their directories one by one")
    out.mkdir(parents=True, exist_ok=True)
    return [(file, [store]) for file, store in zip(files, stores, strict=True)]


def _text(out: Path, found: Sketch) -> str:
    """The output for a file: a table with one line per hook. The column `bound` is that of the worst layer."""
    lacking = f", {found.missing} missing" if found.missing else ""
    head = f"{out}: {len(found.stores)} captures, {found.tokens} tokens{lacking}"
    return f"{head}\n{format_table(('hook', 'layers', 'tokens', 'raw', 'sketch', 'bound'), _rows(found))}"


def _rows(found: Sketch) -> Iterator[tuple[object, ...]]:
    for hook, layers in found.hooks.items():
        read = min(one.count for one in layers.values())
        raw = sum(one.count + one.not_finite for one in layers.values()) * found.row_bytes[hook]
        bound = f"{100 * found.relative_error(hook).max():.2f} %"
        yield hook, len(layers), read, format_bytes(raw), format_bytes(found.rows(hook).nbytes), bound


def _json(out: Path, found: Sketch) -> dict[str, Any]:
    """The entry of a file in the output of --json. Sizes are in bytes. `bound` is a `Sketch.relative_error`."""
    hooks = [
        {
            "hook": hook,
            "layer": layer,
            "tokens": one.count,
            "not_finite": one.not_finite,
            "raw": (one.count + one.not_finite) * found.row_bytes[hook],
            "sketch": rows.nbytes,
            "bound": float(bound),
        }
        for hook, layers in found.hooks.items()
        for (layer, one), rows, bound in zip(layers.items(), found.rows(hook), found.relative_error(hook), strict=True)
    ]
    about = {"file": str(out), "stores": found.stores, "model": found.model, "k": found.k}
    return {**about, "tokens": found.tokens, "missing": found.missing, "hooks": hooks}
