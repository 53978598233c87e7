# SPDX-License-Identifier: Apache-2.0
"""A file that a fit writes: it is there whole or not at all, and replaces nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(out: Path, command: str) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `out` at the end. Raises OSError first if it cannot be created.

    command: what errors name.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists; give a new name")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{command}: {out}: there is no directory {out.parent}; create it or give another -o")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.touch()
        partial.unlink()  # a fit takes long; if it is killed, no empty file is left
    except OSError as error:
        raise OSError(f"{command}: {out} cannot be written ({error.strerror}); give another -o") from error
    try:
        yield partial
        os.rename(partial, out)
    finally:
        partial.unlink(missing_ok=True)
