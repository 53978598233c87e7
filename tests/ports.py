# SPDX-License-Identifier: Apache-2.0
"""Ports for servers, which bind theirs long after it was chosen."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

_numbers = count(os.getpid() * 101)


def free_port() -> int:
    """A free port that nobody is given by the system meanwhile: below those it gives to whoever asks for any."""
    while True:
        port = 20000 + next(_numbers) % 10000
        with socket.socket() as probe, suppress(OSError):  # somebody has it
            probe.bind(("127.0.0.1", port))
            return port
