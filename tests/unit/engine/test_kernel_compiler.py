# SPDX-License-Identifier: Apache-2.0
"""Triton's compiler accepts the kernels for old and new GPUs. Other tests run them in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

SPECS = ("int8", "int8(affine)", "int8(32)", "fp8", "round(3)", "topk(8)", "topk(5,exact,sample=9)")
PROGRAM = """
import os
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dmi_connector.engine.kernels.launch import Launch
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.reduce import parse


class Driver:
    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):  # a number of its own: Triton keeps compiled kernels by device
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


def compile_only(self, grid, tensors, integers, values=(), strides=(), free=()):
    end = [tuple(strides)] if values else []
    given = [*tensors, *([tuple(values)] if values else []), *free, *integers, *end]
    kernel = self._kernel.warmup(*given, *self._fixed, grid=grid, **self._options)
    assert kernel.asm["cubin"]


Launch.__call__ = compile_only
rows, slots = torch.zeros(2, 4096, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
for argument in sys.argv[2:]:
    capability, spec = argument.split(":")
    driver.set_active(Driver(int(capability)))
    os.environ["TRITON_CACHE_DIR"] = f"{sys.argv[1]}/{capability}"
    reduction = None if spec == "none" else parse(spec)
    writer = RowWriter([200], torch.bfloat16, [64], [reduction])
    writer.in_triton(rows, slots, [torch.zeros(3, 200, dtype=torch.bfloat16)])
    print(argument)
"""
OLD, NEW = 80, 90
"""Capabilities: 8.0 is that of an A100, 9.0 of an H100."""
KERNELS = [*(f"{OLD}:{spec}" for spec in ("none", *SPECS)), f"{NEW}:fp8"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(folder of the compiled kernels by capability, what the compiler's process printed: a line per kernel)."""
    root, folder = str(Path(__file__).parents[3]), tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": root}
    command = [sys.executable, "-c", PROGRAM, str(folder), *KERNELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout.splitlines()


def test_every_kernel_of_reductions_compiles_for_an_old_gpu(compiled: tuple[Path, list[str]]) -> None:
    folder, printed = compiled
    assert printed == KERNELS
    found = machine_code(folder / f"{OLD}")
    assert ".target sm_80" in found and "e4m3" not in found


def test_a_gpu_that_has_e4m3_converts_to_it(compiled: tuple[Path, list[str]]) -> None:
    """The instruction takes fewer operations than integers."""
    folder, _ = compiled
    assert "e4m3" in machine_code(folder / f"{NEW}")


def machine_code(folder: Path) -> str:
    """The PTX of all compiled kernels."""
    return "".join(path.read_text() for path in folder.rglob("*.ptx"))
