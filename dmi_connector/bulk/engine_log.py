# SPDX-License-Identifier: Apache-2.0
"""Finds the cause of an engine's failure in its log. The last error of vLLM often only refers to an earlier one."""

from __future__ import annotations

import re
from pathlib import Path

from dmi_connector import __name__ as PACKAGE

_POINTS_ELSEWHERE = "root cause"
"""Words in errors of vLLM that only refer to an earlier error."""
_TAIL = 1 << 20
"""Bytes to search at the end of a log."""
_LONGEST = 2000
"""Maximum characters of a shown error."""
_ERROR = re.compile(
    r"(?:\([^)]*\) )*(?:[A-Z]+ \d\S* \S+ \[[^\]]*\] )?"  # the process, vLLM's level, time and place in its code
    r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)): (.*\S)"
)


def cause(failure: str, log: Path, since: int) -> str:
    """Why an engine failed.

    failure: the reason that the engine reported. If it only refers to an earlier error, the log is searched. The result
    is then the last error of this package in the log, else the last error of all, else `failure`. log: path of the
    engine's log. since: size of the log before the engine started, in bytes.
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
    """The lines after byte `since`, from the last _TAIL bytes; [] if there is no log."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(min(since, size), size - _TAIL))
        return file.read().decode(errors="replace").splitlines()
