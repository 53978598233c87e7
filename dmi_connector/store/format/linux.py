# SPDX-License-Identifier: Apache-2.0
"""What captures, repairs and removes stores needs Linux. What reads them does not."""

from __future__ import annotations

import os
import sys
from importlib import import_module

_MODULES = ("fcntl", "resource")
_FUNCTIONS = ("fork", "memfd_create", "pread", "preadv", "register_at_fork", "sched_getaffinity", "statvfs")
"""Functions of `os` that capture needs."""


class NeedsLinux(OSError):
    """A call that needs Linux was made on another system."""


def _has(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def check_linux(what: str) -> None:
    """Raise NeedsLinux where the system lacks what writers of stores use. what: subject of the error's sentence."""
    lacking = [name for name in _MODULES if not _has(name)]
    lacking += [f"os.{name}" for name in _FUNCTIONS if not hasattr(os, name)]
    if sys.platform != "linux" or lacking:
        without = f" (no {', '.join(lacking)})" if lacking else ""
        raise NeedsLinux(f"{what} needs Linux{without}; here stores can be read, exported, plotted and viewed")
