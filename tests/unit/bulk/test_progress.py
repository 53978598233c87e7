# SPDX-License-Identifier: Apache-2.0
"""The progress bar of `dmi run` on terminals of all widths."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from dmi_connector.bulk.progress import Counts, Progress, Speed
from dmi_connector.cli import demo
from dmi_connector.wording import terminal_columns

COUNTS = Counts(total=1_000_000, done=123_456, before=0, tokens=10**9, bytes=10**12, engine=64, backlog=1234)
SPEED = Speed(123_456, 1.234e9, 360_000)


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, int]]:
    """(file that is a terminal, descriptor to read its output). columns: its width; 0: it reports no size."""
    screen, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with os.fdopen(own, "w", buffering=1) as file:
        yield file, screen
    os.close(screen)


def last_line(file: TextIO, screen: int) -> str:
    """The line that the terminal shows now."""
    file.write("END")
    file.flush()
    text = ""
    while not text.endswith("END"):
        text += os.read(screen, 1 << 16).decode()
    return text.removesuffix("END").split("\r")[-1]


def shown(columns: int, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last line that a bar shows."""
    with terminal(columns) as (file, screen):
        progress = Progress(False, file)
        monkeypatch.setattr(progress._meter, "look", lambda _counts: SPEED)
        progress.show(counts, force=True)
        text = last_line(file, screen)
        progress.close()
    return text


@pytest.mark.parametrize(
    ("columns", "has", "has_not"),
    [
        (200, ["| 123456/1000000 stored, 123456 tokens/s, 1.2 GB/s, backlog 1234, 100:00:00 left"], []),
        (100, ["%|", "123456 tokens/s, 1.2 GB/s, backlog 1234, 100:00:00 left"], []),
        (80, ["12%", "123456/1000000 stored, 123456 tokens/s, backlog 1234, 100:00:00 left"], ["|", "GB/s"]),
        (0, ["12%", "123456/1000000 stored, 123456 tokens/s, backlog 1234, 100:00:00 left"], ["|", "GB/s"]),
        (60, ["12%", "123456/1000000 stored, backlog 1234, 100:00:00 left"], ["tokens/s"]),
        (40, ["12%", "backlog 1234, 100:00:00 left"], ["stored"]),
    ],
)
def test_backlog_and_time_left_are_on_every_terminal(
    columns: int, has: list[str], has_not: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = shown(columns, COUNTS, monkeypatch).replace("% |", "%|")
    assert len(line) < (columns or 80), "a line must not wrap, because each refresh would leave a copy"
    assert all(words in line for words in has) and not any(words in line for words in has_not), line


def test_problems_are_shown_before_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(total=10_000, done=123, rejected=2, failed=3, waiting="the disk is full", backlog=4)
    line = shown(80, counts, monkeypatch)
    assert "backlog 4, 100:00:00 left, 2 bad rows, 3 failed" in line and "tokens/s" not in line, line
    assert "waiting: the disk is full" in shown(100, counts, monkeypatch)


def test_the_demo_shows_its_steps_at_80_columns_and_where_no_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for columns in (0, 80):
        with terminal(columns) as (file, screen):
            own = os.open(os.ttyname(file.fileno()), os.O_WRONLY)
            monkeypatch.setattr(os, "dup", lambda _two, own=own: own)
            progress = demo.Progress(6)
            progress.bar.set_description_str("opening and verifying the stores")
            text = last_line(progress.file, screen)
            progress.close()
        assert re.search(r"opening and verifying the stores   0% \|.*\| step 0 of 6 \[00:0\d\]", text), text
        assert len(text) < 80


def test_a_file_that_is_not_a_terminal_has_the_columns_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    with open(os.devnull, "w") as file:
        assert terminal_columns(file) == 123
    with terminal(77) as (file, _):
        assert terminal_columns(file) == 77
