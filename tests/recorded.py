# SPDX-License-Identifier: Apache-2.0
"""Expected results in tests/data, which reveal changes. RECORDED=write in the environment writes them again.

    RECORDED=write .venv/bin/python -m pytest tests/unit/analysis -k "plot or family"

Check the changes of the file before you commit it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def _lines(value: Any) -> str:
    """A list has one line per member. Any other value has one line."""
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f" {json.dumps(one, ensure_ascii=False)}" for one in value) + "\n]"


def recorded(file: str, name: str, found: Any) -> Any:
    """The value of `name` in data/FILE. found: the new value, which RECORDED=write writes to the file first."""
    path = DATA / file
    if os.environ.get("RECORDED") == "write":
        every = json.loads(path.read_text()) if path.exists() else {}
        lines = (f"{json.dumps(key)}: {_lines(value)}" for key, value in sorted({**every, name: found}.items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return json.loads(path.read_text())[name]


def check_recorded(file: str, name: str, found: Any) -> None:
    """Fail unless `found` equals the value of `name` in data/FILE. Numbers may differ by a thousandth."""
    _compare(found, recorded(file, name, found), name)


def _compare(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
    elif isinstance(wanted, float) and isinstance(found, float):
        assert abs(found - wanted) <= 1e-5 + 1e-3 * abs(wanted), f"{where}: {found}, not {wanted}"
    else:
        assert found == wanted, where
    if isinstance(wanted, (dict, list)):
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            _compare(found[key], wanted[key], f"{where}.{key}")
