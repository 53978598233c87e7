# SPDX-License-Identifier: Apache-2.0
"""Writes the output file of a fit under a temporary name, so that no incomplete file has the final name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(out: Path, command: str) -> Iterator[Path]:
    """Yield a temporary path. It is renamed to `out` at the end of the `with` block, or removed after an exception.

    command: the command in error messages. Before the block, raises FileExistsError if `out` exists, FileNotFoundError
    if its directory does not exist, and OSError if the directory is not writable.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists; give a new name")
    if not out.parent.is_dir():
        raise FileNotFoundError(
            f"{command}: {out}: the directory {out.parent} does not exist; create it, or give another -o"
        )
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.touch()
        partial.unlink()  # a fit takes long; a killed fit must not leave an empty file
    except OSError as error:
        raise OSError(f"{command}: {out} cannot be written ({error.strerror}); give another -o") from error
    try:
        yield partial
        os.rename(partial, out)
    finally:
        partial.unlink(missing_ok=True)
