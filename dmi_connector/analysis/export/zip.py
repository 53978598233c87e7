# SPDX-License-Identifier: Apache-2.0
"""Export of stores to one zip file each. The files in it are those of the store, byte by byte, and not compressed."""

from __future__ import annotations

import zipfile
from pathlib import Path

from dmi_connector.analysis.export.progress import Done, Progress, export_by_name, refuse_existing, whole
from dmi_connector.store.format.paths import leaves_store
from dmi_connector.store.read.capture import Capture
from dmi_connector.store.read.captures import Captures

_TIME = (1980, 1, 1, 0, 0, 0)
"""Of every entry, so that one store always gives the same file."""


def write_zip(capture: Capture, path: Path) -> None:
    """Write the files that a store lists, with `zarr.json` at the top: Zarr's layout of a zip file.

    Readers find each file by its offset, so chunks are read from the zip file as from a directory.
    """
    names = ["zarr.json", *sorted(capture.attrs["files"])]
    outside = next((name for name in names if leaves_store(name)), None)
    if outside is not None:
        raise ValueError(f"{capture.path} lists the file {outside!r}, which lies outside it: dmi verify says more")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.file_size = capture.files.size(name) or 0
            with archive.open(entry, "w") as out:
                for block in capture.files.blocks(name):
                    out.write(block)


def export(captures: Captures, out: Path, progress: Progress) -> Done:
    """Write `NAME.zip` for each store, in the directory `out`."""
    return export_by_name(captures, out, ".zip", write_zip, progress, {"to": "zip"})


def export_file(captures: Captures, out: Path, progress: Progress) -> Done:
    """Write the one store of `captures` as the file `out`, which must be new."""
    refuse_existing(out)
    with captures[0] as capture, whole(out) as partial:
        write_zip(capture, partial)
    progress(1, 1)
    return Done(out, 1)
