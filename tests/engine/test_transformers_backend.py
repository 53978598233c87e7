# SPDX-License-Identifier: Apache-2.0
"""A model with `model_impl="transformers"`. Its hooks are found from its structure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.hooks import HOOKS
from tests.engine.check import relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.engine.test_models import FOUND, MOST


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3")  # vLLM has a class for this model, and ARCHITECTURES has an entry


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def run(model: Path, said: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    from dmi_connector.engine import models

    run = Run(tmp_path_factory.mktemp("structure"))
    args = capture_args(ALL_HOOKS, run.store_dir, "target", **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.logger, "warning", lambda text, *values: said.append(text % values))
        with engine(model, enforce_eager=True, model_impl="transformers", **args) as llm:
            generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (5, 300)})
    return run


@pytest.mark.parametrize("name", ["len5", "len300"])
def test_hooks_found_by_structure_are_those_of_transformers(model: Path, run: Run, name: str) -> None:
    twin = Oracle(model, without=[hook for hook in HOOKS if hook not in FOUND])
    errors = relative_errors(run.store(name), twin, run.tokens(name), len(run.replies[name].prompt_token_ids))
    assert set(errors) == set(FOUND) and {hook: error for hook, error in errors.items() if not error <= MOST} == {}


def test_the_store_names_the_model_and_the_log_says_what_was_found(run: Run, said: list[str]) -> None:
    assert open_capture(run.store("len5")).attrs["architecture"] == "Qwen3ForCausalLM"
    assert [line for line in said if "has no row in the table" in line] == [
        "dmi_connector: Qwen3ForCausalLM has no row in the table of architectures. Hooks found by its structure: "
        + ", ".join(FOUND)
        + ". To get other hooks, add a row: see docs/HOOKS.md"
    ]
