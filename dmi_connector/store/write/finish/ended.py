# SPDX-License-Identifier: Apache-2.0
"""Finds captures that ended lately, by the index of their directory. Their stores may be gone already."""

from __future__ import annotations

import os
import stat
import time

from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read.index_lines import LineTail


class EndedCaptures:
    """Follows the lines that are added to an index from now on."""

    def __init__(self, directory: str) -> None:
        self._directory = os.path.realpath(directory)
        self._tail = LineTail(self._directory, new_only=True)
        self._ended: dict[str, float] = {}  # by path of the store: when its end was read (seconds since the epoch)

    def of_last(self, seconds: float) -> list[str]:
        """Paths of the stores whose end was added to the index in the last `seconds`. Raises OSError.

        Earlier ends are forgotten.
        """
        moment = time.time()
        for line in self._tail.read() if self._is_file() else ():
            path = os.path.join(self._directory, line["store"])
            if line["event"] in ("finish", "abort"):
                self._ended[path] = moment
            elif line["event"] == "start":
                self._ended.pop(path, None)
        self._ended = {path: when for path, when in self._ended.items() if when > moment - seconds}
        return list(self._ended)

    def _is_file(self) -> bool:
        """Whether the index exists and is a regular file, not a link or a pipe in its place."""
        try:
            return stat.S_ISREG(os.lstat(os.path.join(self._directory, INDEX_NAME)).st_mode)
        except FileNotFoundError:
            return False
