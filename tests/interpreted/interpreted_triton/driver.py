# SPDX-License-Identifier: Apache-2.0
"""The driver half of the backend, which names the device: the CPU."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from interpreted_triton.compiler import refuse


class InterpretedDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    map_python_to_cpp_type = get_benchmarker = refuse
