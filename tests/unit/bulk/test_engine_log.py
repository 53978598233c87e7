# SPDX-License-Identifier: Apache-2.0
"""Why an engine ended, from its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmi_connector.bulk.engine_log import cause

VLLM = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
PLACE = "(EngineCore pid=1) (Worker pid=2) ERROR 11-26 18:50:22 [multiproc_executor.py:953] "
NOISE = [
    "Traceback (most recent call last):",
    '    raise OptionError(f"flags of vLLM: {message}")',
    PLACE + "Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause.",
    "INFO 11-26 18:50:22 [core.py:1] the last ValueError: of a sentence",
    VLLM,
]
OURS = "dmi_connector.hooks.SelectionError: hooks: 'resid_pree' is unknown"


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ([PLACE + OURS, *NOISE], "SelectionError: hooks: 'resid_pree' is unknown"),
        ([OURS, "ValueError: later, and not ours", *NOISE], "SelectionError: hooks: 'resid_pree' is unknown"),
        (["dmi_connector.settings.OptionError: first", OURS, *NOISE], "SelectionError: hooks: 'resid_pree' is unknown"),
        (["KeyError: 'a'", PLACE + "torch.OutOfMemoryError: no memory", *NOISE], "OutOfMemoryError: no memory"),
        (NOISE, VLLM),
    ],
)
def test_the_cause_is_the_last_error_that_points_to_no_other(lines: list[str], want: str, tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    earlier = "dmi_connector.settings.OptionError: of an earlier start\n"
    log.write_text(earlier + "\n".join(lines))
    assert cause(VLLM, log, len(earlier)) == want
    assert cause("OptionError: flags of vLLM: x", log, len(earlier)) == "OptionError: flags of vLLM: x"
    assert cause("it died (signal 9)", log, len(earlier)) == "it died (signal 9)"


def test_a_log_that_is_not_there_or_shorter_than_before_tells_nothing(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert cause(VLLM, log, 0) == VLLM
    log.write_text(OURS)
    assert cause(VLLM, log, 10**6) == VLLM
