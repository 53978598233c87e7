# SPDX-License-Identifier: Apache-2.0
"""Different selections give different compiled graphs, which vLLM's cache must keep apart.

vLLM 0.32 does not load cached graphs on a CPU: it logs this, and compiles again. So on a CPU, a graph that two
selections share by mistake shows only in the number of graphs. On a GPU, it also shows in the values.
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
    """The number of compiled graphs in vLLM's cache directory."""
    found = cache_root.glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model")
    return len(list(found))


pytestmark = pytest.mark.soak  # three engines are compiled; test_refusals.py compares what is hashed


@pytest.fixture(scope="module", params=["draft", "target"])
def runs(
    request: pytest.FixtureRequest,
    vllm_cache_root: Path,
    known_models: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Run]:
    """One run per selection, in order, with one new cache directory."""
    done = []
    cache_root = tmp_path_factory.mktemp("cache")
    # without it, a process imports each model class again
    (cache_root / "modelinfos").symlink_to(vllm_cache_root / "modelinfos")
    # the default would compile three layers
    model = make_model("qwen3", tmp_path_factory.mktemp("one-layer"), num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(cache_root))
        for index, hooks in enumerate(SELECTIONS):
            run = Run(tmp_path_factory.mktemp(f"selection-{index}"))
            with engine(model, **capture_args(hooks, run.store_dir, request.param)) as llm:
                generate(llm, run, {"short": Ask(prompt(12)), "long": Ask(prompt(140))})
            run.facts |= {"graphs": graphs(cache_root), "model": model}
            done.append(run)
    return done


def test_each_selection_has_correct_values(runs: list[Run]) -> None:
    twin = Oracle(runs[0].facts["model"])
    for run, hooks in zip(runs, SELECTIONS, strict=True):
        for name, length in (("short", 12), ("long", 140)):
            check_store(run.store(name), twin, run.tokens(name), length, hooks)


def test_a_selection_has_its_own_graph_and_reuses_it(runs: list[Run]) -> None:
    assert [run.facts["graphs"] for run in runs] == [1, 2, 2]
