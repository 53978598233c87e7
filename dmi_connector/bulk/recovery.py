# SPDX-License-Identifier: Apache-2.0
"""Inspects and cleans up what an earlier start of a run left, before the run continues."""

from __future__ import annotations

import os
import re
import shutil
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dmi_connector.bulk.manifest import Positions
from dmi_connector.bulk.order import Order
from dmi_connector.store.format.completeness import OWN_ENDS
from dmi_connector.store.format.locks import claim, lock_alone
from dmi_connector.store.format.remote_path import Place, place_of
from dmi_connector.store.format.schema import INDEX_NAME, PARTIAL_SUFFIX
from dmi_connector.store.read.index_lines import read_index, uploaded_stores
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.run_manifest import MANIFESTS, read_manifest
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.commit import append_index, remove_partial
from dmi_connector.store.write.finish.repair import record_ends
from dmi_connector.store.write.finish.retention import REMOVING_SUFFIX, remove_store

_STORE = ".zarr"
_DIGITS = 9


def store_key(run: str, position: int) -> str:
    """The key of the store of a prompt. run: name of the run."""
    return f"{run}-{position:0{_DIGITS}d}"


def position_of(run: str, key: str) -> int | None:
    """The position in a key of the run `run`; None for any other key."""
    match = re.fullmatch(rf"{run}-(\d{{{_DIGITS},}})", key, re.ASCII)
    return None if match is None else int(match[1])


@dataclass
class Recovered:
    """The prompts of a share that earlier starts captured.

    done: positions with a line in the manifest, without those in `found`. found: position -> complete and undamaged
    store that no line names. It is the uploaded store if the local copy is gone. removed: number of removed stores,
    which were unfinished, incomplete, damaged or duplicates. gone: number of positions in `done` whose stores do not
    exist any more.
    """

    done: Positions = field(default_factory=Positions)
    found: dict[int, Place] = field(default_factory=dict)
    removed: int = 0
    gone: int = 0


def recover(out: Path, run: str, order: Order, manifest: Path, redo_missing: bool = False) -> Recovered:
    """Remove unusable stores of a share, and find the prompts that are done. No process of the share may still write.

    out: directory of the stores. run: name of the run. order: has the share of this process. manifest: path of the
    share's manifest. redo_missing: prompts whose stores are gone count as not done. Uploaded stores are not gone.

    Raises OSError. Raises ValueError for a store that must be removed but that another process uses.
    """
    result = Recovered()
    # noted: hashes of the store names in the manifest. held, names: positions of stores, and hashes of their names.
    noted, held, names = array("q"), array("q"), array("q")
    for entry in read_manifest(manifest):
        position = position_of(run, entry["key"])
        if position is not None and order.holds(position):
            result.done.add(position)
            noted.append(hash(str(entry.get("store"))))
    there, twice = Positions(), set()
    for position, name in _stores(out, run, order):
        path = out / name
        if not name.endswith(_STORE):
            _remove_rest(path)
            result.removed += 1
        elif not there.add(position):
            twice.add(position)
        elif position in result.done:
            held.append(position)
            names.append(hash(name))
        elif is_sound(path):
            result.found[position] = path
        else:
            _remove(path)
            there.discard(position)
            result.removed += 1
    # A killed run with `redo_missing` may leave stores that the lines of their positions do not name.
    unnamed = set(np.array(held)[~np.isin(names, noted)].tolist())
    if several := twice | unnamed:
        result.removed += _keep_one(out, run, order, manifest, several, result, there)
    record_ends(out)
    for position, url in _uploaded(out, run, order):
        if position in there:
            continue
        if position in result.done:
            there.add(position)
        elif _is_whole(place := place_of(url)):
            there.add(position)
            result.found[position] = place
    missing = [position for position in result.done if position not in there] if redo_missing else []
    for position in missing:
        result.done.discard(position)
    result.gone = sum(position not in there for position in result.done)
    return result


def is_unused(out: Path, run: str, life: str) -> bool:
    """Whether a run has captured nothing: none of its shares has a line in a manifest, a store, or an upload.

    life: prefix of the names of the lock files of its engines. False while a process holds such a lock, because it may
    still write a store.
    """
    for path in out.glob(f"{life}*"):
        with lock_alone(path) as alone:
            if not alone:
                return False
    entries = (entry for path in out.glob(MANIFESTS) for entry in read_manifest(path))
    if any(position_of(run, entry["key"]) is not None for entry in entries):
        return False
    return not any(_stores(out, run, Order())) and not any(_uploaded(out, run, Order()))


def settle_left(out: Path, run: str, positions: Collection[int]) -> dict[int, Place]:
    """For each of some positions, keep one complete and undamaged store and remove all other stores.

    Returns {position: kept store, local or uploaded}. No process may still write these stores. Raises OSError. Raises
    ValueError for a store that must be removed but that another process uses.
    """
    names: dict[int, list[str]] = {position: [] for position in positions}
    for position, name in _stores(out, run, Order()):
        if position in names:
            names[position].append(name)
    kept: dict[int, Place] = {}
    for position, several in names.items():
        for name in several:
            if not name.endswith(_STORE):
                _remove_rest(out / name)
            elif position not in kept and is_sound(out / name):
                kept[position] = out / name
            else:
                _remove(out / name)
    for position, url in _uploaded(out, run, Order()):
        if position in names and position not in kept and _is_whole(place := place_of(url)):
            kept[position] = place
    return kept


def not_uploaded(out: Path, run: str, order: Order) -> tuple[int, str | None]:
    """(number of stores of a share whose upload is pending or failed, reason of the latest failure or None).

    `dmi repair` uploads these stores.
    """
    left: dict[str, str | None] = {}
    for line in read_index(out):
        if line.get("upload") in ("pending", "failed"):
            left.pop(line["store"], None)  # so that it is inserted again, as the last
            left[line["store"]] = line.get("upload_reason")
        elif "upload" in line:
            left.pop(line["store"], None)
    positions = ((_position(run, name), name) for name in left)
    held = [left[name] for p, name in positions if p is not None and order.holds(p) and (out / name).is_dir()]
    return len(held), next((reason for reason in reversed(held) if reason), None)


def _uploaded(out: Path, run: str, order: Order) -> Iterator[tuple[int, str]]:
    """Yield (position, URL) of every uploaded store of a share."""
    for name, url in uploaded_stores(out):
        position = _position(run, name)
        if position is not None and order.holds(position):
            yield position, url


def _position(run: str, name: str) -> int | None:
    """The position in the name of a finished store; None if the store is not of the run `run`."""
    key, _, rest = name.partition("--")
    return position_of(run, key) if rest.endswith(_STORE) else None


def _stores(out: Path, run: str, order: Order) -> Iterator[tuple[int, str]]:
    """Yield (position, file name) of every local store of a share, finished or not."""
    pattern = re.compile(rf"({run}-\d+)--.*{re.escape(_STORE)}({PARTIAL_SUFFIX}|{REMOVING_SUFFIX})?")
    with os.scandir(out) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            position = None if match is None else position_of(run, match[1])
            if position is not None and order.holds(position):
                yield position, entry.name


def is_sound(path: Path) -> bool:
    """Whether a finished store is complete and undamaged, and its request was not aborted.

    Values that are not finite do not count as damage: the model would compute them again.
    """
    return _is_whole(path) and not any(problem.damage for problem in verify_store(path, begun={}))


def _is_whole(store: Place) -> bool:
    """Whether the attributes of a finished store say that it is complete, and that its request was not aborted."""
    try:
        attrs = read_attrs(store)
    except ValueError:
        return False
    return bool(attrs["complete"]) and attrs["finish_reason"] in OWN_ENDS


def _keep_one(
    out: Path, run: str, order: Order, manifest: Path, positions: set[int], result: Recovered, there: Positions
) -> int:
    """Keep at most one store per position: the one in the manifest, else an undamaged one.

    An undamaged store that the manifest does not name gets a line: its position moves from `result.done` to
    `result.found`. Positions without a kept store are removed from `there`. Returns the number of removed stores.
    """
    noted = {}
    for entry in read_manifest(manifest):
        if (position := position_of(run, entry["key"])) in positions:
            noted[position] = entry["store"]
    names: dict[int, list[str]] = {position: [] for position in positions}
    for position, name in _stores(out, run, order):
        if position in positions:
            names[position].append(name)
    removed = 0
    for position, several in names.items():
        wanted = noted.get(position)
        kept = wanted if wanted in several else next((name for name in several if is_sound(out / name)), None)
        result.found.pop(position, None)
        if kept is None:
            there.discard(position)
        elif kept != wanted:
            result.done.discard(position)
            result.found[position] = out / kept
        for name in several:
            if name != kept:
                _remove(out / name)
                removed += 1
    return removed


def _remove(path: Path) -> None:
    if not remove_store(path):
        raise ValueError(f"{path} must be removed, but a process reads it; end that process, and start again")


def _remove_rest(path: Path) -> None:
    """Remove an unfinished store, or the rest of an interrupted removal. Raises ValueError if a process uses it."""
    with claim(path) as alone:
        if not alone:
            raise ValueError(
                f"{path} is written or repaired by another process; wait until it has finished, and start again"
            )
        if not path.name.endswith(PARTIAL_SUFFIX):
            shutil.rmtree(path)
            return
        remove_partial(str(path))
    if (path.parent / INDEX_NAME).exists():
        store = path.name.removesuffix(PARTIAL_SUFFIX)
        append_index(str(path.parent), {"event": "abort", "store": store, "state": "aborted"})
