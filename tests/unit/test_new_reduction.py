# SPDX-License-Identifier: Apache-2.0
"""A new reduction needs only one class and its entry in the table.

It is captured, read, verified, measured and shown like the others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from dmi_connector.analysis.diff import NothingToCompare, diff
from dmi_connector.analysis.directions import mean_difference
from dmi_connector.analysis.fidelity import fidelity, markdown
from dmi_connector.analysis.importance import importance
from dmi_connector.analysis.residual import drift
from dmi_connector.analysis.stats import find_statistic, of_layer, statistics
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.cli.main import main
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.engine.messages import Rows, StepMetadata
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import KINDS, ReduceError, Reduction, from_settings, parse
from dmi_connector.reduce.base import Keeps, as_bytes, pad, unpack
from dmi_connector.reduce.measures import ReducedRows
from dmi_connector.reduce.statistic import Statistic
from dmi_connector.store.read.verify import verify_store
from tests import storekit as kit
from tests.exporterkit import SMALL, begin, make_exporter

TOKENS, CHUNK = 20, 8
Values = dict[tuple[str, int], torch.Tensor]
"""{(hook, layer): values of the model, [TOKENS, width]}."""


@dataclass(frozen=True)
class Sign(Reduction):
    """The sign of each value, and one magnitude for all values of a row.

    A stored row has a bit per value, 1 for values below 0, the first value in the lowest bit of its byte, padded with
    zeros to a multiple of 4 bytes. Then follows the mean |x| of the row as float32 (`largest`: the largest |x|).
    """

    largest: bool = False
    kind: ClassVar[str] = "sign"
    forms: ClassVar[tuple[str, ...]] = ("sign", "sign(largest)")
    flags: ClassVar[dict[str, tuple[str, bool]]] = {"largest": ("largest", True)}
    keeps: ClassVar[Keeps] = Keeps.VALUES | Keeps.DIRECTIONS
    measured: ClassVar[dict[str, str]] = {"signs": "share of the values whose sign is read back"}

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(-(-width // 8)) + 4

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        width = values.shape[1]
        below = torch.nn.functional.pad(values < 0, (0, 8 * pad(-(-width // 8)) - width)).unflatten(1, (-1, 8))
        packed = (below * 2 ** torch.arange(8, device=values.device)).sum(2).to(torch.uint8)
        sizes = values.float().abs()
        return as_bytes(packed, sizes.amax(1, keepdim=True) if self.largest else sizes.mean(1, keepdim=True))

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        at = pad(-(-width // 8))
        below = np.unpackbits(stored[..., :at], axis=-1, bitorder="little")[..., :width]
        return (1 - 2 * below.astype(np.float32)) * unpack(stored, at, 1, "float32")

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        return {"signs": float(((rows.rows < 0) == (rows.decoded < 0)).mean())}

    def statistics(self) -> tuple[Statistic, ...]:
        return (Statistic("size", lambda rows, _: np.abs(rows[:, 0])),)


@pytest.fixture(autouse=True, scope="module")
def _known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, Sign.kind, Sign)
        yield


@pytest.fixture(scope="module")
def values() -> Values:
    torch.manual_seed(0)
    return {(hook, layer): torch.randn(TOKENS, SMALL.hidden) + layer for hook in ("resid_mid", "q") for layer in (0, 1)}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, values: Values) -> Iterator[Capture]:
    """A store whose rows passed through the tap's writer, the exporter, and the writers of stores."""
    folder = tmp_path_factory.mktemp("sign")
    options = {"hooks": "resid_mid,q", "reduce": {"resid_*": "sign", "q": "sign(largest)"}, "sink": "host"}
    exporter = make_exporter(folder, TOKENS + 1, SMALL, chunk_tokens=CHUNK, segment_tokens=2 * CHUNK, **options)
    slots = torch.arange(1, TOKENS + 1)
    for f in exporter.context.layout.fields:
        assert f.reduction is not None
        f.reduction.prepare(f.width, torch.device("cpu"), f.layer, 0)
        writer = RowWriter([f.width], torch.float32, [f.offset], [f.reduction], f.layer)
        writer(exporter.rows, slots, [values[f.hook, f.layer]])
    exporter.rows.view(torch.int32)[1:, :2] = torch.arange(TOKENS, dtype=torch.int32)[:, None]
    noted = begin(exporter, 1, TOKENS)
    starts = range(0, TOKENS, CHUNK)
    chunks = [Rows(1, first, slots[first : first + CHUNK].numpy()) for first in starts]
    exporter.after_forward(StepMetadata(chunks=chunks))
    [layout] = exporter.layouts.values()
    stores = kit.Store()
    record = stores.open(folder / "a.zarr", *layout.payload.arrays, chunk=CHUNK, segment=2 * CHUNK, codec="zstd")
    assert [(first, count) for first, count, _ in noted.chunks] == [(0, 8), (8, 8), (16, 4)]
    for first, count, payload in noted.chunks:
        stores.put_payload(record, payload, first, count)
    stores.close(record, TOKENS)
    assert stores.flush(kit.PATIENCE) and stores.shutdown()
    exporter.ring.close()
    with open_capture(folder / "a.zarr", 0) as capture:
        yield capture


def test_it_is_written_in_settings_and_kept_in_stores() -> None:
    assert parse("sign") == Sign() and parse(" sign( largest )") == Sign(True)
    assert from_settings(Sign(True).settings()) == Sign(True)
    with pytest.raises(ReduceError, match="'smallest' in 'sign\\(smallest\\)' is unknown; sign takes largest"):
        parse("sign(smallest)")
    with pytest.raises(ReduceError, match="sign takes no number, but 'sign\\(3\\)' gives '3'"):
        parse("sign(3)")


def test_reading_returns_the_decoded_values(captured: Capture, values: Values) -> None:
    assert verify_store(captured.path) == []
    assert captured.shape("q") == (2, TOKENS, SMALL.hidden)
    for (hook, layer), rows in values.items():
        size = rows.abs().mean(1, keepdim=True) if hook == "resid_mid" else rows.abs().amax(1, keepdim=True)
        np.testing.assert_allclose(captured.numpy(hook, layer), torch.where(rows < 0, -size, size), rtol=1e-6)
        assert captured.reduction(hook, layer) == Sign(hook == "q")
        np.testing.assert_array_equal(captured[f"blocks.{layer}.hook_resid_mid"], captured.numpy("resid_mid", layer))
        mean = np.abs(captured.numpy(hook, layer)).mean(0)
        np.testing.assert_allclose(importance([captured], hook, layer), mean, rtol=1e-5)


def test_operations_that_it_does_not_support_are_refused(captured: Capture) -> None:
    mean_difference([captured], [captured], "resid_mid", 0)
    with pytest.raises(ValueError, match="'resid_mid' was stored as sign, from which this cannot be computed"):
        drift(captured, "resid_mid", 0)
    with pytest.raises(ValueError, match="hook 'q' was not stored as a projection"):
        captured.project("q", np.zeros(SMALL.hidden))
    with pytest.raises(ValueError, match="hook 'q' was not stored as principal components"):
        captured.restore("q", 0)


def test_it_has_statistics_of_its_own(captured: Capture) -> None:
    assert [one.name for one in statistics(captured, "q")] == ["size"]
    found = of_layer(captured, "q", 1, find_statistic(captured, "q", "size"), 0, slice(3, 9))
    np.testing.assert_array_equal(found, np.abs(captured.numpy("q", 1, slice(3, 9))).max(1))


def test_its_fidelity_and_its_difference_from_full_rows_are_measured(
    captured: Capture, values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = torch.stack([values["resid_mid", layer] for layer in (0, 1)]).numpy()
    stores = kit.Store()
    spec = ArraySpec("resid_mid", "float32", (0, 1), SMALL.hidden)
    stores.write(tmp_path / "full.zarr", [spec], TOKENS, values={"resid_mid": kit.bits(full)}, ids=np.arange(TOKENS))
    assert stores.shutdown()
    found = fidelity([tmp_path / "full.zarr"], ["sign", "int8"])
    assert [(one.layer, one.reduction) for one in found] == [(0, "sign"), (0, "int8"), (1, "sign"), (1, "int8")]
    assert found[0].measures == {"signs": 1.0} and found[0].size == 8 / (4 * SMALL.hidden)
    table = markdown(found)
    assert "| error | signs |" in table and "- signs: share of the values whose sign is read back" in table
    assert main(["fidelity", str(tmp_path / "full.zarr"), "--reduce", "sign"]) == 0
    assert "signs" in capsys.readouterr().out
    with (
        open_capture(tmp_path / "full.zarr", 0) as other,
        pytest.raises(NothingToCompare, match="it is stored as sign in one"),
    ):
        diff(captured, other, "resid_mid")


def test_no_module_asks_for_the_class_of_a_reduction() -> None:
    """A reduction has attributes for all that other code must know, so a new one changes no other file.

    AttentionSummary has its own tap, and a call that reads its content.
    """
    concrete = {kind.__name__ for kind in KINDS.values()}
    package = Path(__file__).parents[2] / "dmi_connector"
    found = {
        name.name
        for file in package.rglob("*.py")
        if package / "reduce" not in file.parents
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name in concrete
    }
    assert found == {"AttentionSummary"}
