# SPDX-License-Identifier: Apache-2.0
"""A store in one zip file is read, verified and exported like its directory."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.analysis.export.zip import write_zip
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import captures_of, open_captures
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.files.store_files import MAPPED_BYTES
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.upload import upload_store
from tests import storekit as kit

SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2), 16),
    ArraySpec("z", "float32", (0, 1), 2048),  # its shards are mapped into memory
    ArraySpec("logits", "float32", (), 10),
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two complete stores, one with missing rows, and `a.zip` of the first."""
    root = tmp_path_factory.mktemp("stores")
    owner = kit.Store(8 << 20)
    for name, codec in (("a", "none"), ("b", "zstd")):
        owner.write(root / f"{name}.zarr", SPECS, 300, 3, codec=codec, attrs={"num_layers": 3}, chunk=32, segment=128)
    lost = [Loss.of(Cause.FELL_BEHIND, [[32, 64]])]
    owner.write(root / "c.zarr", SPECS[:1], 300, losses=lost)
    assert owner.shutdown()
    assert main(["export", str(root / "a.zarr"), "--to", "zip", "-o", str(root / "a.zip")]) == 0
    return root


def same(one: Capture, other: Capture) -> None:
    """Check that both captures have equal attributes and values."""
    assert one.attrs == other.attrs and one.hooks == other.hooks
    for hook in one.hooks:
        assert np.array_equal(kit.bits(one.numpy(hook)), kit.bits(other.numpy(hook))), hook
        assert np.array_equal(one.array(hook)[:], other.array(hook)[:]), hook
    for name in ("token_ids", "positions", "phase", "logits_positions"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_a_zip_file_holds_the_store_byte_by_byte(stores: Path) -> None:
    with zipfile.ZipFile(stores / "a.zip") as archive:
        infos = archive.infolist()
        assert infos[0].filename == "zarr.json" and {info.compress_type for info in infos} == {zipfile.ZIP_STORED}
        held = {info.filename: archive.read(info) for info in infos}
    store = stores / "a.zarr"
    there = {p.relative_to(store).as_posix(): p.read_bytes() for p in store.rglob("*") if p.is_file()}
    assert held == there and max(map(len, held.values())) > MAPPED_BYTES


def test_a_zip_file_reads_as_the_directory(stores: Path) -> None:
    with open_capture(stores / "a.zip", 0) as one, open_capture(stores / "a.zarr", 0) as other:
        same(one, other)
        some = [7, 299, 130]
        assert np.array_equal(one.numpy("z", 1, some), other.numpy("z", 1, some))
    rows = captures_of([stores / "a.zip", stores / "b.zarr"]).rows("resid_pre", 2)
    assert np.array_equal(rows[[0, 301, 5]], open_captures(stores).rows("resid_pre", 2)[[0, 301, 5]])
    assert rows.stores == (stores / "a.zip", stores / "b.zarr")


def test_the_same_store_gives_the_same_zip_file(stores: Path, tmp_path: Path) -> None:
    assert main(["export", str(stores / "a.zip"), "--to", "zip", "-o", str(tmp_path / "again.zip")]) == 0
    assert (tmp_path / "again.zip").read_bytes() == (stores / "a.zip").read_bytes()


def test_many_stores_become_a_zip_file_each(stores: Path, tmp_path: Path) -> None:
    assert main(["export", str(stores), "--to", "zip", "-o", str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in (tmp_path / "out").glob("*.zip")) == ["a.zip", "b.zip"]
    assert verify_store(tmp_path / "out/b.zip") == []


def test_the_default_name_is_the_stores(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(stores / "b.zarr"), "--to", "zip"]) == 0
    assert verify_store(Path("b.zip")) == []


@pytest.mark.parametrize("command", ["verify", "info"])
def test_commands_take_a_zip_file(stores: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(stores / "a.zip")]) == 0
    assert "a.zip" in capsys.readouterr().out


def test_verify_finds_one_flipped_bit(stores: Path, tmp_path: Path) -> None:
    data = bytearray((stores / "a.zip").read_bytes())
    with zipfile.ZipFile(stores / "a.zip") as archive:
        at = archive.getinfo("z/c/0/0/0").header_offset + 5000
    data[at] ^= 1
    (tmp_path / "a.zip").write_bytes(data)
    problems = verify_store(tmp_path / "a.zip")
    assert len(problems) == 1 and "does not match its crc32c" in problems[0].what
    with (
        open_capture(tmp_path / "a.zip", 0) as capture,
        pytest.raises(ValueError, match=r"a\.zip/z/c/0/0/0: the "),
    ):
        capture.numpy("z")


def test_verify_finds_a_lost_and_a_foreign_entry(stores: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(stores / "a.zip") as old, zipfile.ZipFile(tmp_path / "a.zip", "w") as new:
        for info in old.infolist():
            if info.filename != "phase/c/0":
                new.writestr(info, old.read(info))
        new.writestr("more", b"x")
    found = {(p.where, p.what) for p in verify_store(tmp_path / "a.zip")}
    assert {("more", "the file is not listed"), ("phase/c/0", "the file is missing")} <= found


def zipped(tmp_path: Path, compression: int = zipfile.ZIP_STORED, **entries: bytes) -> Path:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def test_other_zip_files_are_refused(stores: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"entry 'zarr' is compressed or encrypted.*dmi export --to zip"):
        open_capture(zipped(tmp_path, zipfile.ZIP_DEFLATED, zarr=b"x" * 100), 0)
    with pytest.raises(ValueError, match=r"x\.zip is not a capture"):
        open_capture(zipped(tmp_path, zarr=b"x"), 0)
    (tmp_path / "no.zip").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"no\.zip is not a readable zip file"):
        open_capture(tmp_path / "no.zip", 0)
    with pytest.raises(TimeoutError, match=r"gone\.zip was not found after 0 s"):
        open_capture(tmp_path / "gone.zip", 0)
    cut = (stores / "a.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(cut[len(cut) // 2 :])  # entries are before its beginning
    with pytest.raises(ValueError, match=r"cut\.zip"):
        open_capture(tmp_path / "cut.zip", 0).numpy("z")


@pytest.mark.parametrize("forged", [{"file_size": 1 << 40}, {"header_offset": (1 << 64) - 10}, {"filename": ""}])
def test_an_entry_that_no_zip_file_has_is_refused(tmp_path: Path, forged: dict[str, object]) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("zarr.json", b"{}")
        info = archive.infolist()[0]  # the entry in the central directory at the end of the file
        for name, value in forged.items():
            setattr(info, name, value)
    with pytest.raises(ValueError, match=r"x\.zip"):
        open_capture(tmp_path / "x.zip", 0)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("zarr.json", b"1")
        archive.writestr("zarr.json", b"2")
    with pytest.raises(ValueError, match=r"several entries of one name"):
        open_capture(path, 0)


def test_an_incomplete_store_is_not_shared_by_mistake(stores: Path, tmp_path: Path) -> None:
    assert main(["export", str(stores / "c.zarr"), "--to", "zip", "-o", str(tmp_path / "c.zip")]) == 2
    assert not (tmp_path / "c.zip").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
def test_export_writes_no_file_from_outside_a_store(stores: Path, tmp_path: Path, name: str) -> None:
    store = shutil.copytree(stores / "a.zarr", tmp_path / "a.zarr")
    (tmp_path / "secret").write_text("x")
    root = json.loads((store / "zarr.json").read_bytes())
    root["attributes"]["dmi"]["files"][name] = [1, 0]
    (store / "zarr.json").write_text(json.dumps(root))
    with open_capture(store, 0) as capture, pytest.raises(ValueError, match=r"lists the file '.*', which lies outside"):
        write_zip(capture, tmp_path / "out.zip")
    with pytest.raises(ValueError, match=r"lists the file '.*', which lies outside it"):
        upload_store(store, RemotePath("captures", "a.zarr"), 0)


def test_a_directory_named_zip_is_a_directory(stores: Path, tmp_path: Path) -> None:
    shutil.copytree(stores / "a.zarr", tmp_path / "odd.zip")
    with open_capture(tmp_path / "odd.zip", 0) as capture:
        assert capture.numpy("z").shape == (2, 300, 2048)
