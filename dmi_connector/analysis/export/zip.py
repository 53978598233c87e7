# SPDX-License-Identifier: Apache-2.0
"""Export of each store to a zip file, which holds the files of the store uncompressed."""

from __future__ import annotations

import zipfile
from pathlib import Path

from dmi_connector.analysis.export.progress import Done, Progress, export_by_name, refuse_existing, row_blocks, whole
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck, not_finite
from dmi_connector.dtypes import FLOATS
from dmi_connector.store.format.paths import leaves_store

_TIME = (1980, 1, 1, 0, 0, 0)
"""Timestamp of every entry, so that the zip file is reproducible."""
_MB = 1_000_000
_ROWS = 1024
"""Number of rows to check at a time."""


def write_zip(capture: Capture, path: Path, progress: Progress = lambda _done, _total: None) -> None:
    """Write the files that a store lists, with `zarr.json` at the root, as Zarr's zip store requires.

    Files are not compressed, so that readers find chunks by their offsets. progress: called with (done, total) in MB.

    Raises ValueError if a listed file lies outside the store.
    """
    names = ["zarr.json", *sorted(capture.attrs["files"])]
    outside = next((name for name in names if leaves_store(name)), None)
    if outside is not None:
        raise ValueError(f"{capture.path} lists the file {outside!r}, which lies outside the store; run dmi verify")
    total, done = sum(size for size, _ in capture.attrs["files"].values()), 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.file_size = capture.files.size(name) or 0
            with archive.open(entry, "w") as out:
                for block in capture.files.blocks(name):
                    out.write(block)
                    done += len(block) if name != "zarr.json" else 0
                    progress(-(-done // _MB), -(-total // _MB))


def _check(capture: Capture, finite: FiniteCheck) -> None:
    """Raise NotFinite for a NaN or an infinity, unless `finite` keeps them.

    Logits may be minus infinity (masked tokens). The check stops at the first block of rows with such values.
    """
    for hook, facts in capture.attrs["hooks"].items():
        if facts["array"] != hook or (facts["dtype"] not in FLOATS and not facts.get("reduce")):
            continue
        for layer in facts["layers"] or [None]:
            for rows in row_blocks(capture.shape(hook)[-2], _ROWS):
                values = capture.numpy(hook, layer, rows, convert=False)
                bad = not_finite(values, minus_infinity=hook == "logits") + rows.start
                if len(bad):
                    if hook == "logits":
                        bad = capture.logits_positions[bad] - capture.attrs["start"]
                    finite.see(capture.path, bad)
                    if finite.policy == "skip":
                        raise finite.error(capture.path, int(bad[0]))
                    return


def export(captures: Captures, out: Path, progress: Progress, finite: FiniteCheck) -> Done:
    """Write `NAME.zip` for each store, in the directory `out`."""

    def write(capture: Capture, path: Path) -> None:
        _check(capture, finite)
        write_zip(capture, path)

    return export_by_name(captures, out, ".zip", write, progress, {"to": "zip"}, finite)


def export_file(captures: Captures, out: Path, progress: Progress, finite: FiniteCheck) -> Done:
    """Write the only store of `captures` to the file `out`, which must not exist."""
    refuse_existing(out)
    with captures[0] as capture, whole(out) as partial:
        _check(capture, finite)
        write_zip(capture, partial, progress)
    return Done(out, 1)
