# SPDX-License-Identifier: Apache-2.0
"""Triton's compiler accepts the kernels for old and new GPUs. Other tests run them in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

SPECS = ("int8", "int8(affine)", "int8(32)", "fp8", "round(3)", "topk(8)", "topk(5,exact,sample=9)")
PROGRAM = """
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dmi_connector.engine.kernels.launch import Launch
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.reduce import parse


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)


def compile_only(self, grid, tensors, integers, values=(), strides=(), free=()):
    end = [tuple(strides)] if values else []
    given = [*tensors, *([tuple(values)] if values else []), *free, *integers, *end]
    kernel = self._kernel.warmup(*given, *self._fixed, grid=grid, **self._options)
    assert kernel.asm["cubin"]


driver.set_active(Driver())
Launch.__call__ = compile_only
rows, slots = torch.zeros(2, 4096, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
for spec in ["none", *sys.argv[2:]]:
    reduction = None if spec == "none" else parse(spec)
    writer = RowWriter([200], torch.bfloat16, [64], [reduction])
    writer.in_triton(rows, slots, [torch.zeros(3, 200, dtype=torch.bfloat16)])
    print(spec)
"""


def compiled(folder: Path, capability: int, specs: Sequence[str]) -> str:
    """Compile the kernels of these reductions. Returns what the compiler's process printed: a line per reduction."""
    root = str(Path(__file__).parents[3])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": root, "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", PROGRAM, str(capability), *specs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_kernel_of_reductions_compiles_for_an_old_gpu(tmp_path: Path) -> None:
    """The capability 8.0 is that of an A100."""
    assert compiled(tmp_path, 80, SPECS).split("\n") == ["none", *SPECS, ""]
    assert "e4m3" not in machine_code(tmp_path)


def test_a_gpu_that_has_e4m3_converts_to_it(tmp_path: Path) -> None:
    """The capability 9.0 is that of an H100. The instruction takes fewer operations than integers."""
    compiled(tmp_path, 90, ["fp8"])
    assert "e4m3" in machine_code(tmp_path)


def machine_code(folder: Path) -> str:
    """The PTX of all compiled kernels."""
    return "".join(path.read_text() for path in folder.rglob("*.ptx"))
