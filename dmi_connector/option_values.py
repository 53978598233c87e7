# SPDX-License-Identifier: Apache-2.0
"""Checks of option values. A refusal is an OptionError whose message names the option, the value and the fix."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from dmi_connector.wording import show, suggest

SUGGEST_FROM = 100
"""Maximum number of characters of a given name that are compared with known names."""
_LONGEST_PATH, _LONGEST_NAME = 1024, 255
"""Maximum characters of a path, and maximum bytes of a path component, as in Linux file systems."""


class OptionError(ValueError):
    """A bad option. The message names the option, the value and the fix."""


def refuse(option: str, value: object, fix: str) -> OptionError:
    """The OptionError for a bad value. fix: what is wrong with the value, and which value to give."""
    return OptionError(f"{option}: {show(value)} {fix}")


def check_names(where: str, given: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Raise OptionError if a key of `given` is not in `known`. where: the option that contains the keys."""
    for name in given:
        if name not in known:
            near = suggest(name[:SUGGEST_FROM], known) if isinstance(name, str) else ""
            raise OptionError(f"{where}: option {show(name)} is unknown{near or ';'} known options: {', '.join(known)}")


def integer(option: str, value: object, low: int, high: int) -> int:
    """The value, an integer from `low` to `high`. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refuse(option, value, f"is not valid; give an integer from {low} to {high}")
    return value


def whole_number(value: object) -> int | None:
    """An integer of Python or numpy as int; None for any other value, also for True and False."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def boolean(option: str, value: object) -> bool:
    """The value, true or false. Raises OptionError."""
    if not isinstance(value, bool):
        raise refuse(option, value, "is not valid; give true or false")
    return value


def one_of(option: str, value: object, choices: tuple[str, ...]) -> str:
    """The value, one of `choices`. Raises OptionError."""
    if value not in choices:
        near = suggest(value[:SUGGEST_FROM], choices) if isinstance(value, str) else ""
        raise refuse(option, value, f"is unknown{near or ';'} choose one of {', '.join(choices)}")
    return str(value)


def hook_items(option: str, value: object) -> tuple[str, ...]:
    """The items of a hook selection. value: a comma-separated string, or a list of strings. Raises OptionError."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(i, str) for i in items):
        raise refuse(option, value, "is not valid; give hook names as a comma-separated string or a list of strings")
    return tuple(i.strip() for i in items)


def is_directory_name(value: object) -> bool:
    """Whether a value is an absolute path without "." and ".." that Linux file systems allow."""
    if not isinstance(value, str) or not value.startswith("/") or len(value) > _LONGEST_PATH or not value.isprintable():
        return False
    parts = value.split("/")
    return not {".", ".."} & set(parts) and all(len(part.encode()) <= _LONGEST_NAME for part in parts)
