# SPDX-License-Identifier: Apache-2.0
"""The guarantees of docs/OPERATIONS.md: the paths of stores, who can read them, and which stores a reader accepts."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.captures.captures import open_captures
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.option_values import OptionError
from dmi_connector.reduce import parse
from dmi_connector.request_options import CaptureParams
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.paths import UMASKS, custom_directory, store_name
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.coordinator.directories import check_directories
from dmi_connector.store.write.finish.commit import append_index, write_rank_done
from dmi_connector.store.write.finish.repair import repair
from dmi_connector.store.write.ring import Ring
from dmi_connector.store.write.settings import WriteSettings
from tests import storekit as kit
from tests.trackerkit import ask, generate, make_tracker

Q = ArraySpec("q", "float32", (0, 1), 16)
ROOT = Path(__file__).parents[2]

# ---- paths of stores --------------------------------------------------------------------------------------------

HOSTILE = ["../../etc/x", "/etc/passwd", "a/../../b", "a\0b", "..", ".", "", "-rf", "x" * 5000, "é\ud800\u202e", "a\nb"]


@pytest.mark.parametrize("request_id", HOSTILE)
def test_store_names_are_unique_and_safe_for_any_key_and_request_id(request_id: str) -> None:
    """Clients choose request ids (X-Request-Id). Keys are checked earlier, but are tested here too."""
    for key in (None, request_id):
        names = {store_name(key, request_id) for _ in range(50)}
        assert len(names) == 50, "two requests with the same id must have different stores"
        for name in names:
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*-[0-9a-f]{12}\.zarr", name)
            assert len(os.fsencode(name + ".partial")) < 200


@pytest.mark.parametrize("key", [k for k in HOSTILE if k != "-rf"] + ["-rf", ".hidden", "a b", "k" * 129])
def test_hostile_keys_are_refused(key: str) -> None:
    with pytest.raises(OptionError, match=r"^dmi\.key: "):
        CaptureParams.parse({"dmi": {"key": key}})


@pytest.fixture
def client() -> Any:
    c = StoreClient(1 << 20)
    yield c
    c.shutdown(kit.PATIENCE)


def capture(client: StoreClient, path: Path, rows: int = 20) -> Any:
    """Write a store of `rows` rows of Q, and wait for its end."""
    layout = client.register(PayloadLayout((Q,), codec="none"))
    capture = client.open_capture(layout, str(path), {"prompt_len": rows, "start": 0}, "r", "k")
    header = np.stack([np.arange(rows, dtype="<i4")] * 2, axis=1)
    payload = np.concatenate([kit.random_bits(Q, rows).view("u1").ravel(), header.view("u1").ravel()])
    extent = client.ring.alloc(payload.nbytes, 10)
    assert extent is not None
    client.ring.view(extent)[:] = payload
    capture.chunk(extent, 0, rows)
    capture.close(rows, token_ids=np.arange(rows))
    assert client.flush(kit.PATIENCE)
    return capture


@pytest.mark.parametrize("dangling", [False, True])
def test_a_planted_partial_directory_is_not_followed(client: StoreClient, tmp_path: Path, dangling: bool) -> None:
    outside = tmp_path / "outside"
    if not dangling:
        outside.mkdir()
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "a.zarr.partial").symlink_to(outside)
    found = capture(client, tmp_path / "stores" / "a.zarr")
    assert found.state == "failed" and found.reason
    assert not outside.exists() if dangling else not any(outside.iterdir())
    assert [o.state for o in repair(tmp_path / "stores")] == ["failed"], "a repair must not follow the link either"
    with pytest.raises(OSError, match="is a link"):
        write_rank_done({"partial": str(tmp_path / "stores" / "a.zarr.partial"), "rank": 1})
    assert capture(client, tmp_path / "stores" / "b.zarr").state == "complete", "other captures must be complete"


def test_a_planted_final_name_is_not_followed(client: StoreClient, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "a.zarr").symlink_to(tmp_path / "outside")
    found = capture(client, tmp_path / "a.zarr")
    assert found.state == "failed" and "exists already" in str(found.reason)
    assert not any((tmp_path / "outside").iterdir())


def test_a_planted_index_is_not_followed(client: StoreClient, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "index.jsonl").symlink_to(tmp_path / "victim")
    capture(client, tmp_path / "stores" / "a.zarr")
    assert (tmp_path / "victim").read_text() == "mine" and client.counts()["failed"] == 0
    assert verify_store(tmp_path / "stores" / "a.zarr") == [], "the store itself must be valid"
    os.mkfifo(tmp_path / "index.jsonl")
    with pytest.raises(OSError, match="is not a file"):
        append_index(str(tmp_path), {"event": "start", "store": "a.zarr"})


def test_custom_paths_stay_below_their_roots_and_follow_no_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "real").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "real" / "deep").symlink_to(outside)
    (root / "file").write_text("")
    (tmp_path / "root2").mkdir()
    made = custom_directory(f"{root}/real/new//er", [str(outside / "no"), str(root)], "group")
    assert made == f"{root}/real/new/er"
    assert [stat.S_IMODE(os.stat(d).st_mode) for d in (made, root / "real/new")] == [0o750, 0o750]
    assert custom_directory(str(root), [str(root)], "private") == str(root)
    refused = ["link", "link/x", "real/deep", "real/deep/x", "file", "file/x", "a.zarr", "real/b.zarr.partial/q"]
    for path in [*(f"{root}/{p}" for p in refused), f"{root}2", f"{root}2/x", "/", "/etc", str(tmp_path)]:
        with pytest.raises(OptionError, match=r"^dmi\.save_path: '/.*; give a directory below one of "):
            custom_directory(path, [str(root)], "private")
    assert not any(outside.iterdir()) and not any((tmp_path / "root2").iterdir())
    for path in ("relative", f"{root}/../outside", f"{root}/.", "a\0b", "/" + "x" * 256, 5, ["/x"], "", "/\ud800"):
        with pytest.raises(OptionError, match=r"^dmi\.save_path: "):
            CaptureParams.parse({"dmi": {"save_path": path}})


def test_custom_paths_need_allow_custom_save_path(client: StoreClient, tmp_path: Path) -> None:
    root, stores = tmp_path / "root", tmp_path / "stores"
    root.mkdir()
    asked = {"dmi": {"save_path": f"{root}/mine", "key": "k"}}
    for options in ({}, {"save_path_roots": [str(root)]}):
        tracker = make_tracker(stores, **options)
        tracker.on_new_request(ask(asked))  # type: ignore[arg-type]
        _, response = generate(tracker, ask(asked), 1)
        assert response is not None and "allow_custom_save_path" in response["dmi_error"], response
        assert "leave it out" in response["dmi_error"] and not any(root.iterdir())
    tracker = make_tracker(stores, allow_custom_save_path=True, save_path_roots=str(root))
    request = ask(asked)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    steps, response = generate(tracker, request, 1)
    assert response is not None and Path(response["dmi_store"]).parent == root / "mine"
    assert steps[0].opens[0].path == response["dmi_store"]
    assert capture(client, Path(response["dmi_store"])).state == "complete"
    assert [str(c.store) for c in find_captures(root / "mine", key="k")] == [response["dmi_store"]]
    assert not stores.exists()
    with pytest.raises(OptionError, match=r"^allow_custom_save_path: True needs save_path_roots"):
        ServerOptions.parse({"store_dir": "/x", "allow_custom_save_path": True})


def test_a_missing_save_path_root_is_refused_when_the_engine_starts(tmp_path: Path) -> None:
    options = {"store_dir": str(tmp_path / "s"), "allow_custom_save_path": True, "save_path_roots": f"{tmp_path}/no"}
    with pytest.raises(ValueError, match=r"^save_path_roots: '.*/no' is not a directory; create it or leave it out"):
        check_directories(ServerOptions.parse(options))
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700, (
        "the store directory must be created with private mode"
    )


# ---- permissions of stores --------------------------------------------------------------------------------------


def modes(directory: Path) -> list[tuple[Path, int]]:
    """(path, type and mode) of a directory and everything in it."""
    return [(path, path.lstat().st_mode) for path in [directory, *directory.rglob("*")]]


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", UMASKS)
def test_every_file_and_directory_has_the_mode_of_file_mode(tmp_path: Path, mode: str, umask: int) -> None:
    """This includes partial stores, the index and the store directory. The umask of the engine does not matter."""
    directory, file = {"private": (0o700, 0o600), "group": (0o750, 0o640), "world": (0o755, 0o644)}[mode]
    stores = tmp_path / "stores"
    arrays = [Q, ArraySpec("logits", "float32", (), 8)]
    before = os.umask(umask)
    try:
        owner = kit.Store(1 << 20, 2, WriteSettings(file_mode=mode))
        owner.write(stores / "a.zarr", arrays, 300, 3)
        owner.write(stores / "b.zarr", arrays, 300, 3, wait=False)
        assert owner.flush(kit.PATIENCE)
        record = owner.open(stores / "c.zarr", Q, attrs={"prompt_len": 300})
        owner.feed(record, {"q": kit.random_bits(Q, 256)}, 256)
        assert owner.shutdown(kit.PATIENCE)  # c.zarr is never closed, so it stays partial
        present = modes(stores)
        assert [o.state for o in repair(stores)] == ["salvaged"]
    finally:
        os.umask(before)
    assert {p.name for p in stores.iterdir()} == {"a.zarr", "b.zarr", "c.zarr", "index.jsonl"}
    assert any(p.name.startswith(".journal-") for p, _ in present)
    for path, found in present + modes(stores):
        assert found in (stat.S_IFDIR | directory, stat.S_IFREG | file), f"{path} has mode {found:o}"


def test_the_ring_has_no_file() -> None:
    ring = Ring(1 << 20)
    link = os.readlink(f"/proc/self/fd/{ring.fd}")
    assert link.startswith("/memfd:") and os.fstat(ring.fd).st_nlink == 0
    ring.close()


# ---- stores that a reader refuses -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stores, path = kit.Store(1 << 20), tmp_path_factory.mktemp("sound") / "a.zarr"
    stores.write(path, [Q, ArraySpec("logits", "float32", (), 8)], 20, 2)
    assert stores.shutdown(kit.PATIENCE)
    open_capture(path, 0)
    assert verify_store(path) == []
    return path


@pytest.fixture
def sound(written: Path, tmp_path: Path) -> Path:
    """A copy of the store, which the test may forge."""
    return Path(shutil.copytree(written, tmp_path / "a.zarr"))


def forge(store: Path, name: str, change: dict[str, Any], attrs: dict[str, Any] | None = None) -> None:
    """Change the metadata of an array, and correct every checksum."""
    root = json.loads((store / "zarr.json").read_bytes())
    known = root["attributes"]["dmi"]
    if name:
        path = store / name / "zarr.json"
        data = schema.dump({**json.loads(path.read_bytes()), **change})
        path.write_bytes(data)
        known["files"][f"{name}/zarr.json"] = [len(data), crc32c(data)]
    known.update(attrs or {})
    known["checksum"] = crc32c(schema.canonical(known))
    (store / "zarr.json").write_bytes(schema.dump(root))


PLAIN = [{"name": "bytes", "configuration": {"endian": "little"}}]
SHARDING = {"chunk_shape": [1, 20, 16], "index_codecs": PLAIN, "index_location": "end"}
FORGED: dict[str, dict[str, Any]] = {
    "object dtype": {"data_type": "object"},
    "v2 object dtype": {"data_type": "|O"},
    "strings": {"data_type": "string"},
    "named dtype": {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 1}}},
    "pickle": {"codecs": [{"name": "numcodecs.pickle", "configuration": {"protocol": 4}}]},
    "pickle behind bytes": {"codecs": [*PLAIN, {"name": "pickle"}]},
    "pickle in shards": {
        "codecs": [{"name": "sharding_indexed", "configuration": {**SHARDING, "codecs": [{"name": "pickle"}]}}]
    },
    "unknown codec": {"codecs": [*PLAIN, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]},
    "no codecs": {"codecs": None},
    "codec is text": {"codecs": ["bytes"]},
    "no configuration": {"codecs": [{"name": "sharding_indexed"}]},
    "configuration is a list": {"codecs": [{"name": "sharding_indexed", "configuration": []}]},
    "transformer": {"storage_transformers": [{"name": "evil"}]},
    "more keys": {"consolidated_metadata": {}},
}
SHAPELESS: dict[str, dict[str, Any]] = {
    "attributes": {"attributes": []},
    "layers": {"attributes": {"layers": [0, [None]]}},
    "shape": {"shape": []},
}


@pytest.mark.parametrize("name", ["q", "token_ids", "logits_positions"])
@pytest.mark.parametrize("kind", FORGED)
def test_readers_refuse_unknown_dtypes_codecs_and_transformers(sound: Path, kind: str, name: str) -> None:
    forge(sound, name, FORGED[kind])
    with pytest.raises(ValueError, match=rf"the metadata of array '{name}' has .*"):
        open_capture(sound, 0)
    assert any(name in p.where or name in p.what for p in verify_store(sound))


@pytest.mark.parametrize("kind", SHAPELESS)
def test_readers_refuse_metadata_of_other_types(sound: Path, kind: str) -> None:
    forge(sound, "q", SHAPELESS[kind])
    with pytest.raises(ValueError, match="does not describe shards of this format"):
        open_capture(sound, 0).numpy("q")
    assert "q" in [p.where for p in verify_store(sound)]


def test_readers_refuse_an_infinite_shape(sound: Path) -> None:
    path = sound / "q" / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b"20,", b"1e400,", 1))  # Python's JSON parser reads it as infinity
    with pytest.raises(ValueError, match="does not describe shards of this format"):
        open_capture(sound, 0).numpy("q")


@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("name", ["token_ids", "logits_positions"])
def test_readers_refuse_a_file_of_values_that_is_cut_short(sound: Path, name: str, left: int) -> None:
    """After a power failure, a file system may leave a new file truncated."""
    (sound / name / "c" / "0").write_bytes(bytes(left))
    with open_capture(sound, 0) as capture, pytest.raises(ValueError, match=f"{name}: its chunk is cut"):
        getattr(capture, name)


def test_readers_refuse_a_token_array_with_neither_shape_nor_values(sound: Path) -> None:
    path = sound / "token_ids" / "zarr.json"
    path.write_bytes(schema.dump({k: v for k, v in json.loads(path.read_bytes()).items() if k != "shape"}))
    (sound / "token_ids" / "c" / "0").unlink()
    with pytest.raises(ValueError, match="token_ids: its chunk is missing"):
        _ = open_capture(sound, 0).token_ids


@pytest.mark.parametrize("rows", [0, 20 << 40, 20 << 60])
def test_readers_refuse_shards_that_no_file_has(sound: Path, rows: int) -> None:
    grid = json.loads((sound / "q" / "zarr.json").read_bytes())["chunk_grid"]
    grid["configuration"]["chunk_shape"][1] = rows
    forge(sound, "q", {"chunk_grid": grid})
    with pytest.raises(ValueError, match="does not describe shards of this format" if not rows else "shard index of"):
        open_capture(sound, 0).numpy("q")
    assert any(p.where.startswith("q") for p in verify_store(sound))


@pytest.mark.parametrize("name", ["prompt_len", "start", "missing", "hooks", "files"])
@pytest.mark.parametrize("value", [..., None, 1.5, "x"])
def test_readers_refuse_a_store_without_an_attribute_that_all_have(sound: Path, name: str, value: object) -> None:
    """`...` removes the attribute."""
    root = json.loads((sound / "zarr.json").read_bytes())
    known = root["attributes"]["dmi"]
    known.pop(name) if value is ... else known.update({name: value})
    known["checksum"] = crc32c(schema.canonical(known))
    (sound / "zarr.json").write_bytes(schema.dump(root))
    said = f"its 'dmi' attribute has no valid {name}"
    with pytest.raises(ValueError, match=f"{said}$"):
        open_capture(sound, 0)
    assert [info.state for info in find_captures(sound.parent, on_error="skip")] == ["failed"]
    assert [(p.where, p.what) for p in verify_store(sound)] == [("zarr.json", said)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("missing", [part]) for part in (1, "x", [1], [0, "x"], [0, 1, 2], [0, 1.5])),
        *(("start", value) for value in (-1, 10**20)),
        *(("num_layers", value) for value in ("x", [1], -1, 10**20)),
        *(("dims", value) for value in ([], {"heads": None}, {"heads": 1.5}, {"head_dim": -1})),
        *(("media", value) for value in (None, 3, ["x"], [{}], [{"positions": [1]}])),
        *(("hooks", {"q": hook}) for hook in (None, [], {}, {"array": "q"}, {"layers": []})),
        *(("hooks", {"q": {"array": "q", "layers": value}}) for value in (None, 1, ["x"], [[0]], [-1], [10**20])),
        *(("hooks", {"q": {"array": "q", "layers": [0], "reduce": value}}) for value in (1, "x", [1])),
        ("model", 3),
    ],
)
def test_readers_refuse_attributes_whose_parts_have_other_types(sound: Path, name: str, value: object) -> None:
    forge(sound, "", {}, {name: value})
    said = f"its 'dmi' attribute has no valid {name}"
    with pytest.raises(ValueError, match=f"{said}$"):
        open_capture(sound, 0)
    assert ("zarr.json", said) in [(p.where, p.what) for p in verify_store(sound)]


HOOK = {"array": "q", "layers": [0, 1], "width": 16, "dtype": "float32", "shards": 1}
MALFORMED: list[tuple[str, object]] = [
    ("num_tokens", -1),
    ("num_tokens", True),
    ("num_tokens", 10**30),
    ("start", 10**30),
    ("missing", [5]),
    ("missing", [[1, 2, 3]]),
    ("missing", [[-5, 3]]),
    ("hooks", {"q": 5}),
    ("hooks", {"q": {}}),
    ("hooks", {"q": {**HOOK, "layers": None}}),
    ("hooks", {"q": {**HOOK, "layers": ["x"]}}),
    ("hooks", {"q": {**HOOK, "reduce": 5}}),
    ("files", {"q/zarr.json": 5}),
    ("num_layers", [5]),
    ("media", 5),
    ("media", [5]),
    ("draft_tokens", 1.5),
    ("draft_tokens", {"scheduled": "x"}),
    ("files", {"q/zarr.json": [1 << 63, 5]}),
    ("scores", [5]),
    ("scores", {"risk": 5}),
    ("experts", {"count": 4}),
    *((name, "x") for name in ("last_prompt_len", "visual_layers", "mlp_layers")),
    *((name, 5) for name in ("key", "request_id", "created", "finished")),
    ("speculative", None),
]


@pytest.mark.parametrize(("name", "value"), MALFORMED)
def test_readers_refuse_malformed_attributes(sound: Path, name: str, value: object) -> None:
    """The attribute has the wrong type, or invalid content."""
    forge(sound, "", {}, {name: value})
    said = f"its 'dmi' attribute has no valid {name}"
    with pytest.raises(ValueError, match=f"{said}$"):
        open_capture(sound, 0)
    assert [p.what for p in verify_store(sound)] == [said]


@pytest.mark.parametrize(
    "change", [{"shards": 0}, {"shards": None}, {"shards": "x"}, {"dtype": {}}, {"reduce": {"kind": "int8"}}]
)
def test_readers_refuse_damaged_reductions(sound: Path, change: dict[str, Any]) -> None:
    hook = {**HOOK, "reduce": {"kind": "int8", "width": 16, "dtype": "float32"}, **change}
    attrs = json.loads((sound / "zarr.json").read_bytes())["attributes"]["dmi"]
    forge(sound, "", {}, {"hooks": {**attrs["hooks"], "q": hook}})
    with pytest.raises(ValueError, match="the reduction of 'q' is damaged"):
        open_capture(sound, 0).numpy("q")
    assert "q" in [p.where for p in verify_store(sound)]


def test_readers_refuse_settings_of_reductions_of_other_types(sound: Path) -> None:
    attrs = json.loads((sound / "zarr.json").read_bytes())["attributes"]["dmi"]
    hook = {**HOOK, "reduce": {"kind": "cs", "k": 1.5, "width": 16, "dtype": "float32"}}
    forge(sound, "", {}, {"hooks": {**attrs["hooks"], "q": hook}})
    with open_capture(sound, 0) as capture:
        for read in (capture.numpy, capture.shape):
            with pytest.raises(ValueError, match="values of cs cannot be decoded"):
                read("q")


def test_readers_refuse_indexes_beyond_the_width(tmp_path: Path) -> None:
    """Rows of topk(4) of 16 values, with the index 0xC8C8."""
    kept = {"kind": "topk", "k": 4, "width": 16, "dtype": "float32"}
    spec = ArraySpec("mlp_post", "uint8", (0, 1), parse("topk(4)").stored_width(16, "float32"), reduce=kept)
    stores, path = kit.Store(1 << 20), tmp_path / "a.zarr"
    stores.write(path, [spec], 20, values={"mlp_post": np.full((2, 20, spec.width), 200, np.uint8)})
    assert stores.shutdown(kit.PATIENCE)
    with pytest.raises(
        ValueError, match=r"a\.zarr: values of topk cannot be decoded \(a row of topk.*; dmi verify says which"
    ):
        open_capture(path, 0).numpy("mlp_post")
    with pytest.raises(ValueError, match=r"a\.zarr: values of topk cannot be decoded"):
        open_captures(tmp_path).rows("mlp_post", 0)[:]
    assert any("cannot be decoded" in problem.what for problem in verify_store(path))


def test_media_of_a_store_with_another_number_of_tokens_are_those_of_its_positions(sound: Path) -> None:
    media = [{"modality": "image", "hash": "a", "positions": [[2, 4]]}]
    forge(sound, "", {}, {"num_tokens": 0, "media": media})
    assert np.flatnonzero(open_capture(sound, 0).media == 0).tolist() == [2, 3]
    assert verify_store(sound)


def test_readers_name_the_array_whose_numbers_are_too_long(sound: Path) -> None:
    (sound / "q" / "zarr.json").write_text(f'{{"shape": [{"1" * 5000}]}}')
    with pytest.raises(ValueError, match="the metadata of array 'q' cannot be read"):
        open_capture(sound, 0)


@pytest.mark.parametrize("name", ["", "q/", "token_ids/"])
def test_readers_refuse_deep_json(sound: Path, name: str) -> None:
    (sound / f"{name}zarr.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match=r"(zarr\.json|array '\w+') cannot be read"):
        open_capture(sound, 0)
    assert verify_store(sound)[0].where == f"{name}zarr.json"


@pytest.mark.parametrize("array", ["../b.zarr/q", "/etc", "..", "q/../q", "", 5, ["q"], "token_ids"])
def test_readers_stay_inside_the_store(sound: Path, array: object) -> None:
    """The attribute `hooks` cannot name files elsewhere. verify also refuses another array of the same store."""
    hook = {"array": array, "layers": [0, 1], "width": 16, "dtype": "float32", "shards": 1}
    attrs = json.loads((sound / "zarr.json").read_bytes())["attributes"]["dmi"]
    orphans = [path for path in sorted(attrs["files"]) if path.startswith("q/")]
    forge(sound, "", {}, {"hooks": {**attrs["hooks"], "q": hook}})
    if array != "token_ids":
        with pytest.raises(ValueError, match="is not the name of an array"):
            open_capture(sound, 0)
    problems = verify_store(sound)
    assert [p.where for p in problems] == [*orphans, "q"]
    assert {p.what for p in problems[:-1]} == {"the file belongs to no array"}


def test_consolidated_metadata_is_not_read(sound: Path) -> None:
    expected = open_capture(sound, 0).numpy("q")
    root = json.loads((sound / "zarr.json").read_bytes())
    evil = {**json.loads((sound / "q" / "zarr.json").read_bytes()), **FORGED["pickle"], "shape": [1, 1, 1]}
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": {"q": evil}}
    (sound / "zarr.json").write_bytes(schema.dump(root))
    assert np.array_equal(open_capture(sound, 0).numpy("q"), expected)
    assert [p.where for p in verify_store(sound)] == ["zarr.json"]


def test_verify_reads_no_file_outside_the_store(sound: Path) -> None:
    (sound.parent / "secret").write_bytes(b"x")
    files = json.loads((sound / "zarr.json").read_bytes())["attributes"]["dmi"]["files"]
    right = [1, crc32c(b"x")]
    forge(sound, "", {}, {"files": {**files, "../secret": right, str(sound.parent / "secret"): right}})
    assert [p.what.split("'")[0] for p in verify_store(sound)] == ["the file "] * 2
