# SPDX-License-Identifier: Apache-2.0
"""Limits, custom paths and file modes in an engine. Refused captures give a reason, and every request is served."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.retention import read_usage
from tests.engine.harness import CHUNK, SEGMENT, Ask, Run, engine, generate, prompt

ROW = 2 * 3 * 64 * 4 + 9  # bytes per row: 2 hooks, 3 layers, width 64, float32, and the token arrays


@pytest.fixture(scope="module", params=["target", pytest.param("pool", marks=pytest.mark.soak)])
def run(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    run = Run(tmp_path_factory.mktemp("limits") / "stores")
    root = run.store_dir.parent / "root"
    root.mkdir()
    run.facts["root"] = root
    options = {"max_request_bytes": 100 * ROW, "max_total_bytes": 400_000, "min_free_bytes": 1}
    options |= {"allow_custom_save_path": True, "save_path_roots": [str(root)]}
    chunks = {"chunk_tokens": CHUNK, "segment_tokens": SEGMENT, "codec": "none"}
    args = capture_args("resid_pre,mlp_out", run.store_dir, owner=request.param, **options, **chunks)
    grow = {"max_tokens": 30}
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(
            llm,
            run,
            {
                "long": Ask(prompt(101)),
                "cut": Ask(prompt(90), sampling=grow),
                "whole": Ask(prompt(60), sampling=grow),
                "custom": Ask(prompt(20), kv={"dmi": {"save_path": f"{root}/a/b"}}),
                "elsewhere": Ask(prompt(20), kv={"dmi": {"save_path": str(run.store_dir.parent / "out")}}),
            },
        )
        generate(llm, run, {"full": Ask(prompt(100)), "small": Ask(prompt(4))})
    return run


@pytest.mark.parametrize(
    ("name", "reason"),
    [("long", "max_request_bytes: "), ("elsewhere", "dmi.save_path: "), ("full", "max_total_bytes: ")],
)
def test_a_refused_capture_says_why_and_its_request_is_served(run: Run, name: str, reason: str) -> None:
    reply = run.replies[name]
    assert reply.kv_transfer_params is not None and reply.kv_transfer_params.keys() == {"dmi_error"}
    assert reply.kv_transfer_params["dmi_error"].startswith(reason)
    assert len(reply.outputs[0].token_ids) == 12, "the request is served without a capture"


def test_a_store_that_reaches_max_request_bytes_keeps_the_rows_before_it(run: Run) -> None:
    params = run.replies["cut"].kv_transfer_params
    capture = open_capture(run.store("cut"), 60, allow_incomplete=True)
    assert params["dmi_missing"] == capture.missing == [[100, 119]]
    assert params["dmi_reason"] == capture.reason and capture.reason.startswith("max_request_bytes: ")
    assert capture.token_ids.tolist() == run.tokens("cut")[:100]
    assert capture.numpy("mlp_out").shape == (3, 100, 64) and capture.numpy("mlp_out")[:, -1].any()
    assert verify_store(capture.path) == []
    assert len(run.replies["cut"].outputs[0].token_ids) == 30


def test_captures_within_the_limits_are_whole(run: Run) -> None:
    for name, rows in (("whole", 89), ("small", 15), ("custom", 20)):
        capture = open_capture(run.store(name), 60)
        assert len(capture.token_ids) == rows and verify_store(capture.path) == []
    assert run.store("custom").parent == run.facts["root"] / "a" / "b"
    assert (run.store("custom").parent / "index.jsonl").exists()
    usage = read_usage(str(run.store_dir))
    # Admitted captures are written to their end, and files have more bytes than their rows.
    assert usage is not None and usage.nbytes < 500_000


def test_files_are_private(run: Run) -> None:
    for path in [run.store_dir, run.facts["root"] / "a", *run.store_dir.rglob("*"), *run.facts["root"].rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
