# SPDX-License-Identifier: Apache-2.0
"""Servers can read the files of benchmarks/fitted.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fitted
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.hooks import HOOKS
from dmi_connector.probes import with_probes
from dmi_connector.reduce import parse


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is wide enough for `pca(128)` and `rp(512)`."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    return str(make_model("qwen3", tmp_path_factory.mktemp("model"), **sizes))


@pytest.mark.parametrize("encoding", fitted.ENCODINGS)
def test_an_encoding_fits_the_model(encoding: str, model: str, tmp_path: Path) -> None:
    (text,) = fitted.rules(encoding, "resid_pre,mlp_post", model, tmp_path).values()
    dims, reduction = fitted.dims_of(model), parse(text)
    assert reduction is not None
    for hook in ("resid_pre", "mlp_post"):
        width = dims.width(HOOKS[hook])
        assert 0 < reduction.bind(hook, (0, 1), width, 1).stored_width(width, "bfloat16") < 2 * width


@pytest.mark.parametrize("kind", fitted.PROBES)
def test_probes_fit_the_model(kind: str, model: str, tmp_path: Path) -> None:
    given = fitted.probes(kind, model, tmp_path)
    dims, computed = with_probes(fitted.dims_of(model), [*given.items()], 1)
    assert [*computed] == ["probe.p"] and dims.probes[0].layers == ((0, 1) if kind == "layers" else (1,))
