# SPDX-License-Identifier: Apache-2.0
"""Finds the cause of an engine's death in its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmi_connector.bulk.engine_log import cause
from dmi_connector.bulk.engines import Death, Engine, EnginePool

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
        (
            ["dmi_connector.option_values.OptionError: first", OURS, *NOISE],
            "SelectionError: hooks: 'resid_pree' is unknown",
        ),
        (["KeyError: 'a'", PLACE + "torch.OutOfMemoryError: no memory", *NOISE], "OutOfMemoryError: no memory"),
        (NOISE, VLLM),
    ],
)
def test_the_cause_is_the_last_error_without_a_reference_to_another(
    lines: list[str], want: str, tmp_path: Path
) -> None:
    log = tmp_path / "engine-0.log"
    earlier = "dmi_connector.option_values.OptionError: of an earlier start\n"
    log.write_text(earlier + "\n".join(lines))
    assert cause(VLLM, log, len(earlier)) == want
    assert cause("OptionError: flags of vLLM: x", log, len(earlier)) == "OptionError: flags of vLLM: x"
    assert cause("it died (signal 9)", log, len(earlier)) == "it died (signal 9)"


def test_a_missing_or_truncated_log_gives_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert cause(VLLM, log, 0) == VLLM
    log.write_text(OURS)
    assert cause(VLLM, log, 10**6) == VLLM


def test_bytes_that_are_not_text_do_not_hide_the_cause(tmp_path: Path) -> None:
    """The part of the log that is read may begin inside a character."""
    log = tmp_path / "engine-0.log"
    log.write_bytes("…".encode()[1:] + b"\xff\n" + OURS.encode() + b"\n")
    assert cause(VLLM, log, 0) == "SelectionError: hooks: 'resid_pree' is unknown"


class Process:
    """A fake engine process."""

    status: int | None = 1

    def post(self, message: Any) -> None: ...

    def finish(self) -> None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float) -> bool:
        return True


class Pool(EnginePool):
    """A pool with one engine per log."""

    def __init__(self, logs: list[Path]) -> None:
        super().__init__()
        self.logs, self.children = logs, [Process() for _ in logs]

    def _begin(self) -> list[Engine]:
        pairs = zip(self.children, self.logs, strict=True)
        return [Engine(child, log.stem, log, logged=log.stat().st_size) for child, log in pairs]


def test_a_pool_tells_which_engines_start_and_why_one_did_not(tmp_path: Path) -> None:
    logs = [tmp_path / "engine-0.log", tmp_path / "engine-1.log"]
    for log in logs:
        log.write_text("dmi_connector.option_values.OptionError: of an earlier start\n")
    pool = Pool(logs)
    assert pool.starting() == []
    pool.start()
    assert pool.starting() == logs
    with open(logs[0], "a") as file:
        file.write(PLACE + OURS + "\n")
    pool._on_message(pool.children[0], {"failed": VLLM})
    pool._on_death(pool.children[0], "exit status 1")
    how = f"SelectionError: hooks: 'resid_pree' is unknown; its log: {logs[0]}"
    assert pool.events(0) == [Death("engine-0", how, (), began=False)]
    assert pool.starting() == logs[1:]
    pool._on_message(pool.children[1], {"ready": 1, "max_num_seqs": 4})
    assert pool.events(0) == [] and pool.starting() == []
    pool._on_death(pool.children[1], "signal 9")
    assert pool.events(0) == [Death("engine-1", f"it died (signal 9); its log: {logs[1]}", ())]


def test_engines_that_are_told_to_end_start_no_more(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").touch()
    pool = Pool([tmp_path / "engine-0.log"])
    pool.start()
    pool.finish()
    assert pool.starting() == []
