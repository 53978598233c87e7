# SPDX-License-Identifier: Apache-2.0
"""Damaged or unwritable files of a run: the message names the file, the option and the fix."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.bulk.manifest import Manifest
from dmi_connector.bulk.settings import settle
from tests.bulkkit import FakeEngines, start_run, template, write_prompts

FULL = Path("/dev/full")
"""A device whose writes all fail with ENOSPC."""


def test_a_full_disk_names_the_manifest(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path / "manifest.jsonl")) as manifest:
        os.close(manifest._fd)
        manifest._fd = os.open(FULL, os.O_WRONLY)
        manifest.add({"key": "a"})
        with pytest.raises(OSError, match=r"--out .*: manifest.jsonl cannot be written \(No space left .*; make room"):
            manifest.flush()


def test_a_full_disk_names_the_list_of_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    engines = FakeEngines(template(tmp_path / "one.zarr"), tmp_path / "out")
    run = start_run(write_prompts(tmp_path / "p.jsonl", 3, bad=(0,)), tmp_path / "out", engines)
    with (
        open(FULL, "w") as run._rejects,
        pytest.raises(OSError, match=r"--out /dev: full cannot be written \(No space"),
    ):
        run.go()


def test_a_full_disk_names_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"--out .*: run.json cannot be written \(No space"), settle(tmp_path, {}):
        pass
    assert not list(tmp_path.glob("run.json*")), "no partial file must remain"


WHOLE: dict[str, Any] = {"hooks": "q", "sampling": {}, "columns": {}}
DAMAGED = [{}, {"hooks": "q", "sampling": {}}, {**WHOLE, "columns": None}, {**WHOLE, "hooks": 3}]
NAMES: list[Any] = [5, "", "../x", "(x"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"format": 1}'),
        *(json.dumps({"format": 1, "run": "a", "settings": one}) for one in DAMAGED),
        *(json.dumps({"format": 1, "run": name, "settings": WHOLE}) for name in NAMES),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_of_settings_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"--out .*: run.json is damaged \(.*; put back a copy"), settle(tmp_path, {}):
        pass
