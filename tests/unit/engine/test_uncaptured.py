# SPDX-License-Identifier: Apache-2.0
"""vLLM has fused classes for some models, whose values taps cannot read. With capture, an engine runs another class."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine import models
from dmi_connector.engine.model.architectures import ARCHITECTURES

NAMES = [name for name, row in ARCHITECTURES.items() if row.uncaptured]


class Fused:
    def __init__(self, *, vllm_config: Any, prefix: str) -> None:
        self.given = vllm_config, prefix


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    module, _, class_name = ARCHITECTURES[request.param].uncaptured.partition(":")
    monkeypatch.setattr(importlib.import_module(module), class_name, Fused)
    return str(request.param)


def config(draft: bool = False) -> Any:
    model = object()
    drafts = SimpleNamespace(target_model_config=object(), draft_model_config=model) if draft else None
    cache = SimpleNamespace(kv_offloading_size=None)
    return SimpleNamespace(speculative_config=drafts, model_config=model, kv_transfer_config=None, cache_config=cache)


@pytest.mark.parametrize("prefix", ["", "language_model"])
def test_without_capture_it_is_that_of_vllm(name: str, prefix: str) -> None:
    engine = config()
    assert models.__getattr__(name)(vllm_config=engine, prefix=prefix).given == (engine, prefix)


def test_a_draft_of_an_engine_that_captures_is_that_of_vllm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "is_active", lambda _config: True)
    assert type(models.__getattr__(name)(vllm_config=config(draft=True))) is Fused


def test_with_capture_it_is_the_class_of_the_row(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models, "is_active", lambda _config: True)
    tapped = []
    monkeypatch.setattr(models.Tapped, "_init_tapped", lambda self, *given: tapped.append((self, *given)))
    engine = config()
    model = models.__getattr__(name)(vllm_config=engine, prefix="model")
    assert tapped == [(model, engine, "model")]
    module, _, class_name = ARCHITECTURES[name].base.partition(":")
    assert isinstance(model, getattr(importlib.import_module(module), class_name))
    assert not isinstance(model, Fused)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == models.logger.name]
    assert warning.startswith(f"dmi_connector: capture runs {name} as vLLM's {ARCHITECTURES[name].base}, not as")
