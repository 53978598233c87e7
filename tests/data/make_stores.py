# SPDX-License-Identifier: Apache-2.0
"""Makes stores-VERSION.tar.xz and stores-VERSION.json: stores of the current format version, and their values.

python -m tests.data.make_stores
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from dmi_connector import capture_args, open_capture
from dmi_connector.cli.tiny_models import ENV, make_model
from dmi_connector.store.format.schema import FORMAT_VERSION
from tests.engine.drafts import NGRAM
from tests.engine.harness import ALL_HOOKS, Ask, Run, engine, generate, prompt

SMALL = {"chunk_tokens": 8, "segment_tokens": 16}
REDUCE = {
    "resid_pre": "rp(16)",
    "q": "int8",
    "k": "int8(affine)",
    "v": "fp8",
    "pattern": "attn(3)",
    "z": "round(4)",
    "resid_mid": "int8(group=32)",
    "mlp_post": "topk(8,sample=2)",
    "mlp_out": "topk(4,exact,sample=3)",
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "full": ("bfloat16", ALL_HOOKS, {"codec": "zstd"}),
    "incomplete": ("float32", "resid_pre,q,logits", {"codec": "none", "max_request_bytes": 55_000}),
    "reduced": ("float32", "vllm-full,attention,pattern,-q_rot,-k_rot", {"codec": "lz4", "reduce": REDUCE}),
    "shared": ("float32", "hidden-states,z", {"codec": "zstd"}),
    "drafted": ("float32", "resid_pre,logits", {"codec": "zstd"}),
}
"""{directory: (dtype, hooks, options)}."""
ENGINES: dict[str, dict[str, Any]] = {
    "shared": {"in_process": False, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "drafted": {"speculative_config": NGRAM},
}
"""{directory: engine arguments}."""


def facts(store: Path) -> dict[str, Any]:
    """The attributes and values of a store that a test compares."""
    with open_capture(store, timeout=300, allow_incomplete=True) as capture:
        named = {key: getattr(capture, key) for key in ("complete", "reason", "missing", "prompt_len")}
        values = {hook: capture.numpy(hook) for hook in capture.hooks if hook != "resid_post"}
        digests = {hook: [list(v.shape), hashlib.sha256(v.tobytes()).hexdigest()] for hook, v in values.items()}
        named["loss_spans"] = capture.attrs["loss_spans"]
        if "speculative" in capture.attrs:
            named |= {"draft_index": capture.draft_index.tolist(), "draft_tokens": capture.attrs["draft_tokens"]}
        return {"store": store.name, **named, "token_ids": capture.token_ids.tolist(), "values": digests}


def main() -> None:
    for name, value in {**ENV, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        root, found = Path(folder), {}
        model = make_model("qwen3", root / "model")
        for name, (dtype, hooks, options) in CASES.items():
            run = Run(root / name)
            kv = {"include_output_tokens": True, "dmi": {"key": name, "loss_spans": [[2, 9], [15, 21]]}}
            args = capture_args(hooks, run.store_dir, "target", **SMALL, **options)
            with engine(model, enforce_eager=True, dtype=dtype, **args, **ENGINES.get(name, {})) as llm:
                tokens = prompt(12) * 6 if name == "drafted" else prompt(21)
                generate(llm, run, {name: Ask(tokens, kv, {"max_tokens": 120 if name == "drafted" else 6})})
            found[name] = facts(run.store(name))
        target = Path(__file__).parent / f"stores-{FORMAT_VERSION}"
        with tarfile.open(f"{target}.tar.xz", "w:xz") as archive:
            for name in CASES:
                archive.add(root / name, name)
        Path(f"{target}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
