# SPDX-License-Identifier: Apache-2.0
"""Selections change the compiled graph, so they must not share one in vLLM's cache of compiled graphs.

vLLM 0.32 cannot load a cached graph on the CPU (it logs that and compiles again), so here a shared graph
shows only in the number of graphs; where it can be loaded, in the values as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dmi_connector import capture_args
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.tiny_models import make_model
from tests.engine.check import check_store
from tests.engine.harness import Ask, Run, engine, generate, prompt

SELECTIONS = (["resid_pre", "mlp_out"], ["q", "mlp_out"], ["resid_pre", "mlp_out"])


def graphs(cache_root: Path) -> int:
    """Compiled graphs in vLLM's cache directory."""
    found = cache_root.glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model")
    return len(list(found))


@pytest.fixture(scope="module", params=["draft", pytest.param("target", marks=pytest.mark.soak)])
def runs(
    request: pytest.FixtureRequest,
    vllm_cache_root: Path,
    known_models: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Run]:
    """The selections one after the other over one new cache directory."""
    done = []
    cache_root = tmp_path_factory.mktemp("cache")
    (cache_root / "modelinfos").symlink_to(vllm_cache_root / "modelinfos")  # or a process imports each model class anew
    model = make_model("qwen3", tmp_path_factory.mktemp("one-layer"), num_hidden_layers=1)  # three are compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(cache_root))
        for index, hooks in enumerate(SELECTIONS):
            run = Run(tmp_path_factory.mktemp(f"selection-{index}"))
            with engine(model, **capture_args(hooks, run.store_dir, request.param)) as llm:
                generate(llm, run, {"short": Ask(prompt(12)), "long": Ask(prompt(140))})
            run.facts |= {"graphs": graphs(cache_root), "model": model}
            done.append(run)
    return done


def test_each_selection_has_right_values(runs: list[Run]) -> None:
    twin = Oracle(runs[0].facts["model"])
    for run, hooks in zip(runs, SELECTIONS, strict=True):
        for name, length in (("short", 12), ("long", 140)):
            check_store(run.store(name), twin, run.tokens(name), length, hooks)


def test_a_selection_has_a_graph_of_its_own_and_finds_it_again(runs: list[Run]) -> None:
    assert [run.facts["graphs"] for run in runs] == [1, 2, 2]
