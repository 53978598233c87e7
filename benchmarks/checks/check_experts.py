# SPDX-License-Identifier: Apache-2.0
"""Compares the chosen experts in stores with those that vLLM itself returns.

    python -m benchmarks.checks.check_experts --out check.json --engine-args '{"data_parallel_size": 2}'
    python -m benchmarks.checks.check_experts --out check.json --arch gpt_oss --quantized mxfp4
    python -m benchmarks.checks.check_experts --out check.json --arch deepseek_v2 --quantized fp8

A small random model with experts answers the same prompts in stock vLLM and with capture. Both return `routed_experts`.
The experts in each store must equal those that the engine of that store returned. Tokens are compared with those of
stock vLLM too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.capture import note
from benchmarks.checks.engines import take

MODULE = "benchmarks.checks.check_experts"
HOOKS = "hidden-states,topk_ids"
LENGTHS = (5, 16, 31, 64, 127, 128, 129, 200, 300, 400) * 3
OUTPUT_TOKENS = 48
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 256, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4},
    "gpt_oss": {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_local_experts": 16},
    "deepseek_v2": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "q_lora_rank": 256,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
"""{family: sizes that GPU kernels support}."""
QUANTIZED = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""{format: `quantization_config` of the checkpoint}. vLLM draws the weights (`load_format` "dummy")."""
ENGINE = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_batched_tokens": 320}


async def _replies(args: argparse.Namespace, extra: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 500, length).tolist() for length in LENGTHS]
    settings = {**ENGINE, "enable_return_routed_experts": True}
    ranks = [args.engine_args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "data")]
    settings |= {"enable_expert_parallel": True} if max(ranks) > 1 else {}
    settings |= {"load_format": "dummy"} if args.quantized else {}
    settings |= {**args.engine_args, **extra}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(args.model, **settings))

    async def ask(number: int) -> Any:
        fields = {"kv_transfer_params": {"include_output_tokens": True, "dmi": {"key": f"{number}"}}} if extra else {}
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            extra_args=fields,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        replies = engine.generate({"prompt_token_ids": prompts[number]}, params, f"{number}")
        return [reply async for reply in replies][-1]

    try:
        return await asyncio.gather(*(ask(number) for number in range(len(prompts))))
    finally:
        engine.shutdown()


def child(args: argparse.Namespace) -> None:
    """Run one engine: "stock", or an owner of rows. Saves its tokens, and a comparison of stored and returned experts.

    `benchmarks.checks.engines.take` reads them.
    """
    from dmi_connector import capture_args, open_capture

    extra: dict[str, Any] = {}
    if args.child != "stock":
        extra = capture_args(HOOKS, args.store_dir, args.child, chunk_tokens=64)
    replies = asyncio.run(_replies(args, extra))
    found: dict[str, Any] = {"tokens": [list(reply.outputs[0].token_ids) for reply in replies]}
    if extra:
        stores = [reply.kv_transfer_params["dmi_store"] for reply in replies]
        problems, differing, compared = [], 0, 0
        for reply, store in zip(replies, stores, strict=True):
            capture, returned = open_capture(store, timeout=60, allow_incomplete=True), reply.outputs[0].routed_experts
            problems += common.store_problems(store)
            if not capture.complete:
                problems.append(f"{Path(store).name}: {capture.reason}")
                continue
            if returned is None:
                problems.append(f"{Path(store).name}: vLLM returned no experts")
                continue
            stored = capture.routed_experts()
            if stored.shape != returned.shape:
                problems.append(f"{Path(store).name}: experts have shape {stored.shape}, vLLM's {returned.shape}")
                continue
            differing += int((stored != returned).any(-1).sum())
            compared += stored.shape[0] * stored.shape[1]
        found |= {"stores": len(set(stores)), "choices": compared, "differing": differing, "problems": problems[:10]}
    common.save(f"{args.out}.{args.child}", found)


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-check-experts")
    p.add_argument("--model", default="/tmp/dmi-check-experts-model", help="directory of the small model")
    p.add_argument("--owners", default="draft,target")
    p.add_argument("--arch", choices=MODELS, default="qwen3_moe", help="family of the model (default: %(default)s)")
    p.add_argument("--quantized", choices=QUANTIZED, help="quantization of the checkpoint; vLLM makes random weights")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.child:
        child(args)
        return 0
    from dmi_connector.cli.tiny_models import make_model

    make_model(args.arch, args.model, dtype="bfloat16", num_hidden_layers=4, **MODELS[args.arch])
    if args.quantized:
        path = Path(args.model, "config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": QUANTIZED[args.quantized]}))
    results: dict[str, Any] = {"header": common.header(MODULE, argv)}
    stock: list[list[int]] = []
    failures = []
    for name in ("stock", *args.owners.split(",")):
        if status := common.run_child(MODULE, argv, name):
            failures.append(f"{name}: the engine ended with status {status}")
            continue
        found = take(args.out, name)
        tokens = found.pop("tokens")
        stock = stock or tokens
        if name != "stock":
            same = sum(mine == theirs for mine, theirs in zip(tokens, stock, strict=True))
            results[name] = {"same_tokens_as_stock": f"{same} of {len(stock)}", **found}
            note(f"{name}: {json.dumps(results[name])}")
            failures += [f"{name}: {problem}" for problem in found["problems"]]
            if found["differing"] or not found["choices"] or found["stores"] != len(LENGTHS):
                failures.append(f"{name}: {found['differing']} of {found['choices']} choices differ")
        common.save(args.out, results)
    print("\n".join(failures) or "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
