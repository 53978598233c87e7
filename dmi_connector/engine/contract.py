# SPDX-License-Identifier: Apache-2.0
"""Checks at start whether capture works with the installed vLLM: its version, and the names in contract_names.py.

By default a version newer than the tested ones is not refused. With such a version, capture does not rely on behaviour
that only tests can confirm (`untested`), and the first captures are checked for values that no tap wrote.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterable
from typing import Any

from dmi_connector.engine.contract_names import NAMES, Name

logger = logging.getLogger("vllm.dmi_connector")

SUPPORTED = ">=0.31,<0.34"
"""Versions that were tested. docs/COMPATIBILITY.md has the runs, and the reasons why other versions are excluded."""
UNTESTED = "DMI_UNTESTED_VLLM"
"""Environment variable that says how to treat a newer vLLM, one of `_CHOICES`."""
_CHOICES = ("check", "refuse")


def find(name: Name) -> Any:
    """The object that a name refers to. Raises AttributeError if none of its places exists."""
    for place in name.places.split():
        module, _, attributes = place.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for attribute in attributes.split("."):
                value = value[attribute] if isinstance(value, dict) else getattr(value, attribute)
        except (ImportError, AttributeError, KeyError):
            continue
        return value
    raise AttributeError(f"{name.places} is missing")


@functools.cache
def untested() -> str:
    """The installed version of vLLM if it is newer than the tested ones, otherwise ""."""
    import vllm
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(vllm.__version__)
    except InvalidVersion:  # "dev", of a build without its git history
        return ""
    newer = not SpecifierSet(SUPPORTED, prereleases=True).contains(version.public) and version.release >= _first_newer()
    return vllm.__version__ if newer else ""


def _first_newer() -> tuple[int, ...]:
    """The upper bound of SUPPORTED, as numbers."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    [end] = [one.version for one in SpecifierSet(SUPPORTED) if one.operator == "<"]
    return Version(end).release


def check_version() -> None:
    """Raise ValueError for a vLLM that is older than the tested versions or has no version number.

    For a newer version, raises ValueError if UNTESTED is "refuse", and logs a warning otherwise. Raises ValueError for
    an unknown value of UNTESTED.
    """
    import vllm
    from packaging.specifiers import SpecifierSet

    choice = os.environ.get(UNTESTED, _CHOICES[0])
    if choice not in _CHOICES:
        raise ValueError(f"DMI_UNTESTED_VLLM: {choice!r} is unknown; choose one of check, refuse")
    if SpecifierSet(SUPPORTED, prereleases=True).contains(vllm.__version__.split("+")[0]):
        return
    if not untested() or choice == "refuse":
        raise ValueError(f"vllm: version {vllm.__version__} is not supported; install vllm{SUPPORTED}")
    logger.warning(
        "dmi_connector: vllm %s is newer than the tested versions (%s). Taps read copies of all values, and the first "
        "captures are checked. DMI_UNTESTED_VLLM=refuse refuses such a version",
        vllm.__version__,
        SUPPORTED,
    )


def check_names(features: Iterable[str]) -> None:
    """Raise ValueError if a name of these features is missing."""
    for feature in features:
        for name in NAMES[feature].values():
            if name.without:
                continue
            try:
                find(name)
            except AttributeError as error:
                package = name.places.partition(":")[0].partition(".")[0]
                version = importlib.import_module(package).__version__
                raise ValueError(
                    f"{package}: {name.places} is missing in version {version} ({name.why}); install vllm{SUPPORTED}"
                ) from error
