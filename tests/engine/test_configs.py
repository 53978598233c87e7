# SPDX-License-Identifier: Apache-2.0
"""Parses the files in configs/ with vLLM's own parser. tests/serve/test_faults.py starts a server with one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dmi_connector.hooks import PRESETS
from tests.engine.harness import USUAL_HOOKS

CONFIGS = Path(__file__).parents[2] / "configs"
EXPECTED = {
    "hidden-states.yaml": ("draft", set(PRESETS["hidden-states"])),
    "full.yaml": ("draft", set(PRESETS["vllm-full"]) & USUAL_HOOKS),
    "attention.yaml": ("draft", set(PRESETS["attention"]) & USUAL_HOOKS),
    "target-owner.yaml": ("target", {*PRESETS["hidden-states"], "mlp_out"}),
}


@pytest.mark.parametrize("name", [path.name for path in sorted(CONFIGS.iterdir())])
def test_each_config_file_reaches_the_engine(
    name: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dmi_connector.engine.context import capture_context

    monkeypatch.chdir(tmp_path)
    parser = make_arg_parser(FlexibleArgumentParser())
    model = str(tiny_model("qwen3"))
    args = parser.parse_args(["--config", str(CONFIGS / name), "--model", model, "--max-model-len", "512"])
    context = capture_context(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    owner, hooks = EXPECTED[name]
    assert context.owner.name == owner
    assert set(context.selection.hooks) == hooks
    assert context.options.store_dir == str(tmp_path / "captures")
