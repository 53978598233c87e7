# SPDX-License-Identifier: Apache-2.0
"""docs/READING.md: each snippet runs, and gives what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.layout import ArraySpec
from tests import storekit as kit

PAGE = (Path(__file__).parents[2] / "docs/READING.md").read_text()
SNIPPETS = re.findall(r"^##+ (.+?)$|^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LAYERS, WIDTH, LENGTH = 13, 8, 1500
ARRAYS = tuple(
    ArraySpec(name, "bfloat16", tuple(range(LAYERS)), WIDTH) for name in ("q", "resid_pre", "attn_out", "resid_mid")
) + (ArraySpec("logits", "float32", (), 50),)
MEDIA = [{"modality": "image", "hash": "a", "positions": [[7, 71]]}]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of three requests of 1,500 tokens with the key "run-1" and an image, and one with another key."""
    folder = tmp_path_factory.mktemp("page")
    owner = kit.Store(16 << 20)
    for i in range(4):
        names = {"key": "run-1" if i < 3 else "run-2", "request_id": f"r{i}"}
        attrs = {"num_layers": LAYERS, "media": MEDIA}
        owner.write(folder / "captures" / f"{i}.zarr", ARRAYS, LENGTH, 2, attrs=attrs, **names)
    assert owner.shutdown()
    return folder


def run(title: str, stores: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code of a section; "" is the part before the first section. Returns the variables after the run."""
    section, found = "", []
    for name, code in SNIPPETS:
        section = name or section
        found += [code] if code and section == title else []
    assert found, f"section {title!r} of docs/READING.md shows no code"
    monkeypatch.chdir(stores)
    with open_capture("captures/0.zarr") as cap:
        names: dict[str, Any] = {"cap": cap, "np": np}
        exec(compile("\n".join(found).replace("NAME", "0"), f"docs/READING.md, {title}", "exec"), names)
    return names


def test_every_snippet_of_the_page_is_run() -> None:
    here = Path(__file__).read_text()
    titles, section = [], ""
    for name, code in SNIPPETS:
        section = name or section
        titles += [section] if code else []
    assert titles and all(f'run("{title}", ' in here for title in titles), titles


def test_a_store_is_read(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("", stores, monkeypatch)["cap"].path.name == "0.zarr"


def test_a_capture_is_followed(
    stores: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run("Following a running capture", stores, monkeypatch)
    assert names["first"] + len(names["rows"]) == LENGTH and names["rows"].shape[1] == WIDTH
    assert capsys.readouterr().out.splitlines()[-2:] == ["True None", str(LENGTH // 2)]


def test_rows_of_images_are_found(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Images", stores, monkeypatch)
    assert names["rows"].sum() == 64 and names["first"].shape == (64, WIDTH)


def test_stores_are_found(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("Finding stores", stores, monkeypatch)["info"].num_tokens == LENGTH


def test_many_stores_are_one_array(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Many stores", stores, monkeypatch)
    assert len(names["captures"]) == 3 and names["rows"].shape == (3 * LENGTH, WIDTH)
    assert names["captures"].table("polars").height == 3


def test_batches_come_for_training(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Batches for training", stores, monkeypatch)
    assert names["batch"].shape == (4096, WIDTH) and names["data"].num_tokens == 4 * (LENGTH - 1)


def test_rows_are_chosen(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Choosing rows", stores, monkeypatch)
    assert names["ends"].shape == (4, WIDTH) and names["labels"].tolist() == ["run-1"] * 3 + ["run-2"]
    assert len(names["seen"]["row"]) == 4 * LENGTH // 4


def test_log_probabilities_are_computed(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("Log-probabilities", stores, monkeypatch)["found"].logprobs.shape == (8, 3)


def test_a_dataset_is_computed(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("xarray", stores, monkeypatch)["ds"]
    assert found.q.shape == (LAYERS, LENGTH, WIDTH) and "position" in found.coords
