# SPDX-License-Identifier: Apache-2.0
"""Processes of a forked engine sleep while they wait for each other.

vLLM's spin: a reader of messages for a second after each one, ranks until the other one comes. With fewer cores than
processes they take the time of those that they wait for.
"""

from __future__ import annotations

import pytest

RECHECK_MS = 5
"""A reader that sleeps looks again after so long. ZeroMQ may drop the word that a message has come behind another one
that it has just sent, which does no harm while readers spin.
"""


def sleep_while_waiting(patch: pytest.MonkeyPatch) -> None:
    """For engines whose processes are forked from this one."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):  # of vLLM 0.32
        patch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", RECHECK_MS)
        assert shm_broadcast.SpinCondition.__init__.__defaults__ == (1,), "seconds that a reader spins"
        patch.setattr(shm_broadcast.SpinCondition.__init__, "__defaults__", (0,))
        # As where ranks do not share memory: torch's collectives, over sockets.
        patch.setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda _self: False)
