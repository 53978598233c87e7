# SPDX-License-Identifier: Apache-2.0
"""An engine that uploads its stores to a real S3 server. Its tokens do not change, and no failed upload ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import capture_args, find_captures, open_capture, open_captures
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.repair import repair
from tests import s3kit
from tests.engine.harness import Ask, Run, engine, generate, prompt
from tests.storekit import until

URL = f"s3://{s3kit.BUCKET}/engine"


@pytest.fixture(scope="module")
def server() -> Iterator[s3kit.Proxy]:
    with s3kit.s3_server() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in s3kit.environment(proxy).items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def run(server: s3kit.Proxy, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run four requests. While the requests "b" and "denied" end, the server denies all access.

    An in-process engine learns that a request has ended in the next step or at its own end.
    """
    run = Run(tmp_path_factory.mktemp("upload") / "stores")
    args = capture_args("resid_pre,mlp_out", run.store_dir, owner="target", upload=URL)

    def ended(state: str, count: int) -> bool:
        return [info.upload for info in find_captures(run.store_dir)].count(state) == count

    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(llm, run, {"a": Ask(prompt(200))})
        generate(llm, run, {"b": Ask(prompt(40))})
        until(lambda: ended("done", 1))
        server.fault = lambda _method, _path, _number: "deny"
        generate(llm, run, {"denied": Ask(prompt(30))})
        generate(llm, run, {"after": Ask(prompt(30))})
        until(lambda: ended("failed", 2))
        server.fault = None
    return run


def test_the_response_names_the_url(run: Run) -> None:
    for name in run.replies:
        params = run.replies[name].kv_transfer_params
        assert params["dmi_url"] == f"{URL}/{Path(params['dmi_store']).name}"


def test_stores_in_the_bucket_equal_local_stores(run: Run) -> None:
    assert len(open_captures(URL)) == 2
    for name in ("a", "after"):
        params = run.replies[name].kv_transfer_params
        with open_capture(params["dmi_url"], 0) as there, open_capture(params["dmi_store"], 0) as here:
            assert there.token_ids.tolist() == run.tokens(name)[: len(there.token_ids)]
            for hook in here.hooks:
                assert np.array_equal(there.numpy(hook), here.numpy(hook))
        assert verify_store(params["dmi_url"]) == []


def test_a_denied_upload_stays_here_until_it_is_repaired(run: Run) -> None:
    failed = {str(info.store): info for info in find_captures(run.store_dir) if info.upload == "failed"}
    assert failed.keys() == {run.replies[name].kv_transfer_params["dmi_store"] for name in ("b", "denied")}
    for store, info in failed.items():
        assert "access denied (status 403, AccessDenied)" in str(info.upload_reason) and verify_store(store) == []
    assert [outcome.state for outcome in repair(run.store_dir)] == ["uploaded", "uploaded"]
    assert len(open_captures(URL)) == 4
