# SPDX-License-Identifier: Apache-2.0
"""Makes the processes of a forked engine sleep while they wait for each other.

vLLM's processes spin: a reader for a second after each message, and a rank until the other ranks arrive. With fewer
cores than processes, they take CPU time from the processes that they wait for.
"""

from __future__ import annotations

import pytest

RECHECK_MS = 5
"""Milliseconds between two polls of a sleeping reader. ZeroMQ may drop a notification that follows another one at once.
While readers spin, this does no harm.
"""


def sleep_while_waiting(patch: pytest.MonkeyPatch) -> None:
    """Call this in the process that forks an engine's processes."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):  # vLLM 0.32 and later
        patch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", RECHECK_MS)
        assert shm_broadcast.SpinCondition.__init__.__defaults__ == (1,), (
            "the default must be the seconds that a reader spins"
        )
        patch.setattr(shm_broadcast.SpinCondition.__init__, "__defaults__", (0,))
        # Use torch's collectives over sockets, as if the ranks did not share memory.
        patch.setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda _self: False)
