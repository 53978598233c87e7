# SPDX-License-Identifier: Apache-2.0
"""Correctness on a GPU (V2 model runner, CUDA graphs, bf16): tokens equal stock vLLM's, hooks equal transformers'.

    python -m benchmarks.check_gpu --out results.json [--owner draft|target]

A small random Qwen3 answers prompts of many lengths, greedily and with seeds, with and without prefix-cache hits. It
records: whether tokens equal those of an engine without our connector, rows missing, and for each hook the least
cosine of a row and the largest error relative to the row's largest value against transformers in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (5, 16, 31, 64, 127, 128, 129, 200, 300, 400)


def _prompts() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(10, 500, n).tolist()} for n in LENGTHS]


def _engine(args: argparse.Namespace, ours: str) -> tuple[list[Any], dict[str, Any]]:
    """(outputs of greedy, seeded and repeated greedy runs, facts of the engine)."""
    from vllm import LLM, SamplingParams

    from dmi_connector import capture_args

    extra = capture_args(hooks=args.hooks, store_dir=args.store_dir, owner=ours, chunk_tokens=64) if ours else {}
    llm = LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.5,
        enforce_eager=args.eager,
        **extra,
    )
    transfer = {"kv_transfer_params": {"include_output_tokens": True}}
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, extra_args=transfer)
    seeded = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=100 + i, max_tokens=48, ignore_eos=True, extra_args=transfer)
        for i in range(len(LENGTHS))
    ]
    outputs = []
    for params in (greedy, seeded, greedy):
        outputs += llm.generate(_prompts(), params, use_tqdm=False)
    config = llm.llm_engine.vllm_config
    facts = {
        "v2_model_runner": bool(config.use_v2_model_runner),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "compilation_mode": str(config.compilation_config.mode),
        "cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs),
    }
    return outputs, facts


def child(args: argparse.Namespace) -> None:
    outputs, facts = _engine(args, "" if args.child.startswith("stock") else args.child)
    found = {
        "facts": facts,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "prompts": [list(o.prompt_token_ids) for o in outputs],
        "stores": [(o.kv_transfer_params or {}).get("dmi_store") for o in outputs],
    }
    Path(f"{args.out}.{args.child}").write_text(json.dumps(found))
    if not args.child.startswith("stock"):
        from dmi_connector import open_capture

        for store in found["stores"]:
            open_capture(store, timeout=60, allow_incomplete=True)


def compare(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Every row of every store against transformers in float32."""
    import torch

    from dmi_connector import open_capture
    from dmi_connector.oracle import Oracle
    from dmi_connector.store.verify import verify_store

    oracle = Oracle(args.model, torch.float32)
    cosine: dict[str, float] = {}
    error: dict[str, float] = {}
    missing, rows, problems = 0, 0, []
    for store, prompt, tokens in zip(found["stores"], found["prompts"], found["tokens"], strict=True):
        ids = prompt + tokens
        capture = open_capture(store, timeout=10, allow_incomplete=True)
        problems += [str(p) for p in verify_store(store)]
        if not capture.complete:
            problems.append(f"{store}: {capture.reason}")
        expected = len(ids) - 1
        rows += len(capture.token_ids)
        missing += expected - len(capture.token_ids)
        if list(capture.token_ids) != ids[:expected]:
            problems.append(f"{store}: token ids differ")
        reference = oracle.run(ids)
        for hook in reference:
            if hook not in capture.hooks or hook in ("token_ids", "positions"):
                continue
            want = reference[hook]
            if hook == "logits":
                got, want = capture.numpy("logits"), want[len(prompt) - 1 : expected]
            else:
                got, want = np.asarray(capture.array(hook)[:]).astype(np.float32), want[:, :expected]
            if got.shape != want.shape:
                problems.append(f"{store}: {hook} has shape {got.shape}, not {want.shape}")
                continue
            norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
            least = float(((got * want).sum(-1) / np.maximum(norms, 1e-30)).min())
            worst = float((np.abs(got - want).max(-1) / np.maximum(np.abs(want).max(-1), 1e-30)).max())
            cosine[hook] = min(cosine.get(hook, 1.0), least)
            error[hook] = max(error.get(hook, 0.0), worst)
    return {"requests": len(found["stores"]), "rows": rows, "rows_missing": missing, "problems": problems[:10],
            "least_cosine": cosine, "largest_relative_error": error}  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="benchmarks/results/check_gpu.json")
    p.add_argument("--model", default="/tmp/dmi-check-model")
    p.add_argument("--store-dir", default="/dev/shm/dmi-check")
    p.add_argument("--owners", default="draft,target", help="also stock2: the plain engine a second time")
    p.add_argument("--hooks", default="vllm-full,q_rot,k_rot")
    p.add_argument("--eager", action="store_true")
    p.add_argument("--child", default="")
    args = p.parse_args()
    if args.child:
        child(args)
        return 0
    from dmi_connector.tiny import make_model

    make_model(
        "qwen3",
        args.model,
        dtype="bfloat16",
        hidden_size=256,
        head_dim=64,
        intermediate_size=512,
        num_hidden_layers=4,
    )
    results: dict[str, Any] = {}
    for name in ("stock", *args.owners.split(",")):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "benchmarks.check_gpu", *sys.argv[1:], "--child", name],
            check=True,
            env=os.environ,
        )
        found = json.loads(Path(f"{args.out}.{name}").read_text())
        Path(f"{args.out}.{name}").unlink()
        results[name] = {"facts": found["facts"], "seconds": round(time.perf_counter() - begin, 1)}
        if name == "stock":
            stock = found
            continue
        same = sum(a == b for a, b in zip(found["tokens"], stock["tokens"], strict=True))
        results[name] |= {"same_tokens_as_stock": f"{same} of {len(stock['tokens'])}"}
        if not name.startswith("stock"):
            results[name] |= compare(args, found)
        print(json.dumps(results[name], indent=1), flush=True)
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
