# SPDX-License-Identifier: Apache-2.0
"""Finished stores are uploaded completely or not at all. Stores that were not uploaded are recorded, and `dmi repair`
uploads them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmi_connector.bulk.engine_process import Inbox, serve
from dmi_connector.bulk.order import Order
from dmi_connector.bulk.recovery import not_uploaded, settle_left
from dmi_connector.captures.capture import open_capture
from dmi_connector.captures.captures import open_captures
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.option_values import OptionError
from dmi_connector.reduce.basis import Basis
from dmi_connector.reduce.channel import ChannelInt8
from dmi_connector.reduce.scales import METADATA, Scales
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format import object_store
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.kept_files import BASES, keep_copy
from dmi_connector.store.format.locks import is_to_be_uploaded
from dmi_connector.store.format.object_store import RemoteDenied, RemoteError
from dmi_connector.store.format.remote_path import RemotePath, place_of
from dmi_connector.store.read.files.remote_index import read_indexes
from dmi_connector.store.read.fitted_files import find_fitted
from dmi_connector.store.read.index import CaptureInfo, find_captures
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.coordinator.directories import check_directories
from dmi_connector.store.write.finish import upload
from dmi_connector.store.write.finish.commit import append_index
from dmi_connector.store.write.finish.repair import finish_uploads, repair
from dmi_connector.store.write.finish.upload import UploadResult, expected_etag, part_bytes, upload_file, upload_store
from dmi_connector.store.write.finish.uploads import Uploads
from dmi_connector.store.write.settings import UploadSettings, WriteSettings
from tests import bulkkit, s3kit
from tests import storekit as kit
from tests.shorter import soak

BUCKET = f"s3://{s3kit.BUCKET}"
MakeClient = Callable[..., StoreClient]


@pytest.fixture(scope="module")
def server() -> Iterator[s3kit.Proxy]:
    with s3kit.s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(server: s3kit.Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3kit.Proxy]:
    for name, value in s3kit.environment(server).items():
        monkeypatch.setenv(name, value)
    server.clear()
    yield server
    server.clear()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A prefix for one test."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def make_client(prefix: str) -> Iterator[MakeClient]:
    """make_client(**options): the engine's side of writing, which uploads to the test's prefix."""
    made: list[StoreClient] = []

    def make(**options: Any) -> StoreClient:
        settings = UploadSettings(f"{BUCKET}/{prefix}", **options)
        made.append(StoreClient(4 << 20, 1, WriteSettings(upload=vars(settings), shutdown_seconds=kit.PATIENCE)))
        return made[-1]

    yield make
    for client in made:
        if not client._stopping:
            client.shutdown()


def capture(client: StoreClient, path: Path, finish: str = "length", rows: int = 300) -> Path:
    """Write one store of kit.VALUES, and wait until it is finished. Returns its path. rows: number of rows that are
    sent, of 300.
    """
    path.parent.mkdir(exist_ok=True)
    one = kit.begin(client, path)
    for first in range(0, rows, 128):
        kit.send(client, one, first)
    one.close(300, token_ids=kit.IDS, attrs={"finish_reason": finish})
    kit.until(lambda: one.state not in ("open", "closing"))
    assert one.state == ("complete" if rows == 300 else "incomplete"), one.reason
    return path


def uploaded(client: StoreClient, count: int) -> None:
    kit.until(lambda: client.counts()["uploaded"] + client.counts()["upload_failed"] >= count)


def index(directory: Path) -> dict[str, CaptureInfo]:
    return {Path(str(info.store)).name: info for info in find_captures(directory)}


def files(store: Path) -> dict[str, bytes]:
    return {p.relative_to(store).as_posix(): p.read_bytes() for p in store.rglob("*") if p.is_file()}


def there(prefix: str, name: str) -> dict[str, bytes]:
    """{file: content} of a store in the bucket."""
    return {key.removeprefix(f"{prefix}/{name}/"): data for key, data in s3kit.objects(f"{prefix}/{name}").items()}


# ---- without failures -------------------------------------------------------------------------------------------


def test_stores_are_uploaded_and_the_indexes_say_where(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client()
    stores = [capture(client, tmp_path / f"s/{name}.zarr") for name in "ab"]
    uploaded(client, 2)
    counts = client.counts()
    assert counts["uploaded"] == 2 and counts["upload_failed"] == 0
    assert counts["bytes_uploaded"] == sum(info.bytes or 0 for info in find_captures(tmp_path / "s"))
    assert client.shutdown()
    for store in stores:
        assert there(prefix, store.name) == files(store)
        info = index(tmp_path / "s")[store.name]
        assert (info.upload, info.url, info.state) == ("done", f"{BUCKET}/{prefix}/{store.name}", "complete")
    s3.clear()
    found = open_captures(f"{BUCKET}/{prefix}")
    assert [info.store.name for info in found.infos] == ["a.zarr", "b.zarr"]
    assert not s3.gets(".zarr"), "the index of the uploads has all"
    assert np.array_equal(kit.bits(found[1].numpy("q")), kit.VALUES)
    assert verify_store(f"{BUCKET}/{prefix}/a.zarr") == []
    assert repair(tmp_path / "s") == []


def test_scales_that_decode_rows_are_uploaded_too(s3: s3kit.Proxy, prefix: str, tmp_path: Path) -> None:
    """A reader of the bucket needs no local files."""
    scales = {"q.0.scale": np.linspace(0.1, 2, 8, dtype="f4")}
    about = {"hooks": {"q": {"width": 8, "layers": [0]}}}
    save_file(scales, tmp_path / "scales", metadata={METADATA: json.dumps(about)})
    settings = {**ChannelInt8(Scales.load(tmp_path / "scales").sha256, "q").settings(), "dtype": "float32", "width": 8}
    owner, store, to = kit.Store(), tmp_path / "stores/a.zarr", RemotePath(s3kit.BUCKET, f"{prefix}/deep/a.zarr")
    store.parent.mkdir()
    owner.write(store, [ArraySpec("q", "uint8", (0,), 8, reduce=settings)], 20)
    assert owner.shutdown(kit.PATIENCE)
    with pytest.raises(FileNotFoundError, match=r"the scales file of .* is not beside it"):
        upload_store(store, to, 0)
    keep_copy(str(tmp_path / "scales"), settings["sha256"], BASES, str(store.parent), "private")
    for _ in range(2):  # the second time the objects exist already
        upload_store(store, to, 0)
    with open_capture(str(to), 0) as remote, open_capture(store, 0) as local:
        np.testing.assert_array_equal(remote.numpy("q"), local.numpy("q"))
    moved = RemotePath(s3kit.BUCKET, f"{prefix}/elsewhere/b.zarr")
    upload_store(store, moved, 0)
    beside = moved.parent / BASES / f"{settings['sha256']}.safetensors"
    with object_store.requests_for(beside) as obstore:
        obstore.delete(object_store.bucket_store(beside), beside.key)
    with open_capture(str(moved), 0) as remote, pytest.raises(FileNotFoundError, match=f"to {beside}"):
        remote.numpy("q")


def test_a_basis_in_the_bucket_is_found_and_may_be_added_later(s3: s3kit.Proxy, prefix: str, tmp_path: Path) -> None:
    """Reading rows does not need the basis, so an upload leaves it out."""
    tensors = {"q.0.mean": (8,), "q.0.components": (8, 2), "q.0.std": (2,), "q.0.variance": (1,)}
    about = json.dumps({"hooks": {"q": {"width": 8, "k": 2, "layers": [0]}}})
    ones = {name: np.ones(shape, "f4") for name, shape in tensors.items()}
    save_file(ones, tmp_path / "basis", metadata={Basis.metadata: about})
    sha256 = Basis.load(tmp_path / "basis").sha256
    store = RemotePath(s3kit.BUCKET, f"{prefix}/deep/a.zarr")
    beside = RemotePath(s3kit.BUCKET, f"{prefix}/{BASES}/{sha256}.safetensors")
    with pytest.raises(
        FileNotFoundError, match=rf" to {store.parent / BASES / sha256}.safetensors, or give it as basis="
    ):
        find_fitted(Basis, sha256, store)
    upload_file(tmp_path / "basis", beside)
    assert find_fitted(Basis, sha256, store).sha256 == sha256
    assert find_fitted(Basis, sha256, store, str(beside)).path == str(beside)
    with pytest.raises(FileNotFoundError, match=f"none does not exist; give the file with SHA-256 {sha256}"):
        find_fitted(Basis, sha256, store, f"s3://{s3kit.BUCKET}/{prefix}/none")


def test_the_root_document_is_sent_last(s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client()
    capture(client, tmp_path / "s/a.zarr")
    uploaded(client, 1)
    sent = [r.path for r in s3.log if r.method == "PUT" and "/index/" not in r.path]
    assert sent[-1].endswith("/a.zarr/zarr.json") and len(sent) == len(set(sent)) == len(files(tmp_path / "s/a.zarr"))


def test_the_local_copy_is_removed_after_its_upload(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client(remove_local=True)
    read = capture(client, tmp_path / "s/read.zarr")
    uploaded(client, 1)
    capture(client, tmp_path / "s/b.zarr")
    uploaded(client, 2)
    assert client.shutdown()
    assert not read.exists() and [p.name for p in (tmp_path / "s").iterdir()] == ["index.jsonl"]
    found = open_captures(tmp_path / "s")
    assert [str(info.store) for info in found.infos] == [f"{BUCKET}/{prefix}/{n}.zarr" for n in ("read", "b")]
    assert np.array_equal(kit.bits(found[0].numpy("q")), kit.VALUES)
    assert main(["ls", str(tmp_path / "s"), "--stats"]) == 0


def test_a_store_that_was_pruned_after_its_upload_is_read_from_the_bucket(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client()
    capture(client, tmp_path / "s/a.zarr")
    uploaded(client, 1)
    assert client.shutdown() and main(["prune", str(tmp_path / "s"), "--keep-bytes", "0"]) == 0
    (info,) = open_captures(tmp_path / "s").infos
    assert str(info.store) == f"{BUCKET}/{prefix}/a.zarr" and info.state == "complete"


def test_a_local_copy_that_is_being_read_is_kept(s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client(remove_local=True)
    s3.fault = lambda _method, _path, _number: "hold"
    store = capture(client, tmp_path / "s/a.zarr")
    with open_capture(store, 0) as reader:
        s3.gate.set()
        uploaded(client, 1)
        assert client.shutdown()
        assert np.array_equal(kit.bits(reader.numpy("q")), kit.VALUES)
    assert index(tmp_path / "s")["a.zarr"].upload == "done" and store.is_dir()


def test_the_index_in_the_bucket_has_each_store_before_the_shutdown(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    """It also has the last store, whose upload follows another one at once."""
    client = make_client()
    for name in "abc":
        capture(client, tmp_path / f"s/{name}.zarr")
    uploaded(client, 3)
    place = place_of(f"{BUCKET}/{prefix}")
    assert isinstance(place, RemotePath)
    kit.until(lambda: b"".join(read_indexes(place)).count(b"\n") == 3)


def test_no_line_is_lost_if_an_index_object_is_full(
    s3: s3kit.Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload.RemoteIndexPart, "_MOST_LINES", 2)
    place = place_of(f"{BUCKET}/{prefix}")
    assert isinstance(place, RemotePath)
    part = upload.RemoteIndexPart(place, "part")
    for written in (1, 5, 6):
        for number in range(written - b"".join(read_indexes(place)).count(b"\n")):
            part.add({"store": f"{written}-{number}.zarr"})
        part.write()
        assert b"".join(read_indexes(place)).count(b"\n") == written
    names = {key.rsplit("/", 1)[1] for key in s3kit.objects(prefix)}
    assert names == {"part-0.jsonl", "part-1.jsonl", "part-2.jsonl"}


def test_only_complete_stores_of_finished_requests_are_uploaded(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client(only_complete=True)
    for name, rows, finish in (("lossy", 128, "length"), ("aborted", 300, "abort"), ("whole", 300, "stop")):
        capture(client, tmp_path / f"s/{name}.zarr", finish, rows)
    uploaded(client, 1)
    assert client.shutdown() and client.counts()["upload_failed"] == 0
    assert {key.split("/")[1] for key in s3kit.objects(prefix)} == {"whole.zarr", "index"}
    infos = index(tmp_path / "s")
    assert {(name, info.state, info.upload) for name, info in infos.items()} == {
        ("lossy.zarr", "incomplete", None),
        ("aborted.zarr", "complete", None),
        ("whole.zarr", "complete", "done"),
    }
    assert repair(tmp_path / "s") == []


def test_a_run_counts_stores_that_are_only_in_the_bucket(
    s3: s3kit.Proxy, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds without a line in the manifest too: the run was killed before it wrote the line, and the local copy
    was removed.
    """
    out, prompts = tmp_path / "out", bulkkit.write_prompts(tmp_path / "p.jsonl", 4)
    template = bulkkit.template(tmp_path / "one.zarr")
    out.mkdir()
    assert bulkkit.go(prompts, out, bulkkit.FakeEngines(template, out)).all_done
    noted, stores = (out / "manifest.jsonl").read_text(), sorted(out.glob("*.zarr"))
    for store in stores[:3]:
        append_index(str(out), {"event": "start", "store": store.name, "upload": "pending", "url": "s3://captures/x"})
    assert not_uploaded(out, bulkkit.RUN, Order()) == (3, None)
    failed = {"event": "upload", "store": stores[2].name, "upload": "failed", "upload_reason": "it was denied"}
    append_index(str(out), failed)
    assert not_uploaded(out, bulkkit.RUN, Order()) == (3, "it was denied")
    append_index(str(out), {**failed, "store": stores[0].name, "upload_reason": "it timed out"})
    assert not_uploaded(out, bulkkit.RUN, Order()) == (3, "it timed out"), "the latest"
    for store in stores[:2]:
        upload.finish_upload(store, RemotePath(s3kit.BUCKET, f"{prefix}/{store.name}"), 0, remove_local=True)
    assert not_uploaded(out, bulkkit.RUN, Order())[0] == 1 and not stores[0].exists() and not stores[1].exists()
    kept = settle_left(out, bulkkit.RUN, [0, 3, 9])
    assert {position: str(place) for position, place in kept.items()} == {
        0: f"{BUCKET}/{prefix}/{stores[0].name}",
        3: str(stores[3]),
    }
    engines = bulkkit.FakeEngines(template, out)
    assert bulkkit.go(prompts, out, engines, redo_missing=True).all_done and engines.submitted == []
    os.unlink(out / "manifest.jsonl")
    s3.clear()
    outcome = bulkkit.go(prompts, out, engines, redo_missing=True)
    assert (outcome.counts.before, engines.submitted) == (4, [])
    assert sorted((out / "manifest.jsonl").read_text().splitlines()) == sorted(noted.splitlines())
    assert {r.path.rpartition("/")[2] for r in s3.log} == {"zarr.json"}, "nothing else is asked for"


def test_a_bucket_that_refuses_writes_is_detected_before_an_engine_starts(
    s3: s3kit.Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload.check_upload(f"{BUCKET}/{prefix}")
    assert open_captures(f"{BUCKET}/{prefix}").infos == (), "the object that it writes is not an index"
    start = {"store_dir": "/x", "capture": {"upload": "s3://no-such-bucket/a"}}
    with pytest.raises(
        OptionError, match=r"--upload s3://no-such-bucket/a cannot be written: .* does not exist.*; correct"
    ):
        next(serve(Inbox(0), start))
    for method in ("GET", "PUT"):
        s3.fault = lambda asked, _path, _number, method=method: "deny" if asked == method else None
        with pytest.raises(OptionError, match=rf"--upload {BUCKET}/{prefix} cannot be written: .* access denied"):
            upload.check_upload(f"{BUCKET}/{prefix}")
    s3.fault = None
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with monkeypatch.context() as patch:
            patch.setattr(object_store, "_client", object_store._client.__wrapped__)  # clients are cached
            patch.delenv(name)
            with pytest.raises(OptionError, match=rf"access denied \({name} is not set\); check AWS_ACCESS"):
                upload.check_upload(f"{BUCKET}/{prefix}")


def test_large_files_are_uploaded_in_parts(s3: s3kit.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = kit.Store(64 << 20)
    owner.write(tmp_path / "a.zarr", [ArraySpec("z", "float32", (0, 1), 16384)], 200, codec="none")
    assert owner.shutdown()
    store = tmp_path / "a.zarr"
    assert max(map(len, files(store).values())) > 2 * upload.PART_BYTES
    upload_store(store, RemotePath(s3kit.BUCKET, "large/a.zarr"), 0)
    parts = {r.path for r in s3.log if r.method == "PUT" and "partNumber=" in r.query}
    assert parts == {f"large/a.zarr/{name}" for name, data in files(store).items() if len(data) > upload.PART_BYTES}
    assert not s3.gets("/c/"), "the ETags of parts show that they are right"
    assert there("large", "a.zarr") == files(store)
    s3.clear()
    upload_store(store, RemotePath(s3kit.BUCKET, "large/a.zarr"), 0)
    assert [r.path for r in s3.log if r.method == "PUT"] == ["large/a.zarr/zarr.json"], (
        "what is there is not sent again"
    )


def test_the_size_of_parts() -> None:
    assert part_bytes(0) == part_bytes(upload.PART_BYTES * 9000) == upload.PART_BYTES
    assert 9000 * part_bytes(1 << 40) >= 1 << 40 > 0 and part_bytes(1 << 40) % (1 << 20) == 0


def test_etags(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "abc").write_bytes(b"abc")
    assert expected_etag(tmp_path / "empty") == "d41d8cd98f00b204e9800998ecf8427e"
    assert expected_etag(tmp_path / "abc") == "900150983cd24fb0d6963f7d28e17f72"


# ---- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["500", "flip", *soak("slow", "cut", "break")])
def test_transient_failures_lose_nothing(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str, what: str
) -> None:
    """A flipped bit changes the ETag. The object is then read back, differs from the file, and is sent again."""
    client = make_client()
    wrong = ("PUT",) if what == "flip" else ("PUT", "GET", "POST", "HEAD")
    s3.fault = lambda method, _path, number: what if method in wrong and number % 3 == 1 else None
    store = capture(client, tmp_path / "s/a.zarr")
    uploaded(client, 1)
    assert client.counts()["uploaded"] == 1 and s3.faults > 1
    s3.fault = None
    assert there(prefix, "a.zarr") == files(store)


def test_without_md5_as_etag_objects_are_read_back(
    s3: s3kit.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [kit.Q], 50)
    assert owner.shutdown()
    monkeypatch.setattr(upload, "expected_etag", lambda _path: "another kind")
    upload_store(tmp_path / "a.zarr", RemotePath(s3kit.BUCKET, "kms/a.zarr"), 0)
    assert {r.path.removeprefix("kms/a.zarr/") for r in s3.gets()} == set(files(tmp_path / "a.zarr"))
    s3.fault = lambda method, _path, _number: "flip" if method == "PUT" else None
    with pytest.raises(upload.Differs, match=r"^s3://captures/kms2/a\.zarr/.* differs from .* after its upload"):
        upload_store(tmp_path / "a.zarr", RemotePath(s3kit.BUCKET, "kms2/a.zarr"), 0)
    s3.fault = None
    assert "zarr.json" not in there("kms2", "a.zarr"), "it is not a store there"


def test_denied_uploads_are_recorded_and_capture_continues(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    client = make_client(remove_local=True)
    s3.fault = lambda _method, _path, _number: "deny"
    stores = [capture(client, tmp_path / f"s/{name}.zarr") for name in "ab"]
    uploaded(client, 2)
    assert client.counts()["upload_failed"] == 2 and client.counts()["complete"] == 2
    assert all(
        "access denied (status 403, AccessDenied); check AWS_ACCESS_KEY_ID" in e for e in client.stats()["errors"]
    )
    assert client.shutdown() and all(store.is_dir() for store in stores)
    for info in index(tmp_path / "s").values():
        assert (info.state, info.upload) == ("complete", "failed") and "access denied" in str(info.upload_reason)
    assert main(["repair", str(tmp_path / "s")]) == 1
    s3.fault = None
    assert main(["repair", str(tmp_path / "s")]) == 0
    text = capfd.readouterr().out
    assert text.count(": not uploaded to s3://") == 2 and text.count(": uploaded to s3://") == 2
    assert not any(store.exists() for store in stores), "repair keeps to remove_local too"
    assert len(open_captures(f"{BUCKET}/{prefix}")) == len(open_captures(tmp_path / "s")) == 2


@pytest.mark.usefixtures("own_interpreters")
def test_no_credential_is_written_anywhere(
    s3: s3kit.Proxy,
    make_client: MakeClient,
    tmp_path: Path,
    prefix: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not in stores, indexes, objects, logs, messages, or the arguments of a process."""
    client = make_client()
    for number, what in enumerate(("deny", "bad", "ok")):
        s3.fault = lambda _method, _path, _number, what=what: None if what == "ok" else what
        capture(client, tmp_path / f"s/{what}.zarr")
        uploaded(client, number + 1)
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in group(client.group)]
    assert len(arguments) >= 3 and b"uploader" in b"".join(arguments)
    assert client.shutdown()
    s3.fault = lambda _method, _path, _number: "deny"
    main(["repair", str(tmp_path / "s"), "--json"])
    main(["verify", f"{BUCKET}/{prefix}/a.zarr"])
    s3.fault = None
    written = [p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()] + list(
        s3kit.objects(prefix).values()
    )
    said = [*capfd.readouterr(), caplog.text, json.dumps(client.stats()), repr(client.settings)]
    assert "access denied" in "".join(said) and len(written) > 30
    assert [secret for text in (*written, *arguments, *said) for secret in s3kit.holds_secret(text)] == []


def group(pid: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) == pid:
                found.append(int(path.name))
        except ProcessLookupError:
            continue
    return found


def uploader(client: StoreClient) -> int:
    """The process id of a client's uploader."""
    found: list[int] = []

    def look() -> bool:
        with suppress(FileNotFoundError):  # the process has just ended
            found[:] = [p for p in group(client.group) if Path(f"/proc/{p}/comm").read_text() == "dmi-uploader\n"]
        return bool(found)

    kit.until(look)  # the process sets its name after its start
    [pid] = found
    return pid


def test_an_uploader_that_dies_is_replaced(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client()
    s3.fault = lambda _method, _path, number: "hold" if number == 3 else None
    store = capture(client, tmp_path / "s/a.zarr")
    kit.until(lambda: s3.held)
    os.kill(uploader(client), signal.SIGKILL)
    uploaded(client, 1)
    assert client.counts()["uploaded"] == 1 and there(prefix, "a.zarr") == files(store)
    assert any("the uploader process died (signal 9)" in text for text in client.stats()["errors"])


def test_a_store_that_was_finished_when_its_coordinator_died_is_uploaded(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 0.0)
    store = kit.Store()
    store.write(tmp_path / "from/a.zarr", [kit.Q], 300, request_id="r", key="k")
    assert store.shutdown()
    client = make_client()
    (tmp_path / "s").mkdir()
    one = kit.begin(client, tmp_path / "s/a.zarr")
    assert client._child.ready.wait(kit.PATIENCE)
    os.kill(client._child.pid, signal.SIGSTOP)
    one.close(300, token_ids=kit.IDS, attrs={"finish_reason": "length"})
    (tmp_path / "from/a.zarr").rename(tmp_path / "s/a.zarr")
    os.kill(client._child.pid, signal.SIGKILL)
    uploaded(client, 1)
    assert one.state == "complete" and there(prefix, "a.zarr") == files(tmp_path / "s/a.zarr")
    assert client.counts()["bytes_queued"] == client.counts()["bytes_uploaded"]


def test_a_store_without_a_finish_line_is_uploaded_by_a_repair(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    """If the local copy is removed, the index of its directory still names the store in the bucket."""
    client = make_client(remove_local=True)
    s3.fault = lambda _method, _path, _number: "hold"
    store = capture(client, tmp_path / "s/a.zarr")
    held = files(store)
    client._stopping = True
    os.killpg(client.group, signal.SIGKILL)
    kit.until(lambda: not group(client.group))
    s3.clear()
    lines = (tmp_path / "s/index.jsonl").read_text().splitlines(True)
    (tmp_path / "s/index.jsonl").write_text(lines[0])
    with open_capture(store, timeout=0):
        assert [outcome.state for outcome in repair(tmp_path / "s")] == ["uploaded"]
    assert [outcome.state for outcome in repair(tmp_path / "s")] == ["recorded"]
    assert there(prefix, "a.zarr") == held and index(tmp_path / "s")["a.zarr"].state == "complete"
    (tmp_path / "s/index.jsonl").write_text(lines[0])
    assert [outcome.state for outcome in finish_uploads(tmp_path / "s")] == ["uploaded"] and not store.exists()
    (info,) = open_captures(tmp_path / "s").infos
    assert str(info.store) == f"{BUCKET}/{prefix}/a.zarr" and info.num_tokens == 300


@pytest.mark.parametrize("after", [4, *soak(1, 8)])
def test_repair_finishes_an_upload_that_was_killed(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str, after: int
) -> None:
    client = make_client(remove_local=True)
    s3.fault = lambda _method, _path, number: "hold" if number >= after else None
    store = capture(client, tmp_path / "s/a.zarr")
    held = files(store)
    kit.until(lambda: s3.held)
    client._stopping = True  # otherwise a new coordinator would start
    os.killpg(client.group, signal.SIGKILL)
    kit.until(lambda: not group(client.group))
    s3.clear()
    assert index(tmp_path / "s")["a.zarr"].upload == "pending"
    assert open_captures(tmp_path / "s").infos[0].store == store
    (outcome,) = repair(tmp_path / "s")
    assert (outcome.state, outcome.url) == ("uploaded", f"{BUCKET}/{prefix}/a.zarr")
    assert there(prefix, "a.zarr") == held and not store.exists()
    assert index(tmp_path / "s")["a.zarr"].upload == "done" and repair(tmp_path / "s") == []


def test_repair_retries_one_store_while_the_bucket_is_down(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(retry_seconds=0)
    s3.fault = lambda _method, _path, _number: "500"
    for name in "abc":
        capture(client, tmp_path / f"s/{name}.zarr")
    uploaded(client, 3)
    assert client.shutdown()
    given: list[float] = []

    def finish_upload(store: Path, to: RemotePath, retry_seconds: float, remove_local: bool) -> UploadResult:
        given.append(retry_seconds)
        time.sleep(retry_seconds)
        return upload.finish_upload(store, to, 0, remove_local)

    monkeypatch.setattr("dmi_connector.store.write.finish.repair.finish_upload", finish_upload)
    outcomes = finish_uploads(tmp_path / "s", retry_seconds=0.1)
    assert [outcome.state for outcome in outcomes] == ["not uploaded"] * 3 and given == [0.1, 0, 0]
    s3.clear()
    assert [outcome.state for outcome in finish_uploads(tmp_path / "s", 0)] == ["uploaded"] * 3


def test_repair_skips_stores_that_a_server_will_upload(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path
) -> None:
    client = make_client()
    s3.fault = lambda _method, _path, _number: "hold"
    capture(client, tmp_path / "s/a.zarr")
    kit.until(lambda: s3.held)
    assert [outcome.state for outcome in finish_uploads(tmp_path / "s")] == ["waits"]
    s3.gate.set()
    uploaded(client, 1)
    assert client.shutdown() and finish_uploads(tmp_path / "s") == []


def test_repair_finishes_uploads_of_a_directory_that_is_a_link(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path
) -> None:
    client = make_client(retry_seconds=0)
    s3.fault = lambda _method, _path, _number: "500"
    capture(client, tmp_path / "s/a.zarr")
    uploaded(client, 1)
    assert client.shutdown()
    s3.clear()
    (tmp_path / "link").symlink_to(tmp_path / "s")
    (outcome,) = repair(tmp_path / "link")
    assert outcome.state == "uploaded", outcome.notes
    assert repair(tmp_path / "s") == []


def test_repair_uploads_stores_of_a_killed_server_while_another_one_runs(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_client(), make_client()
    s3.fault = lambda _method, _path, _number: "hold"
    left = capture(first, tmp_path / "s/left.zarr")
    kit.until(lambda: s3.held)
    first._stopping = True
    os.killpg(first.group, signal.SIGKILL)
    kit.until(lambda: not group(first.group))
    for name in "abc":  # the third one waits for the first two
        capture(second, tmp_path / f"s/{name}.zarr")
    kit.until(lambda: s3.held >= 3 and is_to_be_uploaded(tmp_path / "s/c.zarr"))
    assert {outcome.state for outcome in finish_uploads(tmp_path / "s")} == {"waits"}, "they are new"
    monkeypatch.setattr("dmi_connector.store.write.finish.repair.LOCKED_WITHIN_S", 0.0)
    sent: list[Path] = []

    def finish_upload(store: Path, to: RemotePath, *_args: object) -> UploadResult:
        sent.append(store)
        return UploadResult(store, str(to))

    monkeypatch.setattr("dmi_connector.store.write.finish.repair.finish_upload", finish_upload)
    states = {Path(outcome.store or "").stem: outcome.state for outcome in finish_uploads(tmp_path / "s")}
    assert states == {"left": "uploaded", "a": "waits", "b": "waits", "c": "waits"} and sent == [left]
    s3.clear()
    uploaded(second, 3)
    assert there(prefix, "c.zarr") == files(tmp_path / "s/c.zarr")


def test_a_shutdown_without_time_leaves_uploads_to_repair(s3: s3kit.Proxy, tmp_path: Path, prefix: str) -> None:
    settings = UploadSettings(f"{BUCKET}/{prefix}")
    client = StoreClient(4 << 20, 1, WriteSettings(upload=vars(settings), shutdown_seconds=2))
    s3.fault = lambda _method, _path, _number: "hold"
    store = capture(client, tmp_path / "s/a.zarr")
    kit.until(lambda: s3.held)
    assert client.shutdown(), "all is committed"
    assert any("1 stores are not uploaded yet: dmi repair" in text for text in client.stats()["errors"])
    s3.clear()
    assert [outcome.state for outcome in repair(tmp_path / "s")] == ["uploaded"]
    assert there(prefix, "a.zarr") == files(store)


def test_a_salvaged_store_is_uploaded_too(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client()
    (tmp_path / "s").mkdir()
    one = kit.begin(client, tmp_path / "s/a.zarr")
    kit.send(client, one, 0)
    kit.until(lambda: not client.ring.used)
    client._stopping = True
    os.killpg(client.group, signal.SIGKILL)
    kit.until(lambda: not group(client.group))
    assert [outcome.state for outcome in repair(tmp_path / "s")] == ["salvaged", "uploaded"]
    with open_capture(f"{BUCKET}/{prefix}/a.zarr", 0, allow_incomplete=True) as capture_there:
        assert not capture_there.complete and there(prefix, "a.zarr") == files(tmp_path / "s/a.zarr")


def test_repair_does_not_upload_stores_that_the_server_would_not_upload(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    """Such a server belongs to `dmi run`, which captures a prompt again if its store is incomplete. The bucket must not
    get both stores.
    """
    client = make_client(only_complete=True)
    s3.fault = lambda _method, _path, _number: "hold"
    capture(client, tmp_path / "s/whole.zarr")
    kit.until(lambda: s3.held)
    one = kit.begin(client, tmp_path / "s/torn.zarr")
    kit.send(client, one, 0)
    kit.until(lambda: not client.ring.used)
    client._stopping = True
    os.killpg(client.group, signal.SIGKILL)
    kit.until(lambda: not group(client.group))
    s3.clear()
    for name, rows, finish in (("aborted", 300, "abort"), ("short", 200, "length")):
        line = {"event": "start", "store": f"{name}.zarr", "state": "started", "only_complete": True}
        url = f"{BUCKET}/{prefix}/{name}.zarr"
        append_index(str(tmp_path / "s"), {**line, "created": name, "upload": "pending", "url": url})
        owner = kit.Store(1 << 20)
        losses = [Loss.of(Cause.FELL_BEHIND, [[rows, 300]])] if rows < 300 else []
        attrs = {"finish_reason": finish}
        owner.write(tmp_path / f"other/{name}.zarr", [kit.Q], 300, attrs=attrs, losses=losses)
        assert owner.shutdown()
        (tmp_path / f"other/{name}.zarr").rename(tmp_path / f"s/{name}.zarr")
    outcomes = {(Path(outcome.store or "").stem, outcome.state) for outcome in repair(tmp_path / "s")}
    recorded = {("aborted", "recorded"), ("short", "recorded")}
    assert outcomes == {("torn", "salvaged"), ("whole", "uploaded")} | recorded
    assert {key.split("/")[1] for key in s3kit.objects(prefix)} == {"whole.zarr", "index"}
    left = {name: info.upload for name, info in index(tmp_path / "s").items()}
    assert left == {"whole.zarr": "done", "torn.zarr": None, "aborted.zarr": None, "short.zarr": None}
    assert repair(tmp_path / "s") == []


def test_without_obstore_an_engine_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions.parse({"store_dir": str(tmp_path / "s"), "upload": "s3://bucket/x"})
    check_directories(options)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"^upload: s3://bucket/x needs obstore.*install dmi_connector\[remote\]"):
        check_directories(options)


def test_without_obstore_a_repair_says_what_to_install(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client()
    s3.fault = lambda _method, _path, _number: "deny"
    capture(client, tmp_path / "s/a.zarr")
    uploaded(client, 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (outcome,) = repair(tmp_path / "s")
    assert outcome.state == "not uploaded" and "install dmi_connector[remote]" in outcome.notes[0]


# ---- the backlog ------------------------------------------------------------------------------------------------


class Told:
    """Records the notes and the counts of an `Uploads`."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: dict[str, int] = {}

    def count(self, increase: dict[str, int]) -> None:
        for name, value in increase.items():
            self.counts[name] = self.counts.get(name, 0) + value


def finished(directory: Path, *names: str) -> list[str]:
    """Write finished stores, as a server without the option `upload` leaves them."""
    owner = kit.Store(1 << 20)
    for name in names:
        owner.write(directory / f"{name}.zarr", [kit.Q], 50)
    assert owner.shutdown()
    return [str(directory / f"{name}.zarr") for name in names]


def test_a_full_backlog_makes_the_engine_wait(s3: s3kit.Proxy, tmp_path: Path, prefix: str) -> None:
    told = Told()
    uploads = Uploads(UploadSettings(f"{BUCKET}/{prefix}", backlog_bytes=150), "private", told.notes.append, told.count)
    s3.fault = lambda _method, _path, _number: "hold"
    looks = threading.Semaphore(0)
    first, second = finished(tmp_path / "s", "a", "b")
    uploads.add(first, 100)
    uploads.wait_for_room(lambda: pytest.fail("there is room"))
    uploads.add(second, 100)
    assert uploads.backlog == 200
    waiter = threading.Thread(target=uploads.wait_for_room, args=(lambda: looks.release() or True,))
    waiter.start()
    for _ in range(3):
        assert looks.acquire(timeout=kit.PATIENCE)
    assert waiter.is_alive()
    s3.gate.set()
    waiter.join(kit.PATIENCE)
    assert not waiter.is_alive() and uploads.backlog <= 150
    uploads.wait_for_room(lambda: False)
    assert uploads.shutdown(kit.PATIENCE) and uploads.backlog == 0
    assert told.counts["uploaded"] == 2 and told.counts["bytes_queued"] == 200


def test_the_engine_does_not_wait_for_room_at_shutdown(s3: s3kit.Proxy, tmp_path: Path, prefix: str) -> None:
    told = Told()
    uploads = Uploads(UploadSettings(f"{BUCKET}/{prefix}", backlog_bytes=1), "private", told.notes.append, told.count)
    s3.fault = lambda _method, _path, _number: "hold"
    uploads.add(*finished(tmp_path / "s", "a"), 100)
    uploads.wait_for_room(lambda: False)
    s3.gate.set()
    assert uploads.shutdown(kit.PATIENCE)


def test_no_row_is_lost_while_uploads_are_slow(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    """The backlog is one byte, so the rows of a store are written only after the upload of the store before it."""
    client = make_client(backlog_bytes=1)
    s3.fault = lambda _method, _path, number: "slow" if number % 20 == 1 else None
    stores = [capture(client, tmp_path / f"s/{number}.zarr") for number in range(4)]
    assert client.counts()["uploaded"] >= 3, "the rows of the last came after those uploads"
    uploaded(client, 4)
    assert client.shutdown() and client.counts()["uploaded"] == 4
    assert all(there(prefix, store.name) == files(store) for store in stores)


def test_an_engine_that_shuts_down_while_it_waits_for_uploads_loses_no_row(
    s3: s3kit.Proxy, tmp_path: Path, prefix: str
) -> None:
    settings = UploadSettings(f"{BUCKET}/{prefix}", backlog_bytes=1)
    client = StoreClient(4 << 20, 1, WriteSettings(upload=vars(settings), shutdown_seconds=5))
    s3.fault = lambda _method, _path, _number: "hold"
    capture(client, tmp_path / "s/a.zarr")
    kit.until(lambda: s3.held)
    one = kit.begin(client, tmp_path / "s/b.zarr")
    for first in range(0, 300, 128):
        kit.send(client, one, first)
    one.close(300, token_ids=kit.IDS)
    assert client.shutdown() and one.state == "complete"
    assert {name: info.upload for name, info in index(tmp_path / "s").items()} == {
        "a.zarr": "pending",
        "b.zarr": "pending",
    }
    s3.clear()
    assert [outcome.state for outcome in repair(tmp_path / "s")] == ["uploaded"] * 2


def test_under_policy_drop_a_store_beyond_the_backlog_stays_local(
    s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path, prefix: str
) -> None:
    client = make_client(backlog_bytes=1, drop=True)
    s3.fault = lambda _method, _path, _number: "hold"
    first, second = (capture(client, tmp_path / f"s/{name}.zarr") for name in "ab")
    uploaded(client, 1)
    assert client.counts()["upload_failed"] == 1
    s3.gate.set()
    uploaded(client, 2)
    assert client.shutdown() and client.counts()["uploaded"] == 1
    known = index(tmp_path / "s")
    assert known[first.name].upload == "done" and known[second.name].upload == "failed"
    assert "upload_backlog_bytes: 1 bytes wait already (policy drop)" in str(known[second.name].upload_reason)
    assert [outcome.state for outcome in repair(tmp_path / "s")] == ["uploaded"]
    assert there(prefix, second.name) == files(second)


def test_an_uploader_that_always_dies_is_not_restarted_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    uploads = Uploads(UploadSettings(f"{BUCKET}/x"), "no such mode", told.notes.append, told.count)
    uploads.add(*finished(tmp_path / "s", "a"), 100)
    kit.until(lambda: told.counts.get("upload_failed"))
    assert uploads.backlog == 0 and any("died 3 times; dmi repair" in note for note in told.notes)


def test_a_store_that_retention_removed_is_reported(s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client()
    capture(client, tmp_path / "s/first.zarr")
    uploaded(client, 1)
    os.kill(pid := uploader(client), signal.SIGSTOP)
    capture(client, tmp_path / "s/a.zarr")
    assert main(["prune", str(tmp_path / "s"), "--keep-bytes", "0"]) == 0
    os.kill(pid, signal.SIGCONT)
    uploaded(client, 2)
    assert any("a.zarr was removed before it was uploaded" in text for text in client.stats()["errors"])


def test_permanent_errors_fail_at_once() -> None:
    calls: list[int] = []

    def denied() -> None:
        calls.append(1)
        raise RemoteDenied("no", lasting=True)

    with pytest.raises(RemoteDenied):
        upload.patiently(denied, float("inf"))
    assert calls == [1]


def test_a_failed_check_of_an_existing_object_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that continues an earlier one checks the objects that the earlier one has sent."""
    (tmp_path / "zarr.json").write_bytes(b"{}")
    for name in ("kept", "gone"):
        (tmp_path / name).write_bytes(b"12")
    sent: list[str] = []
    fails = iter([True])

    @contextlib.contextmanager
    def requests(to: RemotePath) -> Iterator[Any]:
        if to.name == "gone":
            raise FileNotFoundError(to)
        if next(fails, False):
            raise RemoteError("the service is busy")
        yield SimpleNamespace(head=lambda *_: {"e_tag": upload.expected_etag(tmp_path / to.name)})

    monkeypatch.setattr(upload, "read_attrs", lambda store: {"files": ["kept", "gone"], "hooks": {}})
    monkeypatch.setattr(upload, "_there", lambda to: {"kept": 2, "gone": 2})
    monkeypatch.setattr(upload, "requests_for", requests)
    monkeypatch.setattr(upload, "bucket_store", lambda to: None)
    monkeypatch.setattr(upload, "upload_file", lambda path, to: sent.append(path.name))
    upload_store(tmp_path, RemotePath("bucket", "a.zarr"), kit.PATIENCE)
    assert sent == ["gone", "zarr.json"] and next(fails, None) is None


def test_the_uploader_runs_in_its_own_process(s3: s3kit.Proxy, make_client: MakeClient, tmp_path: Path) -> None:
    """The process is a child of the coordinator, and has a higher nice level than the engine."""
    client = make_client()
    capture(client, tmp_path / "s/a.zarr")
    uploaded(client, 1)
    pid = uploader(client)
    assert pid != os.getpid() and os.getpriority(os.PRIO_PROCESS, pid) >= min(
        19, os.getpriority(os.PRIO_PROCESS, 0) + 10
    )
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "dmi-uploader"
    assert isinstance(client._child, Child)
