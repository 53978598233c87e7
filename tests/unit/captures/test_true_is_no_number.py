# SPDX-License-Identifier: Apache-2.0
"""True is refused where a number is expected: Python would take it for 1, and read another layer, head or neuron."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_captures
from dmi_connector.analysis.fit_pq import fit_pq
from dmi_connector.analysis.fit_probe import fit_probe
from dmi_connector.analysis.frequent_directions import FrequentDirections
from dmi_connector.analysis.logprobs import top_logprobs
from dmi_connector.analysis.neurons import top_tokens
from dmi_connector.analysis.sketch import sketch
from dmi_connector.analysis.stats import find_statistic, of_layer
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.layout import ArraySpec
from dmi_connector.store.read.files.thread_pool import set_read_threads
from tests import storekit as kit

ARRAYS = (
    ArraySpec("resid_pre", "float32", (0, 1), 8),
    ArraySpec("q_rot", "float32", (0, 1), 8),
    ArraySpec("k_rot", "float32", (0, 1), 4),
    ArraySpec("mlp_post", "float32", (0, 1), 8),
    ArraySpec("topk_ids", "int32", (0, 1), 2),
    ArraySpec("logits", "float32", (), 20),
)
ATTRS = {
    "num_layers": 2,
    "dims": {"hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4},
    "experts": {"count": 4, "layers": [0, 1]},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root, stores = tmp_path_factory.mktemp("stores"), kit.Store(4 << 20)
    for name in "ab":
        stores.write(root / f"{name}.zarr", ARRAYS, 40, 4, attrs=ATTRS, chunk=16, segment=32, key=name)
    assert stores.shutdown()
    yield root


Read = Callable[[Capture, Captures, Path, object], object]
READS: dict[str, Read] = {
    "layer": lambda one, _all, _root, n: one.numpy("resid_pre", n),  # type: ignore[arg-type]
    "layers": lambda one, _all, _root, n: one.numpy("resid_pre", [0, n]),  # type: ignore[list-item]
    "layer of a view": lambda _one, every, _root, n: every.rows("resid_pre", n),  # type: ignore[arg-type]
    "head": lambda one, _all, _root, n: one.attention(0, n),  # type: ignore[arg-type]
    "layer of attention": lambda one, _all, _root, n: one.attention(n, 0),  # type: ignore[arg-type]
    "prompt_start": lambda one, _all, _root, n: one.routed_experts(n, check=False),  # type: ignore[arg-type]
    "layer of a tally": lambda one, _all, _root, n: one.tally("mlp_post", n),  # type: ignore[arg-type]
    "tokens": lambda one, _all, _root, n: one.numpy("resid_pre", 0, [n]),  # type: ignore[list-item]
    "prompt_len": lambda _one, _all, root, n: open_captures(root, prompt_len=n),  # type: ignore[arg-type]
    "number of a store": lambda _one, every, _root, n: every[n],  # type: ignore[call-overload]
    "skip": lambda _one, every, _root, n: every.rows("resid_pre", 0, n),  # type: ignore[arg-type]
    "last": lambda _one, every, _root, n: every.rows("resid_pre", 0, last=n),  # type: ignore[arg-type]
    "size": lambda _one, every, _root, n: next(every.rows("resid_pre", 0).batches(n)),  # type: ignore[arg-type, call-overload]
    "neuron": lambda one, _all, _root, n: top_tokens(one, "mlp_post", n, 0),  # type: ignore[arg-type]
    "count": lambda one, _all, _root, n: top_tokens(one, "mlp_post", 0, 0, n),  # type: ignore[arg-type]
    "context": lambda one, _all, _root, n: top_tokens(one, "mlp_post", 0, 0, 1, n),  # type: ignore[arg-type]
    "index": lambda one, _all, _root, n: of_layer(
        one,
        "mlp_post",
        0,
        find_statistic(one, "mlp_post", "value"),
        n,
        slice(None),  # type: ignore[arg-type]
    ),
    "k of logprobs": lambda _one, every, _root, n: top_logprobs(every.rows("logits"), n),  # type: ignore[arg-type]
    "k of a sketch": lambda one, _all, _root, n: sketch(one, "resid_pre@0", n),  # type: ignore[arg-type]
    "k of directions": lambda _one, _all, _root, n: FrequentDirections(n, 8),  # type: ignore[arg-type]
    "width of directions": lambda _one, _all, _root, n: FrequentDirections(4, n),  # type: ignore[arg-type]
    "seed": lambda _one, _all, root, n: fit_probe([], {}, "resid_pre", root / "new", seed=n),  # type: ignore[arg-type]
    "subvectors": lambda _one, _all, root, n: fit_pq([root], ["resid_pre"], n, root / "new"),  # type: ignore[arg-type]
    "threads": lambda _one, _all, _root, n: set_read_threads(n),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("value", [True, np.True_, 1.5, "1"], ids=repr)
@pytest.mark.parametrize("what", READS)
def test_what_is_no_number_is_refused(directory: Path, what: str, value: object) -> None:
    every = open_captures(directory)
    with every[0] as one, pytest.raises((ValueError, LookupError, TypeError)) as caught:
        READS[what](one, every, directory, value)
    assert repr(value) in str(caught.value) or str(value) in str(caught.value) or "mask" in str(caught.value)


@pytest.mark.parametrize("what", [name for name in READS if name not in ("seed", "subvectors", "threads")])
def test_integers_of_numpy_are_numbers(directory: Path, what: str) -> None:
    every = open_captures(directory)
    with every[0] as one:
        READS[what](one, every, directory, np.int64(1))
