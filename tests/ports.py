# SPDX-License-Identifier: Apache-2.0
"""Chooses ports for servers that bind them later."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

_numbers = count(os.getpid() * 101)


def free_port() -> int:
    """A free port below the kernel's ephemeral range, so that the kernel gives it to no other process meanwhile."""
    while True:
        port = 20000 + next(_numbers) % 10000
        with socket.socket() as probe, suppress(OSError):  # the port is in use
            probe.bind(("127.0.0.1", port))
            return port
