# SPDX-License-Identifier: Apache-2.0
"""Models with a vision tower: every hook of their language model compared with transformers in float32, for prompts of
text and prompts with images.

`make test` starts an engine for each family in SHORT and one without a vision tower. `make soak` tests all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, largest
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.cli.tiny_vision import WRAPPERS
from tests.engine import delta_cpu
from tests.engine.check import relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.engine.test_models import MOST, RESULT
from tests.runner import GPU
from tests.vision import IMAGE, PLACEHOLDERS, image, processed

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES = {"text_config": {**_HEADS, "hidden_size": 128}, "vision_config": {"out_hidden_size": 128}}
EVEN = dict.fromkeys(("qwen2_5_vl", "glm4v"), _SIZES)
"""Numbers of heads that two ranks can share. For these families, the config also needs the size of a head."""
OWNERS = ("draft", "target")
"""Owners to test. Owner pool uses the same taps."""
HYBRID = ("qwen3_5", "qwen3_5_moe")
"""Families that need owner pool and, on a CPU, a stand-in for a kernel. Kernels for GPUs do not support float32."""


def owners(arch: str) -> tuple[str, ...]:
    return ("pool",) if arch in HYBRID else OWNERS


_ALL = [(name, mode, owner) for name in WRAPPERS for mode in ("eager", "compiled") for owner in owners(name)]
SHORT = [
    ("qwen3_vl", "eager", "draft"),
    ("glm4v", "eager", "target"),
    ("llama4", "eager", "target"),
    ("qwen3_5", "eager", "pool"),
]

_TEXT_ONLY = "qwen3_vl", "eager", "language_model_only"
"""The engine without a vision tower that `make test` starts."""


def _marked(chosen: Sequence[tuple[str, str, str]]) -> list[Any]:
    rest = [one for one in _ALL if one not in chosen]
    return [*chosen, *(pytest.param(one, marks=pytest.mark.soak) for one in rest)]


CONFIGURATIONS = _marked(SHORT)


@dataclass
class Served:
    """The responses of an engine. images: {request: its images}. configuration: family, mode and owner."""

    arch: str
    model: Path
    run: Run
    images: dict[str, Sequence[Any]]
    twin: Oracle
    configuration: tuple[str, str, str] | None = None


def limit(arch: str, images: int) -> dict[str, int]:
    """The maximum number of images per prompt. With 0, vLLM loads no vision tower, and embeds token ids."""
    return {"image": images, **({"video": 0} if arch.startswith(("qwen", "glm", "intern")) else {})}


def with_images(arch: str, parts: Sequence[Any], images: Sequence[Any] = ()) -> Ask:
    """A request whose token ids have None for the next image."""
    tokens = [token for part in parts for token in (PLACEHOLDERS[arch] if part is None else part)]
    return Ask(tokens, images=images)


@pytest.fixture(scope="module")
def kernels() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids="-".join)
def served(request: pytest.FixtureRequest, known_models: None, tmp_path_factory: pytest.TempPathFactory) -> Served:
    arch, mode, owner = request.param
    if GPU and arch in HYBRID:
        pytest.skip("vLLM's kernels of gated delta nets for GPUs do not support float32")
    model = make_model(arch, tmp_path_factory.mktemp(arch))
    run = Run(tmp_path_factory.mktemp(f"{arch}-{mode}-{owner}"))
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, **SMALL)
    small, wide, large = image(2, 2), image(1, 3), image(6, 6)
    start = [prompt(100), None, prompt(90, seed=2)]
    asks = {f"len{n}": Ask(prompt(n)) for n in (5, 33, 300)} | {
        "one": with_images(arch, [prompt(7), None, prompt(20)], [small]),
        "two": with_images(arch, [prompt(3), None, prompt(9), None, prompt(30)], [wide, small]),
        "long": with_images(arch, start, [large]),
    }
    later = {
        "again": Ask(prompt(300)[:280] + prompt(9, seed=1)),
        "hit": with_images(arch, [*start, prompt(40, seed=3)], [large]),
        "other": with_images(arch, [*start, prompt(40, seed=3)], [image(6, 6, seed=1)]),
    }
    patch = request.getfixturevalue("kernels")
    if arch in HYBRID:
        delta_cpu.stand_in(patch)
    with engine(model, enforce_eager=mode == "eager", limit_mm_per_prompt=limit(arch, 2), **args) as llm:
        generate(llm, run, asks)
        generate(llm, run, later)
    images = {name: ask.images for name, ask in {**asks, **later}.items() if ask.images}
    return Served(arch, model, run, images, Oracle(model), request.param)


def errors_of(served: Served, name: str) -> dict[str, float]:
    """{hook: largest error} of a request, relative to the hook's largest value."""
    images = processed(served.model, served.arch, served.images[name]) if name in served.images else None
    reply = served.run.replies[name]
    tokens = served.run.tokens(name)
    return relative_errors(served.run.store(name), served.twin, tokens, len(reply.prompt_token_ids), images)


def worst(served: Served, names: Sequence[str]) -> dict[str, float]:
    """{hook: largest error} where it exceeds MOST. Appends all errors of these requests to the file RESULT."""
    found = largest(errors_of(served, name) for name in names)
    if RESULT and served.configuration:
        arch, mode, owner = served.configuration
        facts = {"model": arch + (", images" if names[0] in served.images else ""), "mode": mode, "owner": owner}
        with open(RESULT, "a") as file:
            file.write(json.dumps({**facts, "architecture": served.twin.architecture, "errors": found}) + "\n")
    return {hook: error for hook, error in found.items() if not error <= MOST}


def test_every_hook_of_a_text_is_that_of_transformers(served: Served) -> None:
    assert served.run.replies["again"].num_cached_tokens == 256, "no prefix-cache hit"
    assert worst(served, ["len5", "len33", "len300", "again"]) == {}


def test_every_hook_of_a_prompt_with_images_is_that_of_transformers(served: Served) -> None:
    replies = served.run.replies
    # The cached block of 128 tokens ends inside an image, or after an image of few tokens.
    assert replies["hit"].num_cached_tokens == 128, "no prefix-cache hit"
    assert replies["other"].num_cached_tokens == 0, "a prefix hit with another image"
    assert worst(served, list(served.images)) == {}


def test_stores_say_which_rows_are_of_images(served: Served) -> None:
    for name, reply in served.run.replies.items():
        capture = open_capture(served.run.store(name), timeout=300)
        ids = np.array(reply.prompt_token_ids)
        assert np.array_equal(capture.media[: len(ids)] >= 0, ids == IMAGE), name
        assert (capture.media[len(ids) :] == -1).all(), name
        items = capture.attrs.get("media", [])
        assert [item["modality"] for item in items] == ["image"] * len(served.images.get(name, ())), name
        assert len({item["hash"] for item in items}) == len(items), name
        assert set(capture.media[capture.media >= 0].tolist()) == set(range(len(items))), name


@pytest.mark.parametrize(
    ("arch", "mode", "flag"),
    [
        pytest.param(arch, mode, flag, marks=() if (arch, mode, flag) == _TEXT_ONLY else pytest.mark.soak)
        for arch in WRAPPERS
        for mode in ("eager", "compiled")
        for flag in ("limit_mm_per_prompt", "language_model_only")
    ],
)
def test_an_engine_without_its_vision_tower_gives_the_same_hooks(
    arch: str, mode: str, flag: str, known_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both flags disable images. The language model then embeds token ids in its forward."""
    model, run = make_model(arch, tmp_path / "model"), Run(tmp_path / "captures")
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owners(arch)[0], **SMALL)
    if arch in HYBRID:
        delta_cpu.stand_in(monkeypatch)
    args[flag] = True if flag == "language_model_only" else limit(arch, 0)
    with engine(model, enforce_eager=mode == "eager", **args) as llm:
        generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (5, 300)})
    assert worst(Served(arch, model, run, {}, Oracle(model)), ["len5", "len300"]) == {}


@pytest.mark.soak
@pytest.mark.parametrize("arch", [arch for arch in WRAPPERS if arch not in HYBRID])
def test_two_ranks_give_the_hooks_of_the_whole_model(
    arch: str, known_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(arch, tmp_path / "model", **EVEN.get(arch, {"text_config": _HEADS}))
    run = Run(tmp_path / "captures")
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, "target", **SMALL)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    args |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": True}
    asks = {"text": Ask(prompt(33)), "image": with_images(arch, [prompt(70), None, prompt(60)], [image(2, 3)])}
    with engine(model, in_process=False, limit_mm_per_prompt=limit(arch, 1), **args) as llm:
        generate(llm, run, asks)
    images = {"image": asks["image"].images}
    served = Served(arch, model, run, images, Oracle(model), (arch, "eager, two ranks", "target"))
    assert worst(served, ["text"]) == {} == worst(served, ["image"])
