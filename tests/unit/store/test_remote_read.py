# SPDX-License-Identifier: Apache-2.0
"""Stores in an object store read like local ones. Requests fetch only the wanted chunks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.captures.captures import captures_of, open_captures
from dmi_connector.cli.main import main
from dmi_connector.cli.plots import Stores
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import object_store
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.object_store import RemoteDenied, RemoteError
from dmi_connector.store.format.remote_path import RemotePath, place_of
from dmi_connector.store.format.shard_index import index_bytes
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.reader import CaptureIncomplete
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.commit import append_index
from tests import s3kit
from tests import storekit as kit
from tests.shorter import soak

SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2), 64),
    ArraySpec("z", "float32", (0, 1), 32),
    ArraySpec("logits", "float32", (), 10),
)
URL = f"s3://{s3kit.BUCKET}"
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three complete stores, the store `d`, which lacks rows 32 to 63 and all rows after 127, and `a.zip` of the
    first store.
    """
    root = tmp_path_factory.mktemp("local") / "stores"
    owner = kit.Store(8 << 20)
    options = {"attrs": {"num_layers": 3}, "chunk": 32, "segment": 128}
    for name, codec in (("a", "none"), ("b", "zstd"), ("c", "lz4")):
        owner.write(root / f"{name}.zarr", SPECS, 300, 3, codec=codec, key=name, request_id=f"r-{name}", **options)
    values = {s.name: kit.random_bits(s, 300) for s in SPECS[:2]}
    record = owner.open(root / "d.zarr", *SPECS[:2], key="d", **options)
    owner.feed(record, values, 300, skip=(32, 128, 160, 192, 224, 256, 288))
    owner.close(record, 300, losses=[Loss.of(Cause.FELL_BEHIND, [[32, 64], [128, 300]])])
    assert owner.shutdown()
    assert main(["export", str(root / "a.zarr"), "--to", "zip", "-o", str(root.parent / "a.zip")]) == 0
    return root


@pytest.fixture(scope="module")
def server() -> Iterator[s3kit.Proxy]:
    with s3kit.s3_server() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def filled(server: s3kit.Proxy, stores: Path) -> s3kit.Proxy:
    """Upload the stores below `all` with the index of the directory, below `bare` without it, and the zip file below
    `zips`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3kit.environment(server).items():
            patch.setenv(name, value)
        s3kit.copy_up(stores, "all")
        for name in NAMES:
            s3kit.copy_up(stores / f"{name}.zarr", f"bare/{name}.zarr")
        s3kit.copy_up(stores / "a.zarr/z", "bare/unfinished.zarr/z")
        s3kit.copy_up(stores.parent / "a.zip", "zips/a.zip")
    return server


@pytest.fixture
def s3(filled: s3kit.Proxy, monkeypatch: pytest.MonkeyPatch) -> s3kit.Proxy:
    for name, value in s3kit.environment(filled).items():
        monkeypatch.setenv(name, value)
    filled.clear()
    return filled


@pytest.mark.parametrize("place", ["all/a.zarr", "zips/a.zip", *soak("all/b.zarr", "bare/c.zarr")])
def test_a_remote_store_reads_as_the_local_one(s3: s3kit.Proxy, stores: Path, place: str) -> None:
    name = Path(place).stem
    with open_capture(f"{URL}/{place}", 0) as there, open_capture(stores / f"{name}.zarr", 0) as here:
        assert there.attrs == here.attrs and str(there.path) == f"{URL}/{place}"
        for hook in here.hooks:
            assert np.array_equal(kit.bits(there.numpy(hook)), kit.bits(here.numpy(hook))), hook
        some = [299, 0, 31, 32, 150]
        assert np.array_equal(there.numpy("z", 1, some), here.numpy("z", 1, some))
        for plain in ("token_ids", "positions", "phase", "logits_positions"):
            assert np.array_equal(getattr(there, plain), getattr(here, plain)), plain


def test_zarr_python_reads_it_through_obstore(s3: s3kit.Proxy, stores: Path) -> None:
    with open_capture(f"{URL}/all/b.zarr", 0) as there, open_capture(stores / "b.zarr", 0) as here:
        assert np.array_equal(there.array("z")[:], here.array("z")[:])
        assert np.array_equal(kit.bits(there.array("resid_pre")[1]), kit.bits(here.array("resid_pre")[1]))
    with open_capture(f"{URL}/zips/a.zip", 0) as there, pytest.raises(ValueError, match=r"use numpy\(\)"):
        there.array("z")


# ---- requested bytes ---------------------------------------------------------------------------------------------


def test_only_wanted_chunks_are_fetched(s3: s3kit.Proxy, stores: Path) -> None:
    """For rows of one chunk, the reader requests the end of the shard, which has the index, and exactly the chunk."""
    with open_capture(f"{URL}/all/a.zarr", 0) as capture:
        s3.clear()
        capture.numpy("resid_pre", 1, slice(40, 50))
        index, chunk = s3.gets()
        assert (index.path, index.range, index.sent) == ("all/a.zarr/resid_pre/c/0/0/0", "bytes=-196", 12 * 16 + 4)
        assert (chunk.path, chunk.sent) == (index.path, 32 * 64 * 2 + 4)
        s3.clear()
        capture.numpy("resid_pre", 0, [10])  # the index is cached
        assert [r.sent for r in s3.gets()] == [32 * 64 * 2 + 4]


def test_adjacent_chunks_are_one_request(s3: s3kit.Proxy) -> None:
    with open_capture(f"{URL}/all/a.zarr", 0) as capture:
        capture.numpy("z", 0, [0])
        s3.clear()
        whole = capture.numpy("z", None, slice(0, 128))
        (only,) = s3.gets()
        assert only.sent == 2 * 4 * (32 * 32 * 4 + 4)
        s3.clear()
        assert np.array_equal(capture.numpy("z", 0, [0, 70]), whole[0, [0, 70]])
        chunks = s3.gets()
        assert [r.sent for r in chunks] == [32 * 32 * 4 + 4] * 2 and len({r.range for r in chunks}) == 2


def test_opening_reads_only_metadata(s3: s3kit.Proxy) -> None:
    with open_capture(f"{URL}/all/a.zarr", 0):
        assert {r.path.rpartition("/")[2] for r in s3.gets()} == {"zarr.json"}
        assert len(s3.gets()) == 1 + len(SPECS) + 4  # the token arrays, and the positions of logits


def test_a_zip_file_is_not_fetched_whole(s3: s3kit.Proxy, stores: Path) -> None:
    size = (stores.parent / "a.zip").stat().st_size
    with open_capture(f"{URL}/zips/a.zip", 0) as capture:
        s3.clear()
        capture.numpy("resid_pre", 1, slice(40, 50))
        assert sum(r.sent for r in s3.gets()) < 32 * 64 * 2 + 400 < size / 10


def test_small_ranges_are_fetched_concurrently(s3: s3kit.Proxy) -> None:
    """The server responds only when several requests wait."""
    with open_capture(f"{URL}/all/a.zarr", 0) as capture:
        expected = capture.numpy("resid_pre")
        s3.clear()
        s3.together = 5
        assert np.array_equal(capture.numpy("resid_pre", None, list(range(0, 300, 64))), expected[:, ::64])
        assert s3.most_at_once >= 5


def test_rows_of_many_stores(s3: s3kit.Proxy, stores: Path) -> None:
    there, here = (open_captures(place).rows("resid_pre", 2, skip=1) for place in (f"{URL}/all", stores))
    rows = np.random.default_rng(0).integers(0, len(here), 50)
    assert there.shape == here.shape and np.array_equal(there[rows], here[rows])
    s3.clear()
    there.read([0])
    assert len(s3.gets()) == 1, "metadata and index are kept"


# ---- finding stores ---------------------------------------------------------------------------------------------


def test_stores_in_the_index_are_not_opened(s3: s3kit.Proxy, stores: Path) -> None:
    found = open_captures(f"{URL}/all")
    assert [(info.store.name, info.key, info.num_tokens) for info in found.infos] == [
        (f"{name}.zarr", name, 300) for name in "abc"
    ]
    assert [r.path for r in s3.gets()] == ["all/index.jsonl"]
    assert [info.key for info in find_captures(f"{URL}/all", key="b")] == ["b"]
    both = open_captures(f"{URL}/all", key=["b", "d"], incomplete=True)
    assert [capture.attrs["key"] for capture in both] == ["b", "d"]


def test_stores_without_an_index_are_opened_and_unfinished_ones_left_out(s3: s3kit.Proxy) -> None:
    infos = open_captures(f"{URL}/bare", incomplete=True).infos
    assert sorted(info.store.name for info in infos) == [f"{name}.zarr" for name in NAMES]
    assert {r.path.rpartition("/")[2] for r in s3.gets()} == {"zarr.json"}
    assert len(open_captures(f"{URL}/zips")) == 1


def test_plot_takes_the_stores_below_a_prefix(s3: s3kit.Proxy, stores: Path) -> None:
    def read(places: list[str]) -> list[np.ndarray]:
        return [c.numpy("z", 0) for c in Stores(places, lambda path: open_capture(path, 0, allow_incomplete=True))]

    local = read([str(stores)])
    assert len(local) == 4
    for places in ([f"{URL}/bare"], [f"{URL}/all"], [f"{URL}/all/{name}.zarr" for name in NAMES]):
        assert all(map(np.array_equal, read(places), local))
    assert len(read([f"{URL}/zips"])) == 1
    with pytest.raises(ValueError, match="s3://captures/none holds no finished store"):
        Stores([f"{URL}/none"], open_capture)


def test_a_store_without_its_root_document_is_waited_for(s3: s3kit.Proxy) -> None:
    with pytest.raises(TimeoutError, match=r"unfinished\.zarr was not found after 0 s: .*not uploaded in full"):
        open_capture(f"{URL}/bare/unfinished.zarr", 0)


@pytest.mark.parametrize("bucket", ["nowhere", "my-credentials"])
def test_a_bucket_that_does_not_exist_is_not_waited_for(s3: s3kit.Proxy, bucket: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"s3://{bucket}/a\.zarr was not found: the bucket does not exist"):
        open_capture(f"s3://{bucket}/a.zarr", timeout=600)
    assert len(s3.log) == 2


def test_incomplete_stores(s3: s3kit.Proxy, stores: Path) -> None:
    with pytest.raises(CaptureIncomplete, match=r"s3://captures/all/d\.zarr is incomplete"):
        open_capture(f"{URL}/all/d.zarr", 0)
    with open_capture(f"{URL}/all/d.zarr", 0, True) as there, open_capture(stores / "d.zarr", 0, True) as here:
        assert np.array_equal(there.numpy("z"), here.numpy("z")) and not there.numpy("z")[:, 128:].any()


# ---- commands and the data set ----------------------------------------------------------------------------------


def test_verify_of_a_store_and_of_a_prefix(s3: s3kit.Proxy, stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{URL}/all"]) == 0
    assert "4 checked, 0 damaged" in capsys.readouterr().out
    assert main(["verify", f"{URL}/zips/a.zip"]) == 0
    assert main(["verify", f"{URL}/bare"]) == 0, "an upload that has not ended is left out"
    assert "4 checked, 0 damaged" in capsys.readouterr().out
    s3.clear()
    assert verify_store(f"{URL}/all/a.zarr") == []
    assert not any("delimiter" in r.query for r in s3.log), "other stores are not listed"
    data = [r.path for r in s3.gets("all/a.zarr/")]
    assert len(data) == len(set(data)) and not any(r.range for r in s3.gets("all/a.zarr/")), "each object once"


def test_verify_finds_damage(s3: s3kit.Proxy, stores: Path, tmp_path: Path) -> None:
    shutil.copytree(stores / "a.zarr", tmp_path / "bad.zarr")
    shard = tmp_path / "bad.zarr/z/c/0/1/0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    (tmp_path / "bad.zarr/phase/c/0").unlink()
    (tmp_path / "bad.zarr/more").write_text("x")
    s3kit.copy_up(tmp_path / "bad.zarr", "damaged/bad.zarr")
    there = [(p.where, p.what) for p in verify_store(f"{URL}/damaged/bad.zarr")]
    assert there == [(p.where, p.what) for p in verify_store(tmp_path / "bad.zarr")] and len(there) >= 3
    damaged = pytest.raises(ValueError, match=r"bad\.zarr/z/c/0/1/0: the chunk does not match its crc32c")
    with open_capture(f"{URL}/damaged/bad.zarr", 0) as capture, damaged:
        capture.numpy("z")


@pytest.mark.parametrize("offset", [1 << 20, 1 << 62])
def test_a_chunk_beyond_the_end_of_an_object_is_damage(
    s3: s3kit.Proxy, stores: Path, tmp_path: Path, offset: int
) -> None:
    shutil.copytree(stores / "a.zarr", tmp_path / "a.zarr")
    shard, index = tmp_path / "a.zarr/z/c/0/1/0", np.full((2, 4, 2), offset, "<u8")
    index[..., 1] = 32 * 32 * 4 + 4
    shard.write_bytes(shard.read_bytes()[: -16 * 8 - 4] + index_bytes(index))
    s3kit.copy_up(tmp_path / "a.zarr", f"beyond/{offset}/a.zarr")
    damaged = pytest.raises(ValueError, match=r"a\.zarr/z/c/0/1/0: the file ends before its chunks do")
    with open_capture(f"{URL}/beyond/{offset}/a.zarr", 0) as capture, damaged:
        capture.numpy("z")


def test_verify_fetches_objects_of_any_name(s3: s3kit.Proxy, stores: Path, tmp_path: Path) -> None:
    """The temporary directory has numbers as names, because the names of objects are not paths here."""
    import obstore

    from dmi_connector.store.format.object_store import bucket_store

    s3kit.copy_up(stores / "c.zarr", "odd/c.zarr")
    for name in ("%2e%2e/%2e%2e/evil", "~evil", "CON", "a" * 300):
        obstore.put(bucket_store(RemotePath(s3kit.BUCKET)), f"odd/c.zarr/{name}", b"x")
    found = {p.where for p in verify_store(f"{URL}/odd/c.zarr") if p.what == "the file is not listed"}
    assert len(found) == 4 and "~evil" in found


def test_info_ls_and_export(s3: s3kit.Proxy, stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", f"{URL}/all/b.zarr"]) == 0 and main(["info", f"{URL}/zips/a.zip"]) == 0
    assert main(["ls", f"{URL}/all"]) == 0
    assert "a.zarr" in capsys.readouterr().out
    out = tmp_path / "again.zip"
    assert main(["export", f"{URL}/all/a.zarr", "--to", "zip", "-o", str(out)]) == 0
    assert out.read_bytes() == (stores.parent / "a.zip").read_bytes()
    for place, name in ((f"{URL}/all/b.zarr", "there"), (str(stores / "b.zarr"), "here")):
        assert main(["export", place, "--to", "safetensors", "--layers", "1,2", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert len(captures_of([f"{URL}/all", stores / "a.zarr"])) == 4


@pytest.mark.parametrize("workers", [0, 1, *soak(2)])
def test_the_torch_data_set_reads_remote_stores(s3: s3kit.Proxy, stores: Path, workers: int) -> None:
    torch = pytest.importorskip("torch")
    from dmi_connector import TokenDataset

    there, here = (
        TokenDataset(open_captures(place), ["resid_pre@1", "z@0"], 64, seed=1, buffer_tokens=256)
        for place in (f"{URL}/all", stores)
    )
    count = 0
    for one, other in zip(there.loader(workers), here.loader(workers), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
        count += 1
    assert count == here.batches(workers=max(1, workers))


def test_a_forked_process_is_refused_instead_of_waiting_forever(s3: s3kit.Proxy) -> None:
    from torch.utils.data import DataLoader

    from dmi_connector import TokenDataset

    data = TokenDataset(open_captures(f"{URL}/all"), "z@0", 64)
    with pytest.raises(RuntimeError, match=r"forked after the first request.*multiprocessing_context='spawn'"):
        list(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["cut", "break", *soak("500", "slow")])
def test_transient_failures_are_retried(s3: s3kit.Proxy, stores: Path, what: str) -> None:
    with open_capture(stores / "a.zarr", 0) as here:
        expected = here.numpy("z")
    s3.fault = lambda _method, _path, number: what if number % 3 == 1 else None
    with open_capture(f"{URL}/all/a.zarr", 0) as capture:
        assert np.array_equal(capture.numpy("z"), expected)
    assert s3.faults > 2


def test_a_request_without_a_response_times_out_and_is_retried(
    s3: s3kit.Proxy, stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TIMEOUT_S", "_RETRY_S"):  # 30 times shorter
        monkeypatch.setattr(object_store, name, getattr(object_store, name) / 30)
    object_store._client.cache_clear()
    s3.fault = lambda _method, _path, number: "hold" if number in (1, 4) else None
    with open_capture(f"{URL}/all/a.zarr", 0) as there, open_capture(stores / "a.zarr", 0) as here:
        assert np.array_equal(there.numpy("z"), here.numpy("z"))
    assert s3.held == 2
    object_store._client.cache_clear()


def test_access_denied_names_the_fix_and_no_secret(s3: s3kit.Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    s3.fault = lambda _method, _path, _number: "deny"
    for call in (lambda: open_capture(f"{URL}/all/a.zarr", 0), lambda: open_captures(f"{URL}/all")):
        with pytest.raises(
            RemoteDenied, match=r"^s3://captures/all.*: access denied \(status 403.*AWS_ACCESS_KEY_ID"
        ) as e:
            call()
        assert not s3kit.holds_secret(repr(e.getrepr(chain=True, funcargs=True)))
    assert main(["verify", f"{URL}/all/a.zarr"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("dmi: s3://captures/all") and not s3kit.holds_secret(text)


def test_no_bucket_no_store_and_no_server(s3: s3kit.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^s3://captures/nowhere holds no store and no index"):
        open_captures(f"{URL}/nowhere")
    with pytest.raises(FileNotFoundError, match=r"^s3://no-such-bucket/x"):
        open_captures("s3://no-such-bucket/x")
    with pytest.raises(TimeoutError, match=r"it is not in the bucket"):
        open_capture(f"{URL}/all/e.zarr", 0)
    s3.fault = lambda _method, _path, _number: "bad"
    with pytest.raises(
        RemoteError, match=r"^s3://captures/all.*unexpected response of the object store \(status 400, BadThing\)"
    ):
        open_captures(f"{URL}/all")


def test_a_profile_needs_boto3(s3: s3kit.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    with pytest.raises(ImportError, match=r"^AWS_PROFILE: a profile needs boto3; install boto3"):
        open_captures(f"{URL}/all")


@pytest.mark.skipif(not s3kit.PYTHON.exists(), reason=s3kit.NOT_THERE)
@pytest.mark.parametrize("profile, error", [("misspelt", "ProfileNotFound"), ("empty", "ValueError")])
def test_the_error_names_a_profile_without_credentials(stores: Path, tmp_path: Path, profile: str, error: str) -> None:
    """`dmi repair` names it too, after the outcomes of the partial stores."""
    (tmp_path / "credentials").write_text("[empty]\nregion = x\n")
    shutil.copytree(stores / "a.zarr", tmp_path / "stores/a.zarr")
    (tmp_path / "stores/b.zarr.partial").mkdir()
    upload = {"upload": "failed", "url": f"{URL}/all/a.zarr"}
    for line in ({"event": "finish", "state": "complete", "finished": "2026"}, {"event": "upload", **upload}):
        append_index(str(tmp_path / "stores"), {**line, "store": "a.zarr"})
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= {"AWS_PROFILE": profile, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    environment |= {"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_EC2_METADATA_DISABLED": "true"}
    environment |= {"PYTHONPATH": str(s3kit.ROOT)}

    def dmi(*arguments: str) -> tuple[int, str, str]:
        code = f"from dmi_connector.cli.main import main; raise SystemExit(main({list(arguments)}))"
        command = [str(s3kit.PYTHON), "-c", code]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=kit.PATIENCE)
        return run.returncode, run.stdout, run.stderr

    said = f"AWS_PROFILE: the profile '{profile}' gives no credentials ({error}); name a profile of ~/.aws, or set"
    status, _, err = dmi("verify", f"{URL}/all/a.zarr")
    assert status == 2 and err.startswith(f"dmi: {said}") and "Traceback" not in err
    status, out, err = dmi("repair", str(tmp_path / "stores"))
    assert status == 1 and "b.zarr.partial: " in out and "a.zarr: not uploaded" in out and said in out, err


def test_a_profile_of_the_aws_files(s3: s3kit.Proxy, tmp_path: Path) -> None:
    """boto3 reads them. It is installed in the server's environment. The proxy records which key signed the
    requests.
    """
    written = f"[mine]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = {s3kit.SECRET}\n"
    (tmp_path / "credentials").write_text(written)
    environment = {k: v for k, v in os.environ.items() if k not in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    environment |= {"AWS_PROFILE": "mine", "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    environment |= {"PYTHONPATH": str(s3kit.ROOT)}
    code = f"from dmi_connector.cli.main import main; raise SystemExit(main(['verify', '{URL}/all/a.zarr']))"
    run = subprocess.run(
        [str(s3kit.PYTHON), "-c", code], env=environment, capture_output=True, text=True, timeout=kit.PATIENCE
    )
    assert run.returncode == 0, run.stderr
    assert s3.keys == {"AKIAPROFILE"} and not s3kit.holds_secret(run.stdout + run.stderr)


@pytest.mark.parametrize(
    "url, words",
    [
        ("gs://captures/x", "has the scheme 'gs', which is not supported"),
        ("s3://Captures/x", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://captures/a/../b", "has a prefix that is not valid"),
        ("s3://captures/a//b", "has a prefix that is not valid"),
        ("s3://key:hush-hush@captures/x", "holds a user name or a query"),
        ("s3://captures/x?X-Amz-Signature=hush-hush", "holds a user name or a query"),
    ],
)
def test_bad_urls_name_the_fix_and_no_secret(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^path: .*{words}.*; give a URL as in s3://bucket/prefix") as error:
        open_capture(url, 0)
    assert "hush-hush" not in str(error.value)


def test_without_obstore_the_extra_is_named() -> None:
    """Modules for local stores can be imported."""
    code = """
import sys
sys.modules["obstore"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "obstore" else find(name, *rest)
from dmi_connector import open_capture
from dmi_connector.cli.main import main
from dmi_connector.cli.plots import Stores
try:
    open_capture("s3://captures/a.zarr", 0)
except ImportError as error:
    print(error)
sys.exit(main(["verify", "s3://captures/a.zarr"]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=kit.PATIENCE)
    assert run.returncode == 2
    assert run.stdout.startswith("path: s3://captures/a.zarr") and "install dmi_connector[remote]" in run.stdout
    assert "install dmi_connector[remote]" in run.stderr


@pytest.mark.parametrize("command", ["view", "tail", "prune", "repair"])
def test_commands_that_do_not_take_urls_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "s3://captures/x"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("dmi: s3://captures/x is a URL, which this command does not take; give a ")
    assert main([command, "s3://key:hush-hush@captures/x"]) == 2
    assert "hush-hush" not in capsys.readouterr().err


def test_locations_are_parsed() -> None:
    place = place_of("s3://bucket/a/b.zarr/")
    assert place == RemotePath("bucket", "a/b.zarr") and str(place) == "s3://bucket/a/b.zarr"
    assert (place.name, place.stem, place.suffix, str(place.parent)) == ("b.zarr", "b", ".zarr", "s3://bucket/a")
    assert str(place_of("s3://bucket") / "x") == "s3://bucket/x" and place.absolute() is place
    assert place_of(place) is place and place_of("a/b") == Path("a/b")


@pytest.mark.parametrize(
    "name", ["AWS_SKIP_SIGNATURE", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"]
)
def test_a_variable_that_is_set_later_takes_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may set it in the same process, after an error that names it."""
    for other in [other for other in os.environ if other.startswith("AWS_")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
    place = RemotePath("captures", "x")
    before = object_store.bucket_store(place)
    assert object_store.bucket_store(place) is before
    monkeypatch.setenv(name, "true")
    assert object_store.bucket_store(place) is not before


def test_an_endpoint_without_a_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(RemoteError, match="AWS_ENDPOINT_URL: 'localhost:9000' is not a URL") as raised:
        object_store.bucket_store(RemotePath("captures", "x"))
    assert raised.value.lasting
