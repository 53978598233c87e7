# SPDX-License-Identifier: Apache-2.0
"""Stores exported as training data for speculators and SpecForge, read by these libraries: `make types`."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dmi_connector.captures.capture import open_capture
from dmi_connector.captures.finite import NotFinite
from dmi_connector.cli.main import main, make_run_parser
from dmi_connector.layout import ArraySpec
from tests import snippets
from tests import storekit as kit

pytest.importorskip("speculators", reason="speculators is not installed; run make types TYPES=speculators")
import datasets
from hs_connectors import FileTransfer, HiddenStatesBackend
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable

from dmi_connector.analysis.training.speculators_backend import StoreBackend, StoreTransfer

WIDTH, LENGTHS = 16, (300, 40, 7)
SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2, 3), WIDTH),
    ArraySpec("resid_final", "bfloat16", (), WIDTH),
    ArraySpec("final_ln", "bfloat16", (), WIDTH),
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    write_run(root, SPECS, 4)
    return root


def write_run(root: Path, specs: Sequence[ArraySpec], num_layers: int) -> None:
    """Write the directory of a `dmi run`: stores, and a manifest with their rows."""
    owner = kit.Store(1 << 22)
    lines = []
    for row, length in enumerate(LENGTHS):
        attrs = {"num_layers": num_layers, "loss_spans": [[0, 2]]}
        owner.write(root / f"{row}.zarr", specs, length, attrs=attrs, key=str(row))
        lines.append(json.dumps({"row": row, "key": str(row), "store": f"{row}.zarr"}))
    assert owner.shutdown()
    (root / "manifest.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def data(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preprocessed data set of speculators for the same requests."""
    path = tmp_path_factory.mktemp("data")
    preprocess(stores, path)
    return path


def preprocess(stores: Path, path: Path) -> None:
    """Write the output of speculators' preprocessing for the same requests."""
    ids = [open_capture(stores / f"{number}.zarr").token_ids.tolist() for number in range(len(LENGTHS))]
    columns = {"input_ids": ids, "loss_mask": [[1] * len(i) for i in ids], "seq_len": [len(i) for i in ids]}
    made = datasets.Dataset.from_dict(columns)
    made.set_format("torch", columns=["input_ids", "loss_mask"])
    made.save_to_disk(path)


def test_exported_files_pass_the_checks_of_speculators(stores: Path, data: Path) -> None:
    out = data / "hidden_states"
    assert main(["export", str(stores), "--to", "speculators", "--layers", "1,2,3", "-o", str(out)]) == 0
    indices = get_existing_hidden_state_indices(out)
    assert indices == [0, 1, 2] and not find_corrupt_hidden_state_indices(out, indices)
    for index in indices:
        found = FileTransfer(out).get_cached(index)
        capture = open_capture(stores / f"{index}.zarr")
        check_hidden_states(found, capture.token_ids.tolist())
        assert torch.equal(found["hidden_states"][:, 1], capture.torch("resid_pre", 2))
        assert torch.equal(found["hidden_states"][:, -1], capture.torch("resid_final"))


def test_training_reads_stores_as_it_reads_exported_files(stores: Path, data: Path) -> None:
    main(["export", str(stores), "--to", "speculators", "--layers", "1,2,3", "-o", str(data / "hidden_states")])
    assert HiddenStatesBackend.registry["dmi"] is StoreBackend
    parser = argparse.ArgumentParser()
    StoreBackend.add_train_args(parser)
    flags = ["--dmi-store-dir", str(stores), "--dmi-layers", "1", "2", "3", "--dmi-number-by", "key"]
    transfer = StoreBackend.from_train_args(parser.parse_args(flags), str(data))
    ours = ArrowDataset(512, data, transfer, on_missing="raise")
    theirs = ArrowDataset(512, data, on_missing="raise")
    for index, length in enumerate(LENGTHS):
        have, want = ours[index], theirs[index]
        assert have.keys() == want.keys() and have["hidden_states"].shape == (length, 3 * WIDTH)
        assert all(torch.equal(have[name], want[name]) for name in want)
    assert transfer.get_cached(3) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_leaves_out_samples_that_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    owner = kit.Store(1 << 22)
    for number in range(3):
        values = {spec.name: kit.random_bits(spec, 40, number) for spec in SPECS}
        if number == 1:
            values["resid_pre"] = torch.full((4, 40, WIDTH), value, dtype=torch.bfloat16).view(torch.uint16).numpy()
        owner.write(
            tmp_path / f"in/{number}.zarr", SPECS, 40, values=values, attrs={"num_layers": 4}, ids=[number] * 40
        )
    assert owner.shutdown()
    ids = [[number] * 40 for number in range(3)]
    columns = {"input_ids": ids, "loss_mask": [[1] * 40] * 3, "seq_len": [40] * 3}
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(tmp_path / "data")

    def samples(*flags: str) -> list[Any]:
        parser = argparse.ArgumentParser()
        StoreBackend.add_train_args(parser)
        options = parser.parse_args(["--dmi-store-dir", str(tmp_path / "in"), *flags])
        transfer = StoreBackend.from_train_args(options, str(tmp_path / "data"))
        data = ArrowDataset(512, tmp_path / "data", transfer, on_missing="raise")
        return [data[number] for number in range(3)]

    with caplog.at_level(logging.WARNING):
        found = samples()
        assert [isinstance(sample, SampleUnavailable) for sample in found] == [False, True, False]
        assert str(tmp_path / "in/1.zarr") in caplog.text and "sample left out, 1 so far" in caplog.text
        caplog.clear()
        assert not torch.isfinite(samples("--dmi-finite", "keep")[1]["hidden_states"].float()).all()
        assert "is kept; 1 so far" in caplog.text
    with pytest.raises(NotFinite, match=r"1\.zarr: row 0 holds .* give --dmi-finite keep"):
        samples("--dmi-finite", "fail")


def test_responses_of_a_server_name_their_stores(stores: Path) -> None:
    transfer = StoreTransfer(str(stores), [1])
    found = transfer.get_generated({"dmi_store": str(stores / "1.zarr")})
    check_hidden_states(found, open_capture(stores / "1.zarr").token_ids.tolist())
    with pytest.raises(ValueError, match="names no store: ring is full"):
        transfer.get_generated({"dmi_error": "ring is full"})


def test_the_command_line_of_training_knows_the_backend() -> None:
    run = [sys.executable, "-m", "dmi_connector.analysis.training.speculators_backend", "--help"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--dmi-store-dir" in done.stdout and "dmi" in done.stdout.split("--hidden-states-backend")[1][:60]


def test_a_server_is_launched_with_our_connector(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    StoreBackend.add_launch_args(parser)
    flags = ["--dmi-store-dir", str(tmp_path), "--dmi-hooks", "resid_pre@1,resid_final"]
    config = StoreBackend.build_kv_transfer_config(parser.parse_args(flags))
    assert config["kv_connector"] == "DMIConnector" and config["kv_connector_extra_config"]["hooks"] == flags[3]
    with pytest.raises(ValueError, match="--dmi-store-dir is missing"):
        StoreBackend.from_train_args(argparse.Namespace(dmi_store_dir=None), "data")


@pytest.mark.parametrize("flags", [[], ["--gzip"]])
def test_specforge_reads_its_features(stores: Path, tmp_path: Path, flags: list[str]) -> None:
    from specforge.algorithms.eagle3.data import build_offline_reader, normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    assert main(["export", str(stores), "--to", "specforge", "--layers", "1,2,3", *flags, "-o", str(tmp_path)]) == 0
    refs = OfflineManifestReader(str(tmp_path), validate_files=True).read()
    assert [ref.num_tokens for ref in refs] == list(LENGTHS)
    assert len(build_offline_reader(str(tmp_path), run_id="r", ttt_length=1, max_len=64).read()) == 3
    capture = open_capture(stores / "1.zarr")
    sample: dict[str, Any] = normalize_offline_sample(
        load_feature_file(refs[1].feature_store_uri.removeprefix("file://")), max_len=32
    )
    assert torch.equal(sample["target"], capture.torch("final_ln")[None, :32])
    want = torch.cat([capture.torch("resid_pre", layer) for layer in (1, 2, 3)], dim=1)
    assert torch.equal(sample["hidden_state"], want[None, :32])
    assert sample["loss_mask"].tolist() == [[0] * 20 + [1] * 11 + [0]] and sample["input_ids"].shape == (1, 32)


def test_the_pages_exports_work(stores: Path, tmp_path: Path) -> None:
    names = {"captures": str(stores), "2,18,33": "1,2,3"}
    made = {"hs_*.safetensors": 0, "*.ckpt": 0}
    for number, words in enumerate([*snippets.commands("speculators"), *snippets.commands("SpecForge")]):
        if words[:2] == ["dmi", "run"]:
            _, rest = make_run_parser().parse_known_args(words[2:])
            assert not rest, "every flag must exist in dmi run"
        elif words[0] == "dmi":
            out = {f"data/{name}": str(tmp_path / f"{number}") for name in ("hidden_states", "features")}
            assert main([{**names, **out}.get(word, word) for word in words[1:]]) == 0, words
            for pattern in made:
                made[pattern] += len(list((tmp_path / f"{number}").rglob(pattern)))
    assert made == {"hs_*.safetensors": 3, "*.ckpt": 6}
    left = snippets.run("speculators", {"captures": str(stores), "layers": [1, 2, 3]})
    assert left["sample"]["hidden_states"].shape == (300, 4, WIDTH)


class FewSteps:
    """Replaces speculators' trainer, which needs a GPU. It runs the same steps on a CPU, all on the first batch."""

    losses: list[float]
    batch: dict[str, Any]

    def __init__(self, model: torch.nn.Module, config: Any, train_loader: Any, val_loader: Any = None) -> None:
        self.model, FewSteps.batch, FewSteps.losses = model, next(iter(train_loader)), []
        self.arguments = config.train_call_kwargs or {}

    def run_training(self) -> None:
        """Run five training steps."""
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss, _ = self.model(**self.batch, **self.arguments)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(float(loss.detach()))


def test_the_pages_training_command_learns_from_stores(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.train import cli

    from dmi_connector.analysis.training import speculators_backend

    width = 64
    specs = [ArraySpec("resid_pre", "bfloat16", (0, 1, 2), width), ArraySpec("resid_final", "bfloat16", (), width)]
    write_run(tmp_path / "captures", specs, 3)
    preprocess(tmp_path / "captures", tmp_path / "data")
    more = {
        **{"verifier-name-or-path": tiny_model("qwen3"), "data-path": tmp_path / "data", "num-workers": 0},
        **{"save-path": tmp_path / "checkpoints", "log-dir": tmp_path / "logs", "total-seq-len": 512},
        **{"draft-attn-impl": "eager", "loss-implementation": "eager"},
    }
    (words,) = (words for words in snippets.commands("speculators") if words[0] == "python")
    assert words[:3] == ["python", "-m", speculators_backend.__name__]
    flags = [str(part) for name, value in more.items() for part in (f"--{name}", value)]
    flags += ["--target-layer-ids", "0", "1", "2"]
    argv = ["train", *(str(tmp_path / word) if word == "captures" else word for word in words[3:]), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(cli, "Trainer", FewSteps)
    speculators_backend.main()
    assert FewSteps.batch["hidden_states"].shape == (1, 512, 3 * width)
    assert FewSteps.losses[-1] < FewSteps.losses[0]
