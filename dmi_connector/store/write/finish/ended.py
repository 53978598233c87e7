# SPDX-License-Identifier: Apache-2.0
"""Lists captures that ended recently, from the index of their directory. Their stores may be removed already."""

from __future__ import annotations

import os
import stat
import time

from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read.index_lines import LineTail


class EndedCaptures:
    """Follows the lines that are appended to the index of a directory after this object was created."""

    def __init__(self, directory: str) -> None:
        self._directory = os.path.realpath(directory)
        self._tail = LineTail(self._directory, new_only=True)
        self._ended: dict[str, float] = {}  # path of a store -> when its end was read (seconds since the epoch)

    def of_last(self, seconds: float) -> list[str]:
        """Final paths of the stores whose end was read from the index in the last `seconds` seconds.

        Each call reads the new lines. A store whose capture has started again is left out. Earlier ends are forgotten,
        so a later call with larger `seconds` does not return them. Raises OSError if the index cannot be read.
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
        """Whether the index exists and is a regular file. A link is not followed, and opening a pipe would block."""
        try:
            return stat.S_ISREG(os.lstat(os.path.join(self._directory, INDEX_NAME)).st_mode)
        except FileNotFoundError:
            return False
