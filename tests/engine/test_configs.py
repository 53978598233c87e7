# SPDX-License-Identifier: Apache-2.0
"""The files in configs/: each through vLLM's own parser into an engine config, one in a real server.

That server runs an architecture from a plugin of its own, as docs/HOOKS.md describes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.hooks import PRESETS
from tests.engine.harness import USUAL_HOOKS
from tests.ports import free_port

CONFIGS = Path(__file__).parents[2] / "configs"
EXPECTED = {
    "hidden-states.yaml": ("draft", set(PRESETS["hidden-states"])),
    "full.yaml": ("draft", set(PRESETS["vllm-full"]) & USUAL_HOOKS),
    "attention.yaml": ("draft", set(PRESETS["attention"]) & USUAL_HOOKS),
    "target-owner.yaml": ("target", {*PRESETS["hidden-states"], "mlp_out"}),
}
HOMEMADE = "HomemadeForCausalLM"
PLUGIN = f'''
from dmi_connector.engine.model.architectures import Architecture, register_architecture


def register() -> None:
    register_architecture(Architecture("{HOMEMADE}", "vllm.model_executor.models.llama:LlamaForCausalLM"))
'''


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


@pytest.fixture
def homemade(tiny_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """(directory of a model whose architecture vLLM does not know, directory of the plugin that adds it)."""
    from dmi_connector.cli.tiny_models import make_model

    model = make_model("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [HOMEMADE]}))
    site = tmp_path / "site"
    info = site / "my_models-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_models_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmy_models = my_models_plugin:register\n")
    return model, site


@contextmanager
def server(argv: list[str], cwd: Path, env: dict[str, str]) -> Iterator[str]:
    """A vLLM server process, from when it answers; gives its address."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *argv]
    log = cwd / "server.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, stdout=file, stderr=file)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 900
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def test_a_server_with_a_config_and_a_plugin_captures(homemade: tuple[Path, Path], tmp_path: Path) -> None:
    from dmi_connector import open_capture
    from dmi_connector.analysis.oracle.transformers_oracle import Oracle, compare

    model, site = homemade
    argv = ["--config", str(CONFIGS / "full.yaml"), "--model", str(model), "--served-model-name", "tiny"]
    argv += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "once upon a time",
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    with server(argv, tmp_path, {"PYTHONPATH": paths}) as address:
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        capture = open_capture(answer["kv_transfer_params"]["dmi_store"], timeout=300)
    assert capture.path.parent == tmp_path / "captures"
    assert capture.attrs["architecture"] == HOMEMADE and capture.attrs["codec"] == "lz4"
    assert set(capture.attrs["hooks"]) == EXPECTED["full.yaml"][1]
    assert len(capture.token_ids) == capture.prompt_len + 7
    # transformers has to load the same weights under the name it knows.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    errors = compare(capture, Oracle(model))
    assert all(error <= 1e-5 for error in errors.values()), errors
