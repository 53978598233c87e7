# SPDX-License-Identifier: Apache-2.0
"""Stores that earlier code wrote can still be opened.

tests/data/stores-VERSION.tar.xz has stores of each format version. The JSON next to it has their values: [shape,
SHA-256 of the float32 bytes] of each hook.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import CaptureIncomplete, find_captures, open_capture
from dmi_connector.store.format.schema import FORMAT_VERSION
from dmi_connector.store.read.verify import unseen, verify_store

DATA = Path(__file__).parents[2] / "data"
VERSIONS = sorted(path.stem.removeprefix("stores-") for path in DATA.glob("stores-*.json"))
CASES = [(version, name) for version in VERSIONS for name in json.loads((DATA / f"stores-{version}.json").read_text())]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    for version in VERSIONS:
        with tarfile.open(DATA / f"stores-{version}.tar.xz") as archive:
            archive.extractall(folder / version, filter="data")
    return folder


def test_the_test_data_has_stores_of_this_format_version() -> None:
    assert FORMAT_VERSION in VERSIONS


@pytest.mark.parametrize(("version", "name"), CASES)
def test_an_old_store_reads_as_it_was_written(version: str, name: str, unpacked: Path) -> None:
    wanted: dict[str, Any] = json.loads((DATA / f"stores-{version}.json").read_text())[name]
    directory = unpacked / version / name
    store = directory / wanted["store"]
    assert verify_store(store) == []
    (found,) = find_captures(directory)
    assert (found.store, found.state) == (store, "complete" if wanted["complete"] else "incomplete")
    if not wanted["complete"]:
        with pytest.raises(CaptureIncomplete):
            open_capture(store, timeout=0)
    with open_capture(store, timeout=0, allow_incomplete=True) as capture:
        facts = {key: getattr(capture, key) for key in ("complete", "reason", "missing", "prompt_len")}
        assert facts == {key: wanted[key] for key in facts}
        assert capture.attrs.get("loss_spans") == wanted.get("loss_spans")  # since format 1.4
        np.testing.assert_array_equal(capture.token_ids, wanted["token_ids"])
        if "draft_index" in wanted:  # since format 1.5
            np.testing.assert_array_equal(capture.draft_index, wanted["draft_index"])
            counts = {"scheduled": found.draft_tokens_scheduled, "accepted": found.draft_tokens_accepted}
            assert capture.attrs["draft_tokens"] == wanted["draft_tokens"] == counts
        assert set(wanted["values"]) == set(capture.hooks) - {"resid_post"}
        for hook, (shape, digest) in wanted["values"].items():
            values = capture.numpy(hook)
            assert list(values.shape) == shape, hook
            assert hashlib.sha256(values.tobytes()).hexdigest() == digest, hook


def test_only_the_oldest_format_has_damage_that_is_not_seen() -> None:
    assert [version for version in VERSIONS if unseen({"format_version": version})] == ["1.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_changed_byte_of_an_old_store_is_a_problem_of_its_file(version: str, unpacked: Path, tmp_path: Path) -> None:
    wanted = json.loads((DATA / f"stores-{version}.json").read_text())
    name = next(name for name, about in wanted.items() if about["store"].endswith(".zarr"))
    store = tmp_path / wanted[name]["store"]
    shutil.copytree(unpacked / version / name / wanted[name]["store"], store)
    file = store / "token_ids/c/0"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    found = [(problem.where, problem.what) for problem in verify_store(store)]
    assert ("token_ids/c/0", "the file does not match its checksum") in found
