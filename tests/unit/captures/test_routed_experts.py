# SPDX-License-Identifier: Apache-2.0
"""`Capture.routed_experts` and its export. tests/engine/test_compatibility.py compares them with vLLM's own output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import snippets
from tests import storekit as kit

TOKENS, TOP_K = 50, 2
Write = Callable[..., tuple[Capture, np.ndarray]]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """write(layers, count, name="a", **options): a store of a model with 4 layers, and its topk_ids."""
    owner = kit.Store(1 << 20)

    def call(
        layers: tuple[int, ...] = (1, 3), count: int = 60, name: str = "a", ids: Any = None, **options: Any
    ) -> tuple[Capture, np.ndarray]:
        rng = np.random.default_rng(0)
        rows = rng.permuted(np.tile(np.arange(count), (len(layers), TOKENS, 1)), axis=-1)[..., :TOP_K].astype("<i4")
        rows = rows if ids is None else ids
        spec = ArraySpec("topk_ids", "int32", layers, TOP_K)
        attrs = {"num_layers": 4, "experts": {"count": count, "layers": [1, 3]}, **options.pop("attrs", {})}
        values = {"topk_ids": rows.view("<u4")}
        owner.write(tmp_path / f"{name}.zarr", [spec], TOKENS, values=values, attrs=attrs, chunk=16, **options)
        return open_capture(tmp_path / f"{name}.zarr", timeout=0, allow_incomplete=True), rows

    yield call
    assert owner.shutdown()


@pytest.mark.parametrize(("count", "dtype"), [(60, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_the_array_has_all_layers_and_vllms_dtype(write: Write, count: int, dtype: type) -> None:
    capture, ids = write(count=count)
    found = capture.routed_experts()
    assert found.dtype == dtype and found.shape == (TOKENS, 4, TOP_K)
    np.testing.assert_array_equal(found[:, [1, 3]], ids.transpose(1, 0, 2))
    assert not found[:, [0, 2]].any()


def test_rows_are_read_in_parts(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmi_connector.captures.routed_experts._ROWS", 7)
    capture, ids = write()
    np.testing.assert_array_equal(capture.routed_experts(3)[:, 3], ids[1, 3:])


def test_a_part_of_the_prompt_is_left_out(write: Write) -> None:
    capture, ids = write()  # half of the rows belong to the prompt
    np.testing.assert_array_equal(capture.routed_experts(10)[:, 1], ids[0, 10:])
    np.testing.assert_array_equal(capture.routed_experts(1000)[:, 1], ids[0, TOKENS // 2 :])
    late, ids = write(name="late", attrs={"start": 5})
    np.testing.assert_array_equal(late.routed_experts(8)[:, 1], ids[0, 3:])
    with pytest.raises(
        ValueError, match="begins at position 5, and prompt_start 4 asks for rows before it; give 5 or mo"
    ):
        late.routed_experts(4)
    with pytest.raises(ValueError, match="prompt_start -1 is not valid; use 0 or more tokens"):
        capture.routed_experts(-1)


def test_a_store_that_begins_after_the_prompt_says_so(write: Write) -> None:
    capture, _ = write(attrs={"start": 213, "prompt_len": 211})
    for start in (0, 211, 213):
        with pytest.raises(
            ValueError, match=r"begins at position 213, after the prompt of 211 tokens, .* the prompt; read"
        ):
            capture.routed_experts(start)
    capture, ids = write(name="at", attrs={"start": 211, "prompt_len": 211})
    np.testing.assert_array_equal(capture.routed_experts(213)[:, 1], ids[0])


def test_missing_rows_before_the_first_returned_one_do_not_matter(write: Write) -> None:
    capture, ids = write(losses=[Loss.of(Cause.FELL_BEHIND, [[10, 20]])])
    np.testing.assert_array_equal(capture.routed_experts(20)[:, 1], ids[0, 20:])
    with pytest.raises(ValueError, match=r"lacks rows \[\[10, 20\]\] of the routing"):
        capture.routed_experts(19)


def test_a_layer_of_zeros_is_an_error(write: Write) -> None:
    _, ids = write()
    ids[1] = 0
    capture, _ = write(name="zeros", ids=ids)
    with pytest.raises(ValueError, match=r"experts of layers \[3\] are number 0"):
        capture.routed_experts()
    np.testing.assert_array_equal(capture.routed_experts(check=False)[:, 1], ids[0])


def test_few_tokens_of_one_expert_each_may_all_have_expert_0(tmp_path: Path) -> None:
    owner, spec = kit.Store(1 << 20), ArraySpec("topk_ids", "int32", (0,), 1)
    attrs = {"num_layers": 1, "experts": {"count": 16, "layers": [0]}}
    for tokens in (31, 32):
        values = {"topk_ids": np.zeros((1, tokens, 1), "<u4")}
        owner.write(tmp_path / f"{tokens}.zarr", [spec], tokens, values=values, attrs=attrs)
    assert owner.shutdown()
    with open_capture(tmp_path / "31.zarr") as few, open_capture(tmp_path / "32.zarr") as more:
        assert not few.routed_experts().any()
        with pytest.raises(ValueError, match=r"experts of layers \[0\] are number 0"):
            more.routed_experts()
        assert not more.routed_experts(prompt_start=1).any()


def test_missing_layers_rows_and_counts_are_named(write: Write) -> None:
    with pytest.raises(ValueError, match=r"lacks topk_ids of layers \[3\]"):
        write((1,), name="one")[0].routed_experts()
    losses = [Loss.of(Cause.FELL_BEHIND, [[20, 30]])]
    with pytest.raises(ValueError, match=r"lacks rows \[\[20, 30\]\] of the routing"):
        write(name="lost", losses=losses)[0].routed_experts()
    with pytest.raises(ValueError, match="does not record the number of experts"):
        write(name="old", attrs={"experts": None})[0].routed_experts()


def test_stores_without_routing_are_named(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [kit.Q], 10, attrs={"num_layers": 2})
    owner.write(tmp_path / "b.zarr", [kit.Q], 10, attrs={"num_layers": 2, "experts": {"count": 4, "layers": [1]}})
    assert owner.shutdown()
    for name in "ab":
        with pytest.raises(KeyError, match="'topk_ids' is not in this store"):
            open_capture(tmp_path / f"{name}.zarr").routed_experts()


def test_the_number_of_experts_of_older_stores_is_that_of_their_scores(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    specs = [ArraySpec("topk_ids", "int32", (0, 1), TOP_K), ArraySpec("router_logits", "float32", (0, 1), 300)]
    owner.write(tmp_path / "a.zarr", specs, 10, attrs={"num_layers": 2})
    assert owner.shutdown()
    capture = open_capture(tmp_path / "a.zarr")
    assert capture.routed_experts().dtype == np.uint16


def test_each_store_gets_a_file(write: Write, tmp_path: Path) -> None:
    capture, _ = write(key="12")
    flags = ["--to", "routed-experts", "--number-by", "key", "--prompt-start", "4", "-o", str(tmp_path / "out")]
    assert main(["export", str(capture.path), *flags]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out/routed_experts_12.npy"), capture.routed_experts(4))


def test_the_pages_command_works(write: Write, tmp_path: Path) -> None:
    capture, _ = write(key="7")
    names = {"captures": str(capture.path.parent), "routing": str(tmp_path / "routing")}
    (words,) = snippets.commands("Routed experts")
    assert main([names.get(word, word) for word in words[1:]]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "routing/routed_experts_7.npy"), capture.routed_experts())


def test_the_page_shows_code_that_runs(write: Write) -> None:
    capture, _ = write()
    names = snippets.run("Routed experts", {"store": capture.path})
    assert names["experts"].shape == (TOKENS, 4, TOP_K) and names["replayed"].shape == (TOKENS // 2, 4, TOP_K)
