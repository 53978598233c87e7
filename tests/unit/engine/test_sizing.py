# SPDX-License-Identifier: Apache-2.0
"""What the log says at start of steps in which capture costs more than it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode

from dmi_connector.engine import sizing


def config(mode: CUDAGraphMode, largest: int, device: str = "cuda", eager: bool = False, batch: int = 8192) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=largest),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batch),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config(CUDAGraphMode.FULL, 512), ""),
        (config(CUDAGraphMode.FULL, 128), "CUDA graphs end at 128 tokens"),
        (config(CUDAGraphMode.FULL, 128, batch=128), ""),
        (config(CUDAGraphMode.FULL_AND_PIECEWISE, 512), "cudagraph_mode is FULL_AND_PIECEWISE"),
        (config(CUDAGraphMode.PIECEWISE, 512), "cudagraph_mode is PIECEWISE"),
        (config(CUDAGraphMode.NONE, 0), "cudagraph_mode is NONE"),
        (config(CUDAGraphMode.NONE, 0, device="cpu"), ""),
        (config(CUDAGraphMode.NONE, 0, eager=True), ""),
    ],
)
def test_the_log_names_steps_that_run_in_pieces(given: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(sizing.logger, "info", lambda text, *values: lines.append(text % values))
    sizing.announce_graphs(given)
    assert len(lines) == bool(said) and all(said in line for line in lines)
