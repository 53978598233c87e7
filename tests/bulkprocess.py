# SPDX-License-Identifier: Apache-2.0
"""Runs `dmi run` as a process on a tiny model, and checks the stores that it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.run_manifest import read_manifest
from dmi_connector.store.read.verify import verify_store
from tests import programs

ROOT = Path(__file__).parents[1]
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "32"]
TOKENS = 6


def command(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    run = [sys.executable, "-m", "dmi_connector.cli", "run", "--model", str(model), "--prompts", str(prompts)]
    return [*run, "--out", str(out), "--max-tokens", str(TOKENS), "--hooks", "resid_pre,q,logits", *FLAGS, *more]


def run(model: Path, prompts: Path, out: Path, *more: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return programs.run(command(model, prompts, out, *more), ROOT, timeout)


def start(model: Path, prompts: Path, out: Path, log: Path, *more: str) -> programs.Program:
    with open(log, "ab") as file:
        return programs.Program(command(model, prompts, out, *more), cwd=ROOT, stdout=file, stderr=file)


def write_ids(path: Path, count: int, seed: int = 0) -> dict[int, list[int]]:
    """Write a file of `count` prompts of 1 to 199 tokens. Returns {row: token ids}."""
    rng = np.random.default_rng(seed)
    prompts = {i: rng.integers(5, 500, rng.integers(1, 200)).tolist() for i in range(count)}
    path.write_text("".join(json.dumps({"prompt_token_ids": p, "id": i}) + "\n" for i, p in prompts.items()))
    return prompts


def told(text: str) -> list[dict[str, Any]]:
    """The objects that `--json` printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def why(out: Path, *texts: str) -> str:
    """A description of the process's output, for a failed assertion."""
    return "\n".join([*texts, *(path.read_text()[-3000:] for path in sorted(out.glob("engine*.log")))])


def check_whole(
    out: Path, prompts: Mapping[int, Sequence[int]], manifests: Sequence[str] = ("manifest.jsonl",)
) -> None:
    """Check that each prompt has exactly one complete, valid store and one manifest line that names the store."""
    assert not list(out.glob("*.partial"))
    entries = [entry for name in manifests for entry in read_manifest(out / name)]
    assert sorted(entry["row"] for entry in entries) == sorted(prompts), "lost or doubled lines"
    stores = {path.name for path in out.glob("*.zarr")}
    assert stores == {entry["store"] for entry in entries} and len(stores) == len(entries), "lost or doubled stores"
    for entry in entries:
        attrs = read_attrs(out / entry["store"])
        assert verify_store(out / entry["store"], begun={}) == [] and attrs["complete"], entry
        assert attrs["key"] == entry["key"] and entry["finish_reason"] == attrs["finish_reason"], entry
        assert entry["finish_reason"] in ("stop", "length"), entry
        want = prompts[entry["row"]]
        assert entry["prompt_tokens"] == attrs["prompt_len"] == len(want), entry
        assert attrs["num_tokens"] == len(want) + entry["generated_tokens"] - 1, entry
        token_ids = tokens_of(out / entry["store"])
        assert token_ids[: len(want)] == list(want), entry


def tokens_of(store: Path) -> list[int]:
    from dmi_connector import open_capture

    with open_capture(store, timeout=0) as capture:
        found: list[int] = capture.token_ids.tolist()
        return found
