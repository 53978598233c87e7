# SPDX-License-Identifier: Apache-2.0
"""Stores that cannot be opened can be skipped, and are named. `dmi verify` with several processes, and with --quiet."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from dmi_connector import open_captures
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.schema import INDEX_NAME
from tests import storekit as kit

SPEC = ArraySpec("q", "float32", (0, 1), 8)


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    owner = kit.Store()
    for name in "abcd":
        owner.write(tmp_path / f"{name}.zarr", [SPEC], 6, key=f"key-{name}")
    assert owner.shutdown()
    return tmp_path


@pytest.mark.parametrize("indexed", [True, False])
def test_a_store_that_cannot_be_opened_is_left_out_and_named(
    stores: Path, indexed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (stores / "b.zarr/q/zarr.json").write_text("{")
    (stores / "c.zarr/zarr.json").write_text("{")
    if not indexed:
        (stores / INDEX_NAME).unlink()
    with caplog.at_level(logging.WARNING):
        captures = open_captures(stores, on_error="skip")
    assert [capture.path.name for capture in captures] == ["a.zarr", "d.zarr"]
    assert sorted(store.name for store, _ in captures.skipped) == ["b.zarr", "c.zarr"]
    assert "2 stores cannot be opened, left out: " in caplog.text and "b.zarr (" in caplog.text
    assert "2 skipped" in repr(captures) and len(captures.rows("q", 1)[:]) == 12
    with pytest.raises(ValueError, match="cannot be read"):
        [capture.path for capture in open_captures(stores)]
    assert not open_captures(stores, on_error="skip", key="key-a")[:0].infos


def test_sound_stores_are_all_kept(stores: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(open_captures(stores, on_error="skip")) == 4 and not caplog.text
    with pytest.raises(ValueError, match="on_error 'ignore' is not valid; use 'raise' or 'skip'"):
        open_captures(stores, on_error="ignore")  # type: ignore[arg-type]


def test_several_processes_verify_as_one_does(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stores / "b.zarr/token_ids/c/0").write_bytes(b"x" * 28)
    shutil.copytree(stores / "a.zarr", stores / "e.zarr")
    found = []
    for options in ([], ["--jobs", "3"]):
        assert main(["verify", str(stores), *options]) == 1
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and "5 checked, 1 damaged" in found[0] and "a.zarr: sound" in found[0]
    assert main(["verify", str(stores), "--jobs", "0"]) == 2
    assert "--jobs 0 is not valid; use 1 or more" in capsys.readouterr().err


def test_quiet_prints_only_what_is_wrong(
    stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["verify", str(stores), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    (stores / "b.zarr/token_ids/c/0").write_bytes(b"x" * 28)
    assert main(["verify", str(stores), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert err == "" and out and all("b.zarr" in line for line in out.splitlines())


def test_a_log_gets_a_line_of_progress_now_and_then(
    stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmi_connector.cli.verify._LOG_EVERY_S", 0)
    assert main(["verify", str(stores)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"{i + 1} of 4 checked, 0 damaged" for i in range(4)]
