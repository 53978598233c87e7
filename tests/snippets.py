# SPDX-License-Identifier: Apache-2.0
"""Runs the code in docs/TYPES.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def code(title: str, language: str = "python") -> str:
    """The code of one language in a section of docs/TYPES.md. Raises ValueError if there is none."""
    page = (DOCS / "TYPES.md").read_text()
    section = page[page.index(f"\n## {title}\n") + 1 :].split("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    if not found:
        raise ValueError(f"section {title!r} of docs/TYPES.md shows no {language}")
    return "\n".join(found)


def run(title: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code of a section with these variables. Returns the variables after the run."""
    names = dict(names)
    exec(compile(code(title), f"docs/TYPES.md, {title}", "exec"), names)
    return names


def commands(title: str) -> list[list[str]]:
    """The commands of a section as lists of words, without comments."""
    lines = code(title, "sh").replace("\\\n", " ").strip().splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks() -> list[tuple[str, str]]:
    """(section, language) of each code block of docs/TYPES.md."""
    found, section = [], ""
    for title, language in re.findall(r"^## (.+)$|^```(\w+)$", (DOCS / "TYPES.md").read_text(), re.MULTILINE):
        section = title or section
        found += [(section, language)] if language else []
    return found
