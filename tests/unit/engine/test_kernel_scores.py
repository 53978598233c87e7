# SPDX-License-Identifier: Apache-2.0
"""Scores in host memory: the kernel that copies them, and processes that share the memory."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.host_scores import KEPT_STEPS, HostScores, open_scores
from dmi_connector.engine.kernels import scores as kernel
from dmi_connector.engine.kernels.scores import CopyScores
from tests import kernelkit as kit
from tests import runner

SLOTS = 50


def memory(values: int) -> torch.Tensor:
    """Pinned lines in host memory, which a kernel writes directly."""
    return torch.full((SLOTS, values), 7, dtype=torch.int32, pin_memory=runner.GPU)


@pytest.mark.parametrize("most", [64, 2])
@pytest.mark.parametrize("places", [[4], [4, 5, 6], [20, 3, 4, 5, 11]], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_scores_of_a_step_come_to_the_lines_of_their_slots(
    monkeypatch: pytest.MonkeyPatch, places: list[int], most: int, tokens: int
) -> None:
    """most: scores per program. Lines of other slots do not change. The torch twin gives the same."""
    monkeypatch.setattr(kernel, "_BLOCK", most)
    rng = np.random.default_rng(tokens)
    rows = torch.randn(kit.ROWS, 32, device=kit.DEVICE)
    row_slots, slots = rng.permutation(kit.ROWS)[:tokens], rng.permutation(SLOTS)[:tokens]
    row_slots[tokens // 3 : tokens // 2] = -1  # tokens without a row
    slots[tokens // 2 : tokens // 2 + 2 * (tokens > 1)] = -1  # padding
    given = [torch.from_numpy(each).to(kit.DEVICE) for each in (np.append(row_slots, [3, 4]), slots)]
    copy, lines = CopyScores(torch.tensor(places, device=kit.DEVICE)), memory(len(places))
    copy.in_triton(rows.view(torch.uint8), *given, lines)
    if runner.GPU:
        torch.cuda.synchronize()
    want = np.full((SLOTS, len(places)), 7, np.int32)
    for row, slot in zip(row_slots, slots, strict=True):
        if row >= 0 and slot >= 0:
            want[slot] = rows.cpu().numpy().view(np.int32)[row, places]
    np.testing.assert_array_equal(lines.numpy(), want)
    twin, lines = CopyScores(torch.tensor(places)), memory(len(places))
    twin.in_torch(rows.cpu().view(torch.uint8), *(each.cpu() for each in given), lines)
    np.testing.assert_array_equal(lines.numpy(), want)


def host_scores() -> tuple[HostScores, np.ndarray]:
    """Scores of two fields for all slots. Returns the object and the expected values."""
    layout: Any = SimpleNamespace(
        scored=[SimpleNamespace(offset=at, stored=(2, 2)) for at in (80, 64)], row_bytes=kit.ROWS * 4
    )
    scores = HostScores(layout, SLOTS, 5, kit.DEVICE)
    rows = torch.randn(SLOTS, 32, device=kit.DEVICE)
    every = torch.arange(SLOTS, device=kit.DEVICE)
    scores.copy(rows.view(torch.uint8), every, every)
    if runner.GPU:
        torch.cuda.synchronize()
    return scores, rows.cpu().numpy()[:, [20, 21, 16, 17]]


def read_line(path: str, found: Any) -> None:
    found.put(open_scores(path, 4)[7].tolist())


def test_another_process_reads_the_lines_in_place() -> None:
    """It opens them by their path. It is forked, because one that imports vLLM takes seconds to start."""
    scores, want = host_scores()
    lines = open_scores(scores.path, 4)
    assert lines.shape == (SLOTS + 5 * KEPT_STEPS, 4) and not lines.flags.writeable
    np.testing.assert_array_equal(lines[:SLOTS], want)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=read_line, args=(scores.path, found))
    process.start()
    process.join()
    assert process.exitcode == 0 and found.get() == want[7].tolist()
    scores.close()
    scores.close()
    np.testing.assert_array_equal(lines[:SLOTS], want, "memory that is in use stays")


def test_lines_are_copied_to_kept_ones() -> None:
    scores, want = host_scores()
    scores.keep(np.array([3, 49, 0]), SLOTS + 2)
    if runner.GPU:
        torch.cuda.synchronize()
    np.testing.assert_array_equal(open_scores(scores.path, 4)[SLOTS + 2 : SLOTS + 5], want[[3, 49, 0]])
    scores.close()


def test_memory_is_registered_with_a_gpu_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    register = lambda *given: calls.append(given) or answers.pop()  # noqa: E731
    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append((address,)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    scores, _ = host_scores()
    address, answers = scores._lines.data_ptr(), [2, 0]
    scores._register(1040)
    scores.close()
    scores.close()
    assert calls == [(address, 1040, 2), (address,)], "the memory must be mapped, because kernels write it directly"
    with pytest.raises(RuntimeError, match=r"probes: 1040 bytes .* be registered with the GPU \(2\); capture"):
        scores._register(1040)


def test_memory_of_another_host_is_refused(tmp_path: Path) -> None:
    """The path there has no memory, or other memory."""
    other = tmp_path / "other"
    other.symlink_to("/dev/null")
    scores, _ = host_scores()
    mine = scores.path.rpartition(":")[0]
    for path in (str(other), "/proc/1/fd/99999", str(tmp_path / "none"), mine):
        with pytest.raises(ValueError, match=re.escape(f"cannot read the scores of a worker at {path} (")):
            open_scores(f"{path}:dmi-scores-1", 4)
