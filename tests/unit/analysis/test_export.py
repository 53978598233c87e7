# SPDX-License-Identifier: Apache-2.0
"""`dmi export`: files for other programs, and runs that end early. tests/types reads them with these programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dmi_connector.analysis.export import numpy, progress, safetensors, specforge
from dmi_connector.analysis.export.progress import NOTE
from dmi_connector.analysis.export.targets import TARGETS, export
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import captures_of
from dmi_connector.cli.export import FLAGS
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit
from tests.recorded import recorded

WIDTH = 16
SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2), WIDTH),
    ArraySpec("resid_final", "bfloat16", (), WIDTH),
    ArraySpec("final_ln", "bfloat16", (), WIDTH),
)
LENGTHS = {"a": 300, "b": 40, "c": 7}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores with the keys 5, 3 and 1. Half of each is a prompt."""
    root = tmp_path_factory.mktemp("stores")
    owner = kit.Store(1 << 22)
    for number, (name, length) in zip((5, 3, 1), LENGTHS.items(), strict=True):
        options = {"attrs": {"num_layers": 3}, "key": str(number), "chunk": 32, "segment": 64}
        owner.write(root / f"{name}.zarr", SPECS, length, **options)
    assert owner.shutdown()
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str | Path) -> tuple[int, str, str]:
        status = main(["export", *map(str, argv)])
        return (status, *capsys.readouterr())

    return call


def stream(capture: Capture, *ids: int) -> torch.Tensor:
    """The residual stream of these layer ids, [tokens, layers, width]. Id 3 is the stream after the last layer."""
    return torch.stack([capture.torch("resid_final") if i == 3 else capture.torch("resid_pre", i) for i in ids], 1)


def locks(to: str) -> set[str]:
    """The file next to b.safetensors that vLLM's reader locks."""
    return {"b.safetensors.lock"} if to == "safetensors" else set()


def test_speculators_gets_a_file_for_each_store(stores: Path, tmp_path: Path, run: Run) -> None:
    assert run(stores, "--to", "speculators", "-o", tmp_path / "hs") == (0, f"{tmp_path / 'hs'}: 3 written\n", "")
    for number, name in enumerate(LENGTHS):
        capture, found = open_capture(stores / f"{name}.zarr"), load_file(tmp_path / f"hs/hs_{number}.safetensors")
        assert torch.equal(found["hidden_states"], stream(capture, 0, 1, 2, 3))
        assert found["token_ids"].tolist() == capture.token_ids.tolist() and found["token_ids"].dtype == torch.int64
    assert run(stores, "--to", "speculators", "--layers", "2,0", "--number-by", "key", "-o", tmp_path / "two")[0] == 0
    found = load_file(tmp_path / "two/hs_5.safetensors")
    assert torch.equal(found["hidden_states"], stream(open_capture(stores / "a.zarr"), 2, 0, 3))


def test_speculators_needs_the_last_hidden_state(tmp_path: Path, run: Run) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", SPECS[:1], 10, attrs={"num_layers": 3})
    assert owner.shutdown()
    assert "capture resid_final too" in run(tmp_path, "--to", "speculators", "-o", tmp_path / "hs")[2]


@pytest.mark.parametrize("gzip", [False, True])
def test_specforge_gets_the_tensors_of_its_features(stores: Path, tmp_path: Path, run: Run, gzip: bool) -> None:
    flags = ["--gzip"] if gzip else []
    assert run(stores, "--to", "specforge", "--layers", "0,2", "--key", "5", *flags, "-o", tmp_path / "f")[0] == 0
    path = tmp_path / f"f/rows_0-2000/data_0.ckpt{'.gz' if gzip else ''}"
    with specforge.gzip_file.open(path) if gzip else path.open("rb") as file:
        found = torch.load(file)
    capture = open_capture(stores / "a.zarr")
    assert found["input_ids"].tolist() == capture.token_ids.tolist()
    assert found["loss_mask"].tolist() == [0] * 150 + [1] * 150 and found["loss_mask"].dtype == torch.int64
    assert torch.equal(found["hidden_state"], capture.torch("final_ln")[None])
    assert torch.equal(found["aux_hidden_state"], stream(capture, 0, 2).reshape(1, 300, -1))


def test_specforge_names_what_a_store_lacks(tmp_path: Path, run: Run) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", SPECS[:2], 10, attrs={"num_layers": 3})
    owner.write(tmp_path / "b.zarr", SPECS, 10, attrs={"num_layers": 3, "prompt_len": 10})
    owner.write(tmp_path / "c.zarr", SPECS[1:], 10, attrs={"num_layers": 3})
    assert owner.shutdown()
    flags = ["--to", "specforge", "-o", tmp_path / "out"]
    assert "capture final_ln too" in run(tmp_path / "a.zarr", *flags)[2]
    assert "capture resid_pre too" in run(tmp_path / "c.zarr", "--to", "specforge", "-o", tmp_path / "out4")[2]
    assert "no generated token" in run(tmp_path / "b.zarr", "--to", "specforge", "-o", tmp_path / "out2")[2]
    assert run(tmp_path / "b.zarr", "--to", "specforge", "--loss", "all", "-o", tmp_path / "out3")[0] == 0
    (made,) = (tmp_path / "out3").rglob("*.ckpt")
    assert torch.load(made)["loss_mask"].tolist() == [1] * 10


def test_specforge_trains_on_the_answers_of_a_conversation(tmp_path: Path, run: Run) -> None:
    """Earlier answers are part of the prompt, where the request marks them with spans."""
    owner = kit.Store(1 << 20)
    for name, spans, prompt in (("a", [[1, 3], [5, 6]], 8), ("b", [], 10), ("c", [], 9)):
        attrs = {"num_layers": 3, "prompt_len": prompt, "loss_spans": spans}
        owner.write(tmp_path / f"{name}.zarr", SPECS, 10, attrs=attrs)
    owner.write(tmp_path / "other/d.zarr", SPECS, 10, attrs={"num_layers": 3})
    assert owner.shutdown()
    flags = ["--to", "specforge", "--loss", "spans", "-o", tmp_path / "f"]
    found = run(tmp_path / "a.zarr", tmp_path / "b.zarr", tmp_path / "c.zarr", *flags)
    assert found == (0, f"{tmp_path / 'f'}: 2 written; 1 left out: no token to train on\n", "")
    masks = {p.name: torch.load(p)["loss_mask"].tolist() for p in (tmp_path / "f").rglob("*.ckpt")}
    assert masks == {"data_0.ckpt": [0, 1, 1, 0, 0, 1, 0, 0, 1, 1], "data_2.ckpt": [0] * 9 + [1]}
    status, _, err = run(tmp_path / "other", "--to", "specforge", "--loss", "spans", "-o", tmp_path / "g")
    assert status == 2 and "no loss_spans; capture with dmi.loss_spans, or a column loss_mask" in err
    both = run(tmp_path / "a.zarr", tmp_path / "other", "--to", "specforge", "--loss", "spans", "-o", tmp_path / "h")
    assert both == (0, f"{tmp_path / 'h'}: 1 written; 1 left out: no loss_spans\n", "")


def test_specforge_leaves_out_answers_without_a_row(tmp_path: Path, run: Run) -> None:
    """An answer of only one token has no row. Many runs have such stores."""
    owner = kit.Store(1 << 20)
    for name, prompt in (("a", 10), ("b", 4), ("c", 10)):
        owner.write(tmp_path / f"{name}.zarr", SPECS, 10, attrs={"num_layers": 3, "prompt_len": prompt})
    assert owner.shutdown()
    left, flags = (
        "; 2 left out: no generated token to train on\n",
        ["--to", "specforge", "-o", tmp_path / "f"],
    )
    assert run(tmp_path, *flags) == (0, f"{tmp_path / 'f'}: 1 written{left}", "")
    assert run(tmp_path, *flags) == (0, f"{tmp_path / 'f'}: 0 written, 1 already existed{left}", "")
    assert [path.name for path in (tmp_path / "f").rglob("*.ckpt*")] == ["data_1.ckpt"]
    status, _, err = run(tmp_path / "a.zarr", tmp_path / "c.zarr", "--to", "specforge", "-o", tmp_path / "none")
    assert status == 2 and "no store is left" in err and "use --loss all, or capture with include_output" in err


@pytest.mark.parametrize("to", ["speculators", "specforge"])
def test_files_of_one_set_have_the_same_layers(tmp_path: Path, run: Run, to: str) -> None:
    owner = kit.Store(1 << 20)
    fewer = (ArraySpec("resid_pre", "bfloat16", (0, 2), WIDTH), *SPECS[1:])
    for name, specs in (("a", SPECS), ("b", fewer), ("c", SPECS)):
        owner.write(tmp_path / f"{name}.zarr", specs, 10, attrs={"num_layers": 3})
    assert owner.shutdown()
    for flags in ([], ["--layers", "1"]):
        status, _, err = run(tmp_path, "--to", to, *flags, "-o", tmp_path / "out")
        assert status == 2 and f"1 of 3 stores have other layers: {tmp_path / 'b.zarr'} has [0, 2" in err, err
        assert "give --layers 0,2" in err and not (tmp_path / "out").exists(), "the command must write nothing"
    assert run(tmp_path, "--to", to, "--layers", "0,2", "-o", tmp_path / "out")[1].endswith(": 3 written\n")
    assert run(tmp_path / "a.zarr", tmp_path / "c.zarr", "--to", to, "-o", tmp_path / "alike")[0] == 0
    assert "was written with" in run(tmp_path / "b.zarr", "--to", to, "-o", tmp_path / "alike")[2], (
        "a directory keeps the layers of its first run"
    )


@pytest.mark.parametrize("to", ["speculators", "specforge"])
def test_a_store_of_later_tokens_is_left_out_and_counted(tmp_path: Path, run: Run, to: str) -> None:
    owner = kit.Store(1 << 20)
    fewer = (ArraySpec("resid_pre", "bfloat16", (0, 2), WIDTH), *SPECS[1:])
    for name, start, specs in (("a", 0, SPECS), ("b", 7, fewer)):
        owner.write(tmp_path / f"{name}.zarr", specs, 10, attrs={"num_layers": 3, "start": start})
    assert owner.shutdown()
    status, text, _ = run(tmp_path, "--to", to, "-o", tmp_path / "out")
    assert status == 0 and text.endswith(": 1 written; 1 left out: no rows of the first tokens of its request\n")
    status, _, err = run(tmp_path / "b.zarr", "--to", to, "-o", tmp_path / "none")
    assert status == 2 and "capture all tokens (dmi.tokens from 0 on)" in err


@pytest.mark.parametrize("flags", [[], ["--layers", "1"]])
def test_a_store_without_a_residual_stream_is_named(tmp_path: Path, run: Run, flags: list[str]) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", SPECS[2:], 10, attrs={"num_layers": 3})
    assert owner.shutdown()
    status, _, err = run(tmp_path / "a.zarr", "--to", "safetensors", *flags, "-o", tmp_path / "x")
    assert status == 2 and err == (
        f"dmi: {tmp_path / 'a.zarr'} lacks resid_pre and resid_final, the residual stream; capture them"
        " (preset hidden-states)\n"
    )


def test_one_store_is_one_file_and_several_are_a_directory(stores: Path, tmp_path: Path, run: Run) -> None:
    one = [stores / "b.zarr", "--to", "safetensors", "-o", tmp_path / "one"]
    assert run(*one, "--layers", "3,1")[1] == f"{tmp_path / 'one'}: layer ids 1, 3\n"
    assert run(stores / "c.zarr", stores / "b.zarr", "--to", "safetensors", "-o", tmp_path / "both")[0] == 0
    assert {p.name for p in (tmp_path / "both").glob("*.safetensors")} == {"b.safetensors", "c.safetensors"}
    want = stream(open_capture(stores / "b.zarr"), 1, 3)
    assert torch.equal(load_file(tmp_path / "one")["hidden_states"], want)


@pytest.mark.parametrize("to", ["safetensors", "zip"])
def test_a_file_that_exists_is_not_replaced(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("notes.txt", "link"):
        status, _, err = run(stores / "b.zarr", "--to", to, "-o", tmp_path / name)
        assert status == 2 and f"{tmp_path / name} exists; give a new name" in err
    assert notes.read_text() == "precious" and (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path)
    assert run(stores / "b.zarr", "--to", to)[0] == 0
    assert f"b.{to} exists" in run(stores / "b.zarr", "--to", to)[2], (
        "a file with the default name must not be replaced either"
    )
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "link", f"b.{to}"} | locks(to)


def test_another_choice_of_layers_does_not_replace_a_file(stores: Path, tmp_path: Path, run: Run) -> None:
    flags = [stores / "b.zarr", "--to", "safetensors", "-o", tmp_path / "b"]
    assert run(*flags, "--layers", "1,3")[0] == 0
    assert run(*flags, "--layers", "2")[0] == 2
    assert torch.equal(load_file(tmp_path / "b")["hidden_states"], stream(open_capture(stores / "b.zarr"), 1, 3))


@pytest.mark.parametrize("to", ["safetensors", "zip"])
def test_the_given_path_decides_between_a_file_and_a_directory(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Selecting one store of a directory with --key does not name a file."""
    (tmp_path / "there").mkdir()
    for given, out in (
        ([stores, "--key", "3"], "one"),
        ([stores / "a.zarr", stores / "b.zarr", "--key", "3"], "two"),
        ([stores / "b.zarr"], "nodir/one/"),
        ([stores / "b.zarr"], "there"),
    ):
        for done in ("1 written", "0 written, 1 already existed"):
            status, text, _ = run(*given, "--to", to, "-o", f"{tmp_path}/{out}")
            assert (status, text) == (0, f"{tmp_path / out}: {done}\n")
        assert {p.name for p in (tmp_path / out).iterdir()} == {f"b.{to}", NOTE} | locks(to)
    monkeypatch.chdir(tmp_path)
    assert "needs -o DIR" in run(stores, "--key", "3", "--to", to)[2]


def test_a_run_continues_where_the_last_one_was_killed(stores: Path, tmp_path: Path, run: Run) -> None:
    """A killed process leaves an incomplete file under another name."""
    flags, out = [stores, "--to", "speculators", "-o", tmp_path / "hs"], tmp_path / "hs"
    code = f"""
import os, sys
from dmi_connector.analysis.export import safetensors
from dmi_connector.cli.main import main
blocks = safetensors.stream_rows
seen = []
def dies(*args):
    seen.append(args)
    if len(seen) == 5:  # in the second file
        os.kill(os.getpid(), 9)
    return blocks(*args)
safetensors.stream_rows = dies
main(["export", {str(stores)!r}, "--to", "speculators", "-o", {str(out)!r}])
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9, killed.stderr
    there = {p.name for p in out.iterdir()}
    assert there == {"hs_0.safetensors", "hs_1.safetensors.partial", NOTE}
    first = (out / "hs_0.safetensors").stat().st_mtime_ns
    assert run(*flags)[1] == f"{out}: 2 written, 1 already existed\n"
    assert {p.name for p in out.iterdir()} == {f"hs_{i}.safetensors" for i in range(3)} | {NOTE}
    assert (out / "hs_0.safetensors").stat().st_mtime_ns == first
    assert run(*flags)[1] == f"{out}: 0 written, 3 already existed\n"


def test_a_run_that_fails_leaves_no_partial_file(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> np.ndarray:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(safetensors, "stream_rows", full)
        assert run(stores, "--to", "speculators", "-o", tmp_path / "hs") == (2, "", "dmi: no space left\n")
    assert [*(tmp_path / "hs").iterdir()] == []


def test_a_run_that_wrote_no_file_does_not_fix_the_options(stores: Path, tmp_path: Path, run: Run) -> None:
    flags = [stores, "--to", "speculators", "-o", tmp_path / "hs"]
    assert run(*flags, "--layers", "9")[0] == 2
    assert run(*flags, "--layers", "1")[1].endswith("3 written\n")
    assert "was written with" in run(*flags, "--layers", "2")[2]


def test_the_note_is_written_before_the_first_file(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, replace, named = tmp_path / "hs", os.replace, []

    def noting(old: Path, new: Path) -> None:
        named.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(progress.os, "replace", noting)
    assert run(stores, "--to", "speculators", "-o", out)[0] == 0
    assert named == [NOTE, *(f"hs_{i}.safetensors" for i in range(3))]


def test_another_run_into_the_same_directory_is_refused(stores: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "hs"
    assert run(stores / "b.zarr", "--to", "speculators", "-o", out)[0] == 0
    assert "was written with" in run(stores / "b.zarr", "--to", "speculators", "--layers", "1", "-o", out)[2]
    assert "as number 0, and its number would change" in run(stores / "a.zarr", "--to", "speculators", "-o", out)[2]
    assert run(stores / "b.zarr", stores / "a.zarr", "--to", "speculators", "-o", out)[1].endswith(
        "1 written, 1 already existed\n"
    )
    assert len(json.loads((out / NOTE).read_text())["stores"]) == 2


def test_files_named_like_stores_are_written_in_any_order(stores: Path, tmp_path: Path, run: Run) -> None:
    flags = ["--to", "numpy", "--hook", "final_ln", "-o", tmp_path / "out"]
    assert run(stores / "b.zarr", *flags)[1].endswith("1 written\n")
    assert run(stores, *flags)[1].endswith("2 written, 1 already existed\n")
    assert run(stores / "c.zarr", *flags)[1].endswith("0 written, 1 already existed\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/b.zarr").symlink_to(stores / "b.zarr")
    words = f"holds {stores / 'b.zarr'} as b.npz, and {tmp_path / 'other/b.zarr'} has the same name"
    assert words in run(tmp_path / "other/b.zarr", *flags)[2]


@pytest.mark.parametrize(
    ("to", "name"),
    [("speculators", "hs_1.safetensors"), ("numpy", "b.npz"), ("webdataset", "shard-000007.tar")],
)
def test_files_of_other_programs_are_not_mistaken_for_files_of_an_export(
    stores: Path, tmp_path: Path, run: Run, to: str, name: str
) -> None:
    """Such a file may be the hidden states that vLLM's own connector wrote for speculators."""
    (tmp_path / name).write_text("of another program")
    hook = [] if to == "speculators" else ["--hook", "final_ln"]
    assert run(stores, "--to", to, *hook, "-o", tmp_path)[2] == (
        f"dmi: export: {tmp_path / name} exists, but no export recorded in {NOTE} wrote it; give another directory\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_note_keeps_the_stores_of_a_run_at_the_same_time(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, write = ["--to", "numpy", "--hook", "final_ln", "-o", tmp_path], numpy._add

    def begun(*args: Any) -> None:
        monkeypatch.setattr(numpy, "_add", write)
        assert run(stores / "b.zarr", *flags)[0] == 0
        write(*args)

    monkeypatch.setattr(numpy, "_add", begun)
    assert run(stores / "a.zarr", *flags)[0] == 0
    assert run(stores, *flags)[1].endswith("1 written, 2 already existed\n")


def test_a_store_that_is_named_twice_is_exported_once(stores: Path, tmp_path: Path, run: Run) -> None:
    assert run(stores, stores / "b.zarr", "--to", "speculators", "-o", tmp_path)[1].endswith("3 written\n")


def test_removed_stores_keep_their_numbers(stores: Path, tmp_path: Path, run: Run) -> None:
    flags = ["--to", "speculators", "--number-by", "key", "-o", tmp_path / "hs"]
    assert run(stores / "a.zarr", *flags)[1].endswith("1 written\n")
    assert run(stores / "b.zarr", *flags)[1].endswith("1 written\n")
    assert sorted(json.loads((tmp_path / "hs" / NOTE).read_text())["stores"].values()) == [3, 5]


def test_rows_are_read_in_small_blocks(stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    rows = safetensors.stream_rows
    monkeypatch.setattr(safetensors, "stream_rows", lambda *args: most.append(len(found := rows(*args))) or found)
    assert run(stores / "a.zarr", "--to", "speculators", "-o", tmp_path / "hs")[0] == 0
    assert sum(most) == 300 and max(most) == 256


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--to", "speculators"], "needs -o DIR"),
        (["--to", "zip", "-o", ""], "-o is empty; give a directory or a file"),  # as from an unset shell variable
        (["--to", "safetensors", "--gzip", "-o", "x"], "safetensors takes no --gzip"),
        (["--to", "speculators", "--layers", "1,x", "-o", "x"], "--layers '1,x' is not valid"),
        (["--to", "speculators", "--layers", "7", "-o", "x"], r"layer ids [7] are not in"),
        (["--to", "speculators", "--key", "none", "-o", "x"], "no finished capture matches"),
    ],
)
def test_mistakes_are_named(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(stores, *flags)
    assert (status, out) == (2, "") and words in err, err


def test_stores_of_two_models_are_refused(tmp_path: Path, run: Run) -> None:
    owner = kit.Store(1 << 22)
    (tmp_path / "stores").mkdir()
    for name in ("m0", "m1"):
        owner.write(tmp_path / f"stores/{name}.zarr", SPECS, 20, attrs={"num_layers": 3, "model": f"/models/{name}"})
    assert owner.shutdown()
    for format in ("speculators", "specforge"):
        command = [tmp_path / "stores", "--to", format, "--layers", "1", "-o"]
        status, _, error = run(*command, tmp_path / format)
        assert status == 2 and "is of the model /models/m1" in error and "--model of dmi export" in error, error
        assert not (tmp_path / format).exists()
        status, _, error = run(*command, tmp_path / format, "--model", "m1")
        assert status == 0, error
    stores = [tmp_path / "stores/m0.zarr", tmp_path / "stores/m1.zarr"]
    assert run(*stores, "--to", "zip", "-o", tmp_path / "zips/")[0] == 0, "a zip of each store has only its own model"
    status, _, _ = run(*stores, "--model", "m0", "--to", "zip", "-o", tmp_path / "one/")
    assert status == 0 and [path.name for path in (tmp_path / "one").glob("*.zip")] == ["m0.zip"]


def test_keys_that_are_not_numbers_are_named(stores: Path, tmp_path: Path, run: Run) -> None:
    owner = kit.Store(1 << 20)
    for name, key in (("a", "7"), ("b", "7"), ("c", "x")):
        owner.write(tmp_path / f"{name}.zarr", SPECS, 5, attrs={"num_layers": 3}, key=key)
    assert owner.shutdown()
    flags = ["--to", "speculators", "--number-by", "key", "-o", tmp_path / "hs"]
    assert "the key 'x' of" in run(tmp_path, *flags)[2]
    assert "have the key 7; export them into two directories" in run(tmp_path, "--key", "7", *flags)[2]


def test_stores_that_lack_rows_are_refused_by_name_and_left_out_of_directories(tmp_path: Path, run: Run) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", SPECS, 10, attrs={"num_layers": 3})
    owner.write(tmp_path / "b.zarr", SPECS, 10, key="b", losses=[Loss.of(Cause.FELL_BEHIND, [[2, 3]])])
    assert owner.shutdown()
    status, _, err = run(tmp_path / "b.zarr", "--to", "safetensors", "-o", tmp_path / "x")
    assert status == 2 and err == (
        f"dmi: capture {tmp_path / 'b.zarr'} is incomplete: writing fell behind (policy drop); missing rows: [[2, 3]]."
        " dmi export takes complete stores; leave this one out, or capture it again\n"
    )
    assert run(tmp_path, "--to", "safetensors", "-o", tmp_path / "y/")[:2] == (
        0,
        f"{tmp_path / 'y'}: 1 written; 1 left out, because they are incomplete (dmi ls lists them)\n",
    )
    status, _, err = run(tmp_path, "--key", "b", "--to", "safetensors", "-o", tmp_path / "z/")
    assert status == 2 and "all 1 captures lack rows (dmi ls says which)" in err
    assert main(["fidelity", str(tmp_path / "b.zarr")]) == 2
    assert [info.store.name for info in captures_of([tmp_path]).infos] == ["a.zarr"]
    with pytest.raises(ValueError, match="is not a directory"):
        captures_of([tmp_path / "nowhere"])


def test_each_option_of_a_format_has_a_flag() -> None:
    for target in TARGETS.values():
        assert set(target.required) <= set(target.options) <= set(FLAGS)
    assert set(FLAGS) == {option for target in TARGETS.values() for option in target.options}


def test_a_terminal_shows_the_number_of_finished_stores(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, _, err = run(stores, "--to", "speculators", "-o", tmp_path)
    assert status == 0 and err.endswith("\r1/3 stores exported\r2/3 stores exported\r3/3 stores exported\n")
    err = run(stores / "a.zarr", "--to", "safetensors", "-o", tmp_path / "one")[2]
    assert err.endswith("\r256/300 rows exported\r300/300 rows exported\n")


def test_a_terminal_shows_the_progress_of_a_zip_file(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = kit.Store(1 << 24)
    spec = ArraySpec("resid_pre", "bfloat16", (0,), 2048)
    owner.write(tmp_path / "a.zarr", [spec], 1200, attrs={"num_layers": 1}, codec="none", segment=256)
    assert owner.shutdown()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    err = run(tmp_path / "a.zarr", "--to", "zip", "-o", tmp_path / "a.zip")[2]
    done = [int(number) for number in re.findall(r"\r(\d)/6 MB exported", err)]
    assert sorted(done) == done and set(done) >= {0, 2, 4, 6} and err.endswith("\r6/6 MB exported\n"), err


@pytest.mark.parametrize("to", ["zip", "speculators"])
def test_a_log_gets_a_line_of_progress_at_intervals(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    clock = iter(range(0, 1000, 6))  # 6 seconds per store
    monkeypatch.setattr("dmi_connector.cli.export.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run(stores, "--to", to, "-o", tmp_path)[2] == "2/3 stores exported\n"


SETTINGS: dict[str, dict[str, object]] = {
    "safetensors": {"layers": [0, 2]},
    "zip": {},
    "numpy": {"hook": "resid_pre@0,resid_final"},
    "parquet": {"hook": "resid_pre@2"},
    "webdataset": {"hook": "resid_pre@1,final_ln", "shard_size": 20000},
    "speculators": {"number_by": "key"},
    "specforge": {"loss": "all"},
}


@pytest.mark.parametrize("to", SETTINGS)
def test_a_run_and_the_next_one_print_what_they_did(stores: Path, tmp_path: Path, to: str) -> None:
    """Compares files, notes, progress and the settings that a later run must match with data/exports.json."""
    captures, out = captures_of([str(stores)]), tmp_path / "out"
    said = []
    for _ in range(2):
        steps: list[tuple[int, int]] = []
        done = export(captures, to, out, SETTINGS[to], lambda *step: steps.append(step))  # noqa: B023
        assert done.out == out and not done.not_finite
        notes = [note.replace(str(stores), "STORES") for note in (*done.notes, *done.warnings)]
        progress = " ".join(f"{i}/{count}" for i, count in steps)
        said.append({"written": done.written, "kept": done.kept, "notes": notes, "progress": progress})
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    note = json.loads((out / NOTE).read_text().replace(str(stores), "STORES")) if (out / NOTE).exists() else None
    found = [*said, files, note]
    assert found == recorded("exports.json", to, found)
