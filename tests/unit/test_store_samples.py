# SPDX-License-Identifier: Apache-2.0
"""Per-sample rows past the end: an engine may sample once more before it learns that a request has ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmi_connector.store.capture import CaptureSpec
from dmi_connector.store.persist import Persistence
from dmi_connector.store.reader import open_capture
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.verify import verify_store
from tests import storekit as kit

Q = ArraySpec("q", "float32", (0,), 4)
LOGITS = ArraySpec("logits", "float32", (), 33, per_sample=True)


@pytest.mark.parametrize("samples", [0, 1, 5, 63, 64, 65])
def test_a_surplus_sample_is_left_out(tmp_path: Path, samples: int) -> None:
    persistence = Persistence(1 << 20, writers=1)
    values = {"q": kit.random_bits(Q, 8), "logits": kit.random_bits(LOGITS, samples + 1)}
    path = tmp_path / "a.zarr"
    handle = persistence.open_capture(CaptureSpec(str(path), (Q, LOGITS), {"prompt_len": 4, "model": "tiny"}))
    kit.feed(persistence, handle, values, 8, 128)
    for i in range(samples + 1):
        kit.put_rows(persistence, handle, "logits", values["logits"][i : i + 1], i, 3 + i)
    handle.close(8, {"logits": samples}, token_ids=np.arange(8))
    assert persistence.shutdown(kit.PATIENCE)
    assert verify_store(path) == []
    capture = open_capture(path, timeout=0)
    assert capture.complete, capture.reason
    assert capture.logits_positions.tolist() == [3 + i for i in range(samples)]
    np.testing.assert_array_equal(kit.bits(capture.array("logits")[:]), values["logits"][:samples])


def test_a_lacking_sample_is_told(tmp_path: Path) -> None:
    persistence = Persistence(1 << 20, writers=1)
    values = {"q": kit.random_bits(Q, 8), "logits": kit.random_bits(LOGITS, 1)}
    path = tmp_path / "a.zarr"
    handle = persistence.open_capture(CaptureSpec(str(path), (Q, LOGITS), {"prompt_len": 4, "model": "tiny"}))
    kit.feed(persistence, handle, values, 8, 128)
    kit.put_rows(persistence, handle, "logits", values["logits"], 0, 3)
    handle.close(8, {"logits": 2}, token_ids=np.arange(8))
    assert persistence.shutdown(kit.PATIENCE)
    capture = open_capture(path, timeout=0, allow_incomplete=True)
    assert not capture.complete and "logits" in str(capture.reason)
