# SPDX-License-Identifier: Apache-2.0
"""The logit lens of one token, and that of all tokens while the page requests something else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.view import predictions as all_tokens
from dmi_connector.view.app import make_app
from dmi_connector.view.data import Library
from dmi_connector.view.lens import end_of, lacking, predictions
from tests import storekit as kit
from tests import viewkit


def test_the_last_place_gives_the_logits_that_the_engine_stored(tmp_path: Path) -> None:
    real = viewkit.unpack(tmp_path)
    end = end_of(make_model("qwen3", tmp_path / "model"))
    with open_capture(real / "full.zarr") as capture:
        for logits, row in zip(capture.numpy("logits"), capture.logits_positions, strict=True):
            places, ids, shares = predictions(capture, end, int(row), 5)
            assert places == ["0", "1", "2", "final"]
            wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            np.testing.assert_allclose(shares[-1], wanted[ids[-1]], rtol=0.05)  # rounding of bfloat16
            assert logits[ids[-1, 0]] >= logits.max() - 0.05


def test_a_model_is_read_once(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    assert end_of(model) is end_of(model)


def test_a_model_of_another_width_is_refused(tmp_path: Path) -> None:
    real = viewkit.unpack(tmp_path)
    end = end_of(make_model("qwen3", tmp_path / "model", hidden_size=32))
    with (
        open_capture(real / "full.zarr") as capture,
        pytest.raises(ValueError, match="rows have 64 values, the model's final norm 32"),
    ):
        predictions(capture, end, 0, 5)


@pytest.mark.parametrize("k", [16, 4])
def test_projections_of_the_stream_are_named_in_place_of_a_lens(tmp_path: Path, k: int) -> None:
    """Projections as wide as the stream are named too."""
    reduction = parse(f"rp({k})")
    assert reduction is not None
    settings = {**reduction.settings(), "dtype": "float32", "width": 16}
    pre = ArraySpec("resid_pre", "uint8", (0, 1), reduction.stored_width(16, "float32"), reduce=settings)
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [pre, ArraySpec("resid_final", "float32", (), 16)], 10, attrs={"num_layers": 2})
    assert owner.shutdown(kit.PATIENCE)
    with open_capture(tmp_path / "a.zarr", 0) as capture:
        for model in (None, tmp_path):
            assert (lacking(capture, model) or "").startswith("'resid_pre' was stored as rp, from which this cannot be")


def test_nothing_is_computed_after_the_client_has_disconnected(
    stores: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    gone = asyncio.Event()
    real = all_tokens.predicted
    monkeypatch.setattr(all_tokens, "predicted", lambda *given: computed.append(given[2]) or real(*given))

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            gone.set()

    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "http_version": "1.1", "asgi": {}}
    path = "/secret/api/predicted/story.zarr"
    app = make_app(Library.at(stores), "secret", model)
    asyncio.run(app({**scope, "path": path, "raw_path": path.encode()}, receive, send))  # type: ignore[arg-type]
    assert computed[0] == "final" and len(computed) < 5, "fewer than 5 of 13 places must be computed"
