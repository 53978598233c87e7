# SPDX-License-Identifier: Apache-2.0
"""An extension of vLLM's workers, which lets them run gated delta nets in float32 (`delta_cpu`).

vLLM imports it in each worker process (`worker_extension_cls`), whether the process is forked or spawned.
"""

import pytest

from tests.engine import delta_cpu

delta_cpu.stand_in(pytest.MonkeyPatch())


class Extension:
    """Adds nothing to the worker: importing its module is enough."""
