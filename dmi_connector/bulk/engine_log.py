# SPDX-License-Identifier: Apache-2.0
"""Finds in the log of an engine why it ended: vLLM's last error often only says that another is above."""

from __future__ import annotations

import re
from pathlib import Path

from dmi_connector import __name__ as PACKAGE

_POINTS_ELSEWHERE = "root cause"
"""Words of vLLM's errors that only point to another one."""
_TAIL = 1 << 20
"""Bytes of the end of a log that are searched."""
_LONGEST = 2000
"""Characters of an error that are shown."""
_ERROR = re.compile(
    r"(?:\([^)]*\) )*(?:[A-Z]+ \d\S* \S+ \[[^\]]*\] )?"  # the process, vLLM's level, time and place in its code
    r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)): (.*\S)"
)


def cause(failure: str, log: Path, since: int) -> str:
    """What an engine failed with. failure: what it said itself, which may be all that is known.

    log: its log. since: bytes that were in it before the engine. The last error of ours is taken, else the last of all.
    """
    if _POINTS_ELSEWHERE not in failure:
        return failure
    ours, other = None, None
    for line in _lines(log, since):
        match = _ERROR.fullmatch(line)
        if match is None or _POINTS_ELSEWHERE in line:
            continue
        *packages, name = match[1].split(".")
        text = f"{name}: {match[2]}"[:_LONGEST]
        if packages[:1] == [PACKAGE]:
            ours = text
        else:
            other = text
    return ours or other or failure


def _lines(log: Path, since: int) -> list[str]:
    """The last lines after byte `since`; [] if there is no log."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(min(since, size), size - _TAIL))
        return file.read().decode(errors="replace").splitlines()
