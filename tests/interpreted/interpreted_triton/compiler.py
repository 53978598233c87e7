# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend, which Triton requires and the interpreter never calls."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


def refuse(*_: Any) -> NoReturn:
    raise RuntimeError("this Triton backend only interprets: set TRITON_INTERPRET=1")


class InterpretedBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    hash = parse_options = add_stages = load_dialects = get_module_map = refuse
