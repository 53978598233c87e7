# SPDX-License-Identifier: Apache-2.0
"""Holds scores of probes in host memory that the workers and the scheduler share. A line is the scores of one slot.

    worker      the last op of each forward copies the scores of its tokens to the lines of their slots, on the engine's
                stream, as part of the CUDA graph (taps/op.py, kernels/scores.py)
    scheduler   finds the lines of a request by its blocks, and reads them when the request ends, loses its blocks or
                has a `stop_if` (scheduler/scores.py)

No message carries scores, and no process waits for them. The copies come before the sampled tokens on the stream. So
the copies are complete once the sampled tokens of the step are on the host. The same is true of other ranks, because
sampling needs the logits of each rank.

With any owner of rows, a line belongs to a slot of a cache group with full attention. vLLM keeps these slots of a
request until the request ends or is preempted, which is longer than a pool keeps its rows. After the lines of the
cache's slots come additional lines, for pending scores of preempted requests.
"""

from __future__ import annotations

import mmap
import os
import uuid

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.layout import RowLayout

logger = init_logger("vllm.dmi_connector")

KEPT_STEPS = 3
"""Number of steps with their own additional lines: the planned step, the step in flight, and the step that has ended.
"""
_NAME = "dmi-scores"
_MAPPED = 2
"""cudaHostRegisterMapped: kernels read and write the memory in place."""


class HostScores:
    """The scores of one rank.

    layout: layout of the rank's rows. slots: number of slots of vLLM's cache. step_tokens: maximum number of tokens per
    step, which is the number of additional lines of a step; 0 for no additional lines. device: device of the rows.
    Raises RuntimeError if the memory cannot be registered with the driver of a GPU.
    """

    def __init__(self, layout: RowLayout, slots: int, step_tokens: int, device: torch.device) -> None:
        from dmi_connector.engine.kernels.scores import CopyScores

        places = [f.offset // 4 + i for f in layout.scored for i in range(f.stored[1])]
        self.slots, lines = slots, slots + KEPT_STEPS * step_tokens
        nbytes = lines * len(places) * 4
        self._name = f"{_NAME}-{uuid.uuid4().hex}"
        self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.ftruncate(self._file, nbytes)
        self._memory = mmap.mmap(self._file, nbytes)
        self._lines = torch.frombuffer(self._memory, dtype=torch.int32).view(lines, len(places))
        self._copy = CopyScores(torch.tensor(places, dtype=torch.int64, device=device))
        self._copy_line = CopyScores(torch.arange(len(places), device=device))
        self._device = device
        self._registered = 0
        if device.type == "cuda":
            self._register(nbytes)
            none = torch.full((1,), -1, dtype=torch.int64, device=device)
            row = torch.zeros(1, layout.row_bytes, dtype=torch.uint8, device=device)
            self._copy(row, none, none, self._lines)  # compile now, because a graph capture cannot
            if step_tokens:
                self._copy_line.in_triton(self._lines.view(torch.uint8), none, none, self._lines)
        logger.info("dmi_connector: %.1f MiB of the host's memory for scores of probes", nbytes / (1 << 20))

    @property
    def path(self) -> str:
        """Where processes of the same user on this host open the memory: a path, a colon, and the name of the memory.

        The name is unique, so that `open_scores` on another host detects another file at the same path.
        """
        return f"/proc/{os.getpid()}/fd/{self._file}:{self._name}"

    def _register(self, nbytes: int) -> None:
        address = self._lines.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, _MAPPED)
        if int(error) != 0:
            raise RuntimeError(
                f"probes: {nbytes} bytes of the host's memory for their scores could not be registered with the GPU "
                f"({error}); capture fewer probes or layers of them, or give vLLM a smaller cache "
                "(kv_cache_memory_bytes)"
            )
        self._registered = address

    def copy(self, rows: torch.Tensor, row_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the scores of a forward.

        rows: uint8 [rows, row_bytes]. row_slots: int64 [>= tokens], the slot of each token's row, negative if it has
        none. slots: int64 [tokens], slots of vLLM's cache, negative for padding.
        """
        self._copy(rows, row_slots, slots, self._lines)

    def keep(self, slots: np.ndarray, line: int) -> None:
        """Copy the lines of `slots`, int64 [count], to `count` lines from `line` on. A forward may then reuse slots."""
        where = torch.from_numpy(slots).to(self._device)
        there = torch.arange(line, line + len(slots), device=self._device)
        copy = self._copy_line.in_triton if self._registered else self._copy_line.in_torch
        copy(self._lines.view(torch.uint8), where, there, self._lines)

    def close(self) -> None:
        """Free the memory. No forward may follow."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_scores(path: str, values: int) -> np.ndarray:
    """The lines of another process, float32 [slots, values], read-only.

    path: `HostScores.path`. Raises ValueError if the memory cannot be opened, for example on another host.
    """
    path, _, name = path.rpartition(":")
    try:
        if os.readlink(path).split()[0] != f"/memfd:{name}":
            raise FileNotFoundError(f"another file than {name}")
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ValueError(
            f"probes: the scheduler cannot read the scores of a worker at {path} ({error}); scores in responses, "
            "keep_if, stop_if and probe_alerts need all ranks on the scheduler's host, as the same user. Run one host "
            "per engine, or leave probes out"
        ) from error
    try:
        memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.float32).reshape(-1, values)
