# SPDX-License-Identifier: Apache-2.0
"""The sums of the residual stream that `dmi verify` checks in a store with some of the model's layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dmi_connector.store.read.residual_sums import equations


def arrays(**layers: tuple[int, ...]) -> Any:
    return {name: SimpleNamespace(layers=numbers, reduce=None) for name, numbers in layers.items()}


TWO = {"resid_pre": (0, 1), "attn_out": (0, 1), "mlp_out": (0, 1), "resid_final": ()}


def test_resid_final_is_not_a_sum_of_a_layer_before_the_last() -> None:
    """The store has the first two of four layers, so the stream after layer 1 is not stored."""
    assert equations({"num_layers": 4}, arrays(**TWO)) == [
        (("resid_pre", 1), ("resid_pre", 0), ("attn_out", 0), ("mlp_out", 0))
    ]


@pytest.mark.parametrize("attrs", [{"num_layers": 2}, {}])
def test_the_last_layer_is_that_of_the_model_or_the_last_stored_one(attrs: dict[str, int]) -> None:
    assert equations(attrs, arrays(**TWO))[-1] == (
        ("resid_final", 0),
        ("resid_pre", 1),
        ("attn_out", 1),
        ("mlp_out", 1),
    )
