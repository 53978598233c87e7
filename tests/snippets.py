# SPDX-License-Identifier: Apache-2.0
"""Runs the code that docs/TYPES.md shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def code(title: str, language: str = "python") -> str:
    """The code of a section of docs/TYPES.md in one language. Raises ValueError where it has none."""
    page = (DOCS / "TYPES.md").read_text()
    section = page[page.index(f"\n## {title}\n") + 1 :].split("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    if not found:
        raise ValueError(f"section {title!r} of docs/TYPES.md shows no {language}")
    return "\n".join(found)


def run(title: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code of a section with these names. Returns the names that it leaves."""
    names = dict(names)
    exec(compile(code(title), f"docs/TYPES.md, {title}", "exec"), names)
    return names


def commands(title: str) -> list[str]:
    """The command lines of a section, those over several lines as one."""
    return code(title, "sh").replace("\\\n", " ").strip().splitlines()
