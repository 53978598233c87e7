# SPDX-License-Identifier: Apache-2.0
"""Checks for Linux, which capturing, repairing and removing stores need. Reading stores does not."""

from __future__ import annotations

import os
import sys
from importlib import import_module

_MODULES = ("fcntl", "resource")
_FUNCTIONS = ("fork", "memfd_create", "pread", "preadv", "register_at_fork", "sched_getaffinity", "statvfs")
"""Functions of `os` that writing stores needs."""


class NeedsLinux(OSError):
    """Raised for a call that needs Linux, on another system."""


def _has(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def check_linux(what: str) -> None:
    """Raise NeedsLinux if the system lacks functions that writing stores needs. what: subject of the message."""
    lacking = [name for name in _MODULES if not _has(name)]
    lacking += [f"os.{name}" for name in _FUNCTIONS if not hasattr(os, name)]
    if sys.platform != "linux" or lacking:
        without = f" (no {', '.join(lacking)})" if lacking else ""
        raise NeedsLinux(f"{what} needs Linux{without}; here stores can be read, exported, plotted and viewed")
