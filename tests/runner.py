# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners the engine tests run on.

TEST_RUNNER=V1 (the default here, as vLLM's own on a CPU), V2, or V2-async: with asynchronous scheduling, as on a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

RUNNER = os.environ.get("TEST_RUNNER", "V1")
V2 = RUNNER in ("V2", "V2-async")
INTERPRETED = str(Path(__file__).parent / "interpreted")


def choose() -> None:
    """Set the environment of this process and those it starts. Call it before anything imports Triton."""
    if RUNNER not in ("V1", "V2", "V2-async"):
        raise ValueError(f"TEST_RUNNER={RUNNER}: choose V1, V2 or V2-async")
    if V2:
        assert "triton" not in sys.modules, "Triton has looked for its backends already"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = os.environ["TRITON_INTERPRET"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (INTERPRETED, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, INTERPRETED)
