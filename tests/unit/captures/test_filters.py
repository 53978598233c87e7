# SPDX-License-Identifier: Apache-2.0
"""Misspelt hooks, filters and directories do not give an empty result, nor do paths that are not captures."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dmi_connector import TokenDataset, find_captures, importance, open_capture, open_captures
from dmi_connector.analysis.texts import Texts, find_tokenizer
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.captures import captures_of
from dmi_connector.captures.lens_names import unlisted
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read.metadata import NotACapture, read_attrs
from dmi_connector.store.read.verify import verify_dir
from dmi_connector.view.data import Library
from dmi_connector.view.texts_index import TextIndex
from tests import storekit as kit

SPECS = [ArraySpec(name, "float32", (0, 1), 8) for name in ("resid_pre", "q")]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories: `captures` has three stores, with missing rows in the last one; `empty` has none."""
    root, owner = tmp_path_factory.mktemp("home"), kit.Store(1 << 20)
    for number, name in enumerate("abc"):
        specs = [*SPECS, ArraySpec("z", "float32", (1,), 8)] if name == "b" else SPECS
        losses = [Loss.of(Cause.FELL_BEHIND, [[0, 4]])] if name == "c" else []
        options = {"key": f"run-{number}", "request_id": f"r{number}", "losses": losses}
        attrs = {"num_layers": 2, "model": "/models/Tiny", "dtype": "float32"}
        owner.write(root / "captures" / f"{name}.zarr", specs, 20, attrs=attrs, **options)
    assert owner.shutdown()
    (root / "empty").mkdir()
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: object) -> tuple[int, str, str]:
        return (main([str(part) for part in argv]), *capsys.readouterr())

    return call


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ("resid_prr@1", "'resid_prr@1' is in none of 2 stores: did you mean 'resid_pre'"),
        ("hook_reside", "'hook_reside' is in none of 2 stores"),
        (["q", "qq"], "'qq' is in none of 2 stores"),
        ("resid_pre@2", r"'resid_pre@2' is in none of 2 stores: resid_pre has the layers \[0, 1\] there"),
        ("resid_pre@-3", r"resid_pre has the layers \[0, 1\] there"),
        ("z@0", r"'z@0' is in none of 2 stores: z has the layers \[1\] there"),
        ("blocks.9.hook_resid_pre", r"in none of 2 stores: resid_pre has the layers \[0, 1\] there"),
        ("blocks.1.hook_mlp_out", "'blocks.1.hook_mlp_out' is in none of 2 stores"),
        ("k", "'k' is in none of 2 stores.* they hold: .*resid_pre"),
        ("blocks.1.attn.hook_zz", "has no equivalent here; .*: did you mean 'attn.hook_z'"),
    ],
)
def test_a_hook_that_no_store_holds_is_refused(parent: Path, hooks: Any, message: str) -> None:
    directory = parent / "captures"
    for call in (lambda: open_captures(directory, hooks=hooks), lambda: open_captures(directory).filter(hooks=hooks)):
        with pytest.raises(KeyError, match=message):
            call()


def test_hooks_that_some_store_holds_choose_stores(
    parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    captures = open_captures(parent / "captures")
    assert [info.store.name for info in captures.filter(hooks="z@1").infos] == ["b.zarr"]
    assert [info.store.name for info in captures.filter(hooks="blocks.1.attn.hook_z").infos] == ["b.zarr"]
    assert len(captures[:0].filter(hooks="nothing")) == 0, "there are no stores, so the hook cannot be checked"
    one = captures.filter(lambda info: info.store.name == "a.zarr")
    apart = [ArraySpec("k", "float32", (0, 1), 8)]
    directory = tmp_path / "apart"
    shutil.copytree(one.infos[0].store, directory / "a.zarr")
    owner = kit.Store(1 << 20)
    owner.write(directory / "k.zarr", apart, 20, attrs={"num_layers": 2, "model": "/models/Tiny", "dtype": "float32"})
    assert owner.shutdown()
    with caplog.at_level(logging.WARNING):
        assert len(open_captures(directory, hooks=["q", "k"])) == 0
    assert "none of 2 stores holds all of 'q', 'k'" in caplog.text


def test_commands_name_a_hook_that_is_misspelt(parent: Path, run: Run, tmp_path: Path) -> None:
    store, out = parent / "captures/a.zarr", tmp_path / "x"
    for argv, words in (
        (["diff", store, store, "--hooks", "q,resid_prr"], "no hook is called 'resid_prr': did you mean 'resid_pre'"),
        (["fidelity", store, "--hooks", "q,resid_prr"], "holds no hook 'resid_prr': did you mean 'resid_pre'"),
        (["fit-pca", store, "--hook", "resid_prr", "--rank", 1, "-o", out], "did you mean 'resid_pre'"),
        (["plot", store, "--kind", "heat", "--hook", "resid_prr", "-o", f"{out}.png"], "did you mean 'resid_pre'"),
        (["diff", store, store, "--hooks", "q@0"], "no hook is called 'q@0': did you mean 'q'"),
        (["fidelity", store, "--hooks", "q@0"], "holds no hook 'q@0': did you mean 'q'"),
        (["fit-pca", store, "--hook", "q@0", "--rank", 1, "-o", out], "--hook q@0 names a layer; write --hook q --lay"),
        (["plot", store, "--kind", "heat", "--hook", "q@0", "-o", f"{out}.png"], "'q@0' is not in this store: did you"),
    ):
        status, _, err = run(*argv)
        assert status == 2 and words in err and len(err.splitlines()) == 1, err
    status, out_text, _ = run("diff", store, store, "--hooks", "q,embed")
    assert status == 0 and "left out: embed: it is in neither" in out_text


# ---- directories ----------------------------------------------------------------------------------------------------


def test_a_directory_above_the_stores_is_refused_with_the_path_to_give(parent: Path) -> None:
    message = r"home\d+ holds no store, but directories in it do; give .*home\d+/captures$"
    for call in (find_captures, open_captures, verify_dir, lambda path: captures_of([path])):
        with pytest.raises(ValueError, match=message):
            call(parent)
    with pytest.raises(ValueError, match=message):
        find_captures(parent, key="run-1")
    with pytest.raises(ValueError, match=message):
        TokenDataset(str(parent), "q@1")


def test_each_command_refuses_a_directory_above_the_stores(parent: Path, run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    for argv in (
        ["ls", parent],
        ["ls", parent, "--key", "run-1"],
        ["tail", parent, "--once"],
        ["info", parent],
        ["verify", parent],
        ["export", parent, "--to", "zip", "-o", tmp_path / "x"],
        ["diff", parent, parent / "captures"],
        ["plot", parent, "-o", picture],
        ["plot", parent, "--kind", "neuron", "--hook", "q", "--neuron", 0, "-o", picture],
        ["fit-pca", parent, "--hook", "q", "--rank", 1, "-o", tmp_path / "x"],
        ["fidelity", parent],
        ["view", parent],
        ["repair", parent],
        ["prune", parent, "--older-than", 0],
    ):
        status, out, err = run(*argv)
        assert (status, out) == (2, "") and len(err.splitlines()) == 1, (argv, out, err)
        assert f"{parent} holds no store, but directories in it do; give {parent / 'captures'}" in err, err


def test_an_empty_directory_is_one_whose_server_wrote_nothing(parent: Path, run: Run) -> None:
    empty = parent / "empty"
    assert find_captures(empty) == [] and len(open_captures(empty)) == 0
    assert run("ls", empty) == (0, "", f"no captures in {empty}\n")
    status, _, err = run("diff", empty, parent / "captures")
    assert (status, err) == (2, f"dmi: diff: {empty} holds no finished store; give a store, or a directory of stores\n")


def test_several_directories_below_are_counted(parent: Path, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name / "x.zarr.partial").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"give .*/one or one of 2 more$"):
        find_captures(tmp_path)


# ---- filters that let nothing pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "why"),
    [
        ({"key": "run_1"}, "none of 3 stores of {} passes key='run_1': did you mean 'run-1'?"),
        ({"key": "run-2"}, "stores of {} with key='run-2' lack rows; incomplete=True takes them too"),
        ({"key": ["x", "run_0"]}, "none of 3 stores of {} passes key=['x', 'run_0']: did you mean 'run-0'?"),
        ({"request_id": "r9"}, "none of 3 stores of {} passes request_id='r9'"),
        ({"model": "Tony"}, "none of 3 stores of {} passes model='Tony': did you mean 'Tiny'?"),
        ({"after": "2100-01-01"}, "none of 3 stores of {} passes after='2100-01-01'"),
        ({"prompt_len": 7, "key": "run-0"}, "none of 3 stores of {} passes key='run-0', prompt_len=7"),
        ({"prompt_len": 7, "model": "Tiny"}, "none of 3 stores of {} passes model='Tiny', prompt_len=7"),
        ({"where": lambda info: False}, "none of 3 stores of {} passes where"),
    ],
)
def test_filters_that_let_no_store_pass_are_warned_of(
    parent: Path, caplog: pytest.LogCaptureFixture, filters: dict[str, Any], why: str
) -> None:
    directory = parent / "captures"
    why = why.format(directory)
    with caplog.at_level(logging.WARNING):
        found = open_captures(directory, **filters)
    assert len(found) == 0 and f"open_captures: {why}" in caplog.text and why in repr(found)
    assert ("did you mean" in caplog.text) == ("did you mean" in why), "an existing name must get no suggestion"
    with pytest.raises(ValueError) as refused:
        found.rows("q", 1)
    assert str(refused.value).startswith(f"no store to read 'q' from; {why}")


def test_a_reader_without_a_store_says_what_lacks(
    parent: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    empty = parent / "empty"
    with pytest.raises(ValueError, match=rf"no store to read 'q@1' from; {empty} holds no finished store$"):
        TokenDataset(open_captures(empty), "q@1")
    for name in (INDEX_NAME, "c.zarr"):
        source = parent / "captures" / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / name)
    lossy = open_captures(tmp_path)
    with pytest.raises(ValueError, match=r"all 1 stores of .* lack rows; incomplete=True takes them too"):
        lossy.rows("q", 1)
    assert caplog.text == "" and len(open_captures(tmp_path, incomplete=True)) == 1
    with pytest.raises(ValueError, match="no store to read 'q' from; none of them was kept"):
        open_captures(parent / "captures")[:0].rows("q", 1)


def test_commands_say_which_key_is_near(parent: Path, run: Run, tmp_path: Path) -> None:
    directory = parent / "captures"
    near = "did you mean 'run-1'?"
    assert run("ls", directory, "--key", "run_1") == (0, "", f"no captures in {directory} match: {near}\n")
    assert run("ls", directory, "--request-id", "r9") == (0, "", f"no captures in {directory} match\n")
    status, _, err = run("tail", directory, "--key", "run_1", "--once")
    assert (status, err) == (0, f"no captures in {directory} match: {near}\n")
    assert run("tail", directory, "--key", "run-1", "--once")[2] == run("tail", directory, "--once")[2] == ""
    status, _, err = run("export", directory, "--to", "zip", "--key", "run_1", "-o", tmp_path / "x")
    assert status == 2 and err.endswith(f"passes key=['run_1']: {near}\n") and len(err.splitlines()) == 1, err
    status, _, err = run("export", directory, "--to", "zip", "--model", "Tony", "-o", tmp_path / "x")
    assert status == 2 and "passes model='Tony': did you mean 'Tiny'?" in err, err


# ---- paths that are not captures ------------------------------------------------------------------------------------


def test_other_zarr_stores_beside_captures_are_passed_over(parent: Path, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(parent / "captures" / f"{name}.zarr", tmp_path / f"{name}.zarr")
    for version in (2, 3):
        group = zarr.open_group(tmp_path / f"foreign{version}.zarr", mode="w", zarr_format=version)
        group.attrs["dmi"] = "no"
        group.create_array("x", data=np.zeros(3))
        zarr.open_group(tmp_path / f"bare{version}.zarr", mode="w", zarr_format=version)
    zarr.create_array(tmp_path / "array.zarr", data=np.zeros(3))
    (tmp_path / "empty.zarr").mkdir()
    (tmp_path / "list.zarr").mkdir()
    (tmp_path / "list.zarr/zarr.json").write_text("[]")
    # Damaged stores may have an attribute of this name that is not an object, so they are named.
    with pytest.raises(ValueError, match=r"foreign3\.zarr is not a capture: its 'dmi' attribute has no valid"):
        open_captures(tmp_path)
    shutil.rmtree(tmp_path / "foreign3.zarr")
    for find in (find_captures, open_captures):
        found = find(tmp_path)
        assert sorted(i.store.name for i in getattr(found, "infos", found)) == ["a.zarr", "b.zarr"]
    texts = TextIndex(lambda name: Texts(None, name))
    assert Library.at(tmp_path).page("", 0, 10, texts)["total"] == 2
    (tmp_path / "a.zarr/zarr.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.zarr is not a capture: zarr\.json cannot be read .*; dmi verify"):
        find_captures(tmp_path)


def test_other_zarr_stores_are_distinguished_from_captures(parent: Path, tmp_path: Path) -> None:
    for name, content, message in (
        ("none", None, r"is not a capture: there is no .*none\.zarr/zarr\.json"),
        ("two", (".zgroup", "{}"), r"is not a capture: it is a Zarr store of format 2 \(\.zgroup\)"),
        ("array", (".zarray", "{}"), r"it is a Zarr store of format 2 \(\.zarray\)"),
        ("other", ("zarr.json", '{"attributes": {"a": 1}}'), "is not a capture: zarr.json has no 'dmi' attribute"),
        ("null", ("zarr.json", '{"attributes": null}'), "is not a capture: zarr.json has no 'dmi' attribute"),
    ):
        store = tmp_path / f"{name}.zarr"
        store.mkdir()
        if content:
            (store / content[0]).write_text(content[1])
        for read in (read_attrs, lambda path: open_capture(path, timeout=0)):
            with pytest.raises(NotACapture, match=message):
                read(store)
    damaged = json.loads((parent / "captures/a.zarr/zarr.json").read_text())
    del damaged["attributes"]["dmi"]["num_tokens"]
    (store / "zarr.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="its 'dmi' attribute has no valid num_tokens") as refused:
        read_attrs(store)
    assert not isinstance(refused.value, NotACapture)


# ---- names and paths ------------------------------------------------------------------------------------------------


def test_a_capture_contains_what_it_can_be_indexed_with(parent: Path) -> None:
    cap = open_capture(parent / "captures/b.zarr")
    names = ["q", "resid_post", "blocks.1.attn.hook_z", "blocks.0.hook_resid_pre", "resid_pre", "z", "hook_nothing"]
    names += [
        "blocks.0.attn.hook_z",
        "blocks.7.hook_resid_pre",
        "k",
        "blocks.1.attn.hook_q",
        "blocks.1.x",
        "hook_embed",
    ]
    for name in names:
        try:
            cap[name]
        except KeyError:
            assert name not in cap, name
        else:
            assert name in cap, name
    assert {name for name in names if name in cap} == set(names[:6]) and 3 not in cap
    assert list(cap) == cap.hooks and all(name in cap for name in cap)
    assert importance(cap, "q", 0).shape == (8,), "one capture is not a list of captures"


def test_wrong_indexes_of_captures_are_explained(parent: Path) -> None:
    captures = open_captures(parent / "captures")
    cap = captures[0]
    for index in (("q", 1), 1, None, slice(3)):
        with pytest.raises(KeyError, match=r"is not the name of a hook; write cap\['q'\], or cap\['q@3'\]"):
            cap[index]  # type: ignore[index]
    for number in (500, 2, -3):
        with pytest.raises(IndexError, match=rf"captures\[{number}\] does not exist: there are 2 stores"):
            captures[number]
    for wrong in ((0, 1), None, 1.0):
        with pytest.raises(TypeError, match=r"give the number, the name or the key of a store, or a slice"):
            captures[wrong]  # type: ignore[call-overload]
    assert captures[np.int64(-1)].path.name == "b.zarr"


def test_a_store_in_a_missing_directory_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(time, "sleep", refuse)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "nowhere/a.zarr", "nowhere/a.zarr"):
        with pytest.raises(FileNotFoundError, match=r"a\.zarr does not exist, and neither does its directory"):
            open_capture(path)
    with pytest.raises(AssertionError, match="it waits"):
        open_capture("a.zarr")


def test_a_path_may_begin_at_the_users_home(
    parent: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(parent))
    for path in ("~/captures/a.zarr", Path("~/captures/a.zarr")):
        assert open_capture(path, timeout=0).path == parent / "captures/a.zarr"
    assert len(open_captures("~/captures")) == 2 and len(find_captures("~/captures")) == 3
    assert Library.at(Path("~/captures")).directory == parent / "captures"
    for load, message in (
        (lambda: find_tokenizer("~/empty"), "empty has no tokenizer.json"),
        (lambda: Unembedding.load("~/empty"), f"{parent}/empty has no readable config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            load()
    assert run("ls", "~/captures")[0] == 0
    status, out, _ = run("export", "~/captures/a.zarr", "--to", "zip", "--out=~/a.zip")
    assert (status, (parent / "a.zip").is_file()) == (0, True) and "~" not in out
    (parent / "a.zip").unlink()


def test_a_name_that_transformer_lens_may_lack_is_told_so() -> None:
    assert unlisted("attn.hook_zz").endswith("or TransformerLens has no such name: did you mean 'attn.hook_z'?")
    assert unlisted("xyz").endswith("or TransformerLens has no such name")


# ---- lists ----------------------------------------------------------------------------------------------------------


def test_ls_truncates_long_keys(parent: Path, run: Run, tmp_path: Path) -> None:
    owner, key = kit.Store(1 << 20), "k" * 150
    owner.write(tmp_path / "a.zarr", SPECS, 5, key=key, request_id="r" * 150, attrs={"num_layers": 2})
    assert owner.shutdown()
    for argv in (["ls", tmp_path], ["tail", tmp_path, "--once"]):
        out = run(*argv)[1]
        assert f"{'k' * 37}..." in out and "k" * 38 not in out, out
    assert "r" * 38 not in run("ls", tmp_path)[1]
    assert json.loads(run("ls", tmp_path, "--json")[1])[0]["key"] == key


def test_verify_of_many_stores_prints_problems_and_counts(
    parent: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        shutil.copytree(parent / "captures/a.zarr", tmp_path / f"{number}.zarr")
    assert run("verify", tmp_path)[1].count(": sound\n") == 10
    shutil.copytree(parent / "captures/c.zarr", tmp_path / "c.zarr")
    assert run("verify", tmp_path) == (0, "11 checked, 0 damaged, 1 incomplete\n", "")
    (tmp_path / "3.zarr/q/c/0/0/0").unlink()
    status, out, _ = run("verify", tmp_path)
    assert status == 1 and all(line.startswith(f"{tmp_path / '3.zarr'}: ") for line in out.splitlines()[:-1]), out
    assert out.splitlines()[-1] == "11 checked, 1 damaged, 1 incomplete"
    status, out, _ = run("verify", tmp_path, "--verbose")
    assert status == 1 and out.count(".zarr: sound\n") == 9 and "c.zarr: sound, but incomplete: " in out
    monkeypatch.setattr("dmi_connector.cli.verify.sys.stderr.isatty", lambda: True, raising=False)
    _, _, err = run("verify", tmp_path)
    assert "7 of 11 checked, 1 damaged" in err and err.endswith("\r\033[K")
