# SPDX-License-Identifier: Apache-2.0
"""Kills a process when its parent exits, so that no process of vLLM's engine outlives a killed `dmi run`."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when the thread that started it ends. Linux only, see prctl(2).

    parent: pid of the process that started this one. If the parent has already exited, this process exits at once.
    Raises OSError if prctl fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: the process cannot be tied to its parent: {os.strerror(number)}")
    if os.getppid() != parent:
        os._exit(1)


def end_forks_with_this() -> None:
    """Have every process that this process forks, directly or indirectly, call `end_with_parent`.

    Processes that vLLM spawns need no such call: they load vLLM's plugins, and our plugin calls `end_with_parent`.
    Forked processes do not load plugins again.
    """
    forks = 0

    def before() -> None:
        nonlocal forks
        forks = os.getpid()

    os.register_at_fork(before=before, after_in_child=lambda: end_with_parent(forks))
