# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with an indexer on a GPU: hooks compared with transformers, attention with the indexer's choice.

    python -m benchmarks.checks.check_indexer --out check.json --arch deepseek_v32

vLLM's kernels need DeepGEMM and FlashMLA. A small random model answers prompts of fewer and of more than index_topk
tokens. For every engine that captures, the result has:

- the number of missing rows, and problems of the stores;
- for each hook the lowest cosine between a row and that of transformers in float32, over the first index_topk rows of
  each store. There the indexer chooses all earlier tokens;
- the number of invalid rows of `indexer_topk`: a position occurs twice, is later than the token, or is missing;
- the lowest cosine of a row of `z` with attention that is computed from the store's own `q_rot`, `kv_c`, `k_pe` and
  `indexer_topk`, and the weights of the checkpoint;
- the mean share of positions that transformers chooses too, in rows that do not choose all earlier tokens. This share
  is below 1 because vLLM computes scores in FP8;
- how many requests got the tokens of an engine that does not capture, and how far the logits of the first differing
  tokens are apart (`same_tokens.py`). vLLM uses other kernels in the engine that does not capture.

The owner "stock2" is a second engine that does not capture. It shows how far two such engines agree.

The exit status is 1 if an engine that captures fails, rows are missing, a store has problems, or values are off.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.checks import check_gpu
from benchmarks.checks.engines import cosines_of, end, take
from benchmarks.checks.same_tokens import compare_tokens

MODULE = "benchmarks.checks.check_indexer"
HOOKS = f"{check_gpu.HOOKS},indexer_topk"
LENGTHS = (5, 64, 129, 300, 450, 600, 900, 1200)
OUTPUT_TOKENS = 40
TOPK = 512
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": TOPK,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "moe_intermediate_size": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""Sizes that the kernels support."""
STOCK = ("stock", "stock2")
"""Engines that do not capture."""
ENGINE = {"dtype": "bfloat16", "max_model_len": 1536, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.4}
LEAST_COSINE_OF_Z = 0.999
LEAST_COMMON = 0.85
"""Minimum mean share of the chosen positions in the first layer that transformers chooses too."""


def child(args: argparse.Namespace) -> None:
    """Run engine `args.child` on all prompts: an owner of rows, or "stock" or "stock2", which do not capture."""
    from vllm import LLM, SamplingParams

    from dmi_connector import capture_args

    extra: dict[str, Any] = {}
    if args.child not in STOCK:
        extra = capture_args(HOOKS, args.store_dir, args.child, chunk_tokens=64)
    llm = LLM(args.model, **{**ENGINE, **args.engine_args, **extra})
    rng = np.random.default_rng(0)
    prompts: Any = [{"prompt_token_ids": rng.integers(10, 500, length).tolist()} for length in LENGTHS]
    fields = {"kv_transfer_params": {"include_output_tokens": True}}
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, extra_args=fields)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    outputs += llm.generate(prompts[:2], params, use_tqdm=False)  # steps with few tokens, after steps with many
    graphs = str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
    found: dict[str, Any] = {
        "cudagraph_mode": graphs,
        "prompts": [list(output.prompt_token_ids) for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "stores": [(output.kv_transfer_params or {}).get("dmi_store") for output in outputs],
    }
    common.save(f"{args.out}.{args.child}", found)
    end(llm, found["stores"] if extra else [])


def chosen(positions: np.ndarray) -> tuple[np.ndarray, int]:
    """(whether row i attends to token j, bool [rows, rows]; number of invalid rows).

    positions: `indexer_topk` of a layer, int32 [rows, index_topk].
    """
    rows = len(positions)
    mask, wrong = np.zeros((rows, rows), bool), 0
    for row, line in enumerate(positions):
        line = line[line >= 0]
        there = np.unique(line[line <= row])
        mask[row, there] = True
        wrong += int(len(there) != len(line) or len(there) != min(row + 1, positions.shape[1]))
    return mask, wrong


def attended(capture: Any, layer: int, weight: Any, mask: np.ndarray) -> np.ndarray:
    """`z` of a layer from the other hooks of the store, float32 [rows, heads x v_head_dim].

    weight: `kv_b_proj.weight` of the layer. mask: from `chosen`.
    """
    import torch

    heads, nope, size = SIZES["num_attention_heads"], SIZES["qk_nope_head_dim"], SIZES["v_head_dim"]
    queries = torch.from_numpy(np.array(capture.numpy("q_rot", layer), np.float32)).unflatten(-1, (heads, -1))
    latent = torch.from_numpy(np.array(capture.numpy("kv_c", layer), np.float32))
    rotary = torch.from_numpy(np.array(capture.numpy("k_pe", layer), np.float32))
    both = torch.einsum("nl,hdl->nhd", latent, weight.float().view(heads, nope + size, -1))
    scores = torch.einsum("nhd,mhd->hnm", queries[..., :nope], both[..., :nope])
    scores = (scores + torch.einsum("nhd,md->hnm", queries[..., nope:], rotary)) * queries.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(mask), float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), both[..., nope:]).flatten(1).numpy()


def compare(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Compare every row of every store."""
    import torch
    from safetensors import safe_open

    from dmi_connector import open_capture
    from dmi_connector.analysis.oracle.transformers_oracle import Oracle

    oracle = Oracle(args.model, torch.float32)
    weights: dict[str, Any] = {}
    for path in Path(args.model).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys() if "kv_b_proj" in name}  # noqa: SIM118
    cosine: dict[str, float] = {}
    below: dict[str, list[bool]] = {}
    common_parts: dict[int, list[float]] = {}
    missing, rows, wrong, of_z, problems = 0, 0, 0, 1.0, []
    for store, prompt, tokens in zip(found["stores"], found["prompts"], found["tokens"], strict=True):
        ids = prompt + tokens
        capture, name = open_capture(store, timeout=10, allow_incomplete=True), Path(store).name
        problems += common.store_problems(store)
        if not capture.complete:
            problems.append(f"{name}: {capture.reason}")
        rows += len(capture.token_ids)
        missing += len(ids) - 1 - len(capture.token_ids)
        reference = oracle.run(tuple(ids))
        for hook in set(reference) & set(capture.hooks) - {"indexer_topk", "topk_ids", "topk_weights", "logits"}:
            layers = capture.layers[hook]
            want, got = reference[hook], np.array(capture.numpy(hook), np.float32)
            want = want[layers] if layers and len(want) == capture.attrs["num_layers"] else want
            got = got[None] if got.ndim == 2 else got
            if got.shape != (shape := (len(want), len(ids) - 1, *want.shape[2:])):
                problems.append(f"{name}: {hook} has shape {got.shape}, not {shape}")
                continue
            near = cosines_of(got[:, :TOPK], want[:, : len(ids) - 1][:, :TOPK])
            cosine[hook] = float(np.minimum(cosine.get(hook, 1.0), near.min()))
            below.setdefault(hook, []).extend((~(near >= check_gpu.LEAST_COSINE)).ravel().tolist())
        for number, layer in enumerate(capture.layers["indexer_topk"]):
            mask, bad = chosen(capture.numpy("indexer_topk", layer))
            wrong += bad
            weight = weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
            z = np.array(capture.numpy("z", layer), np.float32)
            of_z = float(np.minimum(of_z, cosines_of(z, attended(capture, layer, weight, mask)).min()))
            theirs, _ = chosen(reference["indexer_topk"][number][: len(mask)])
            common_parts.setdefault(layer, []).extend(((mask & theirs).sum(-1) / TOPK)[TOPK:].tolist())
    return {"requests": len(found["stores"]), "rows": rows, "rows_missing": missing, "problems": problems[:10],
            "least_cosine": cosine, "rows_below": {hook: float(np.mean(low)) for hook, low in below.items()},
            "rows_without_a_choice": wrong, "least_cosine_of_z": of_z,
            "chosen_in_common": {layer: float(np.mean(part)) for layer, part in common_parts.items()}}  # fmt: skip


def logits_of(found: dict[str, Any], number: int) -> np.ndarray | None:
    """The logits of a request, see `check_gpu.stored_logits`."""
    return check_gpu.stored_logits(found["stores"][number], len(found["tokens"][number]))


def failures(found: dict[str, Any]) -> list[str]:
    """What is wrong in the findings of one engine, as messages."""
    wrong = list(found["problems"])
    if found["rows_missing"]:
        wrong.append(f"{found['rows_missing']} rows are missing")
    if found["rows_without_a_choice"]:
        wrong.append(f"indexer_topk: {found['rows_without_a_choice']} rows have invalid positions")
    if not found["least_cosine_of_z"] >= LEAST_COSINE_OF_Z:
        wrong.append(f"z is not attention over indexer_topk: a row has cosine {found['least_cosine_of_z']}")
    if not min(found["chosen_in_common"].items())[1] >= LEAST_COMMON:
        wrong.append(f"indexer_topk: too few positions are those of transformers: {found['chosen_in_common']}")
    below = found["rows_below"].items()
    return wrong + [
        f"{hook}: {part:.2%} of rows have a lower cosine" for hook, part in below if not part <= check_gpu.MOST_FLIPPED
    ]


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/last.json", "/dev/shm/dmi-check-indexer")
    p.add_argument("--model", default="/tmp/dmi-check-indexer-model", help="where the small model is made")
    p.add_argument("--owners", default="stock2,target,pool")
    p.add_argument("--arch", choices=("deepseek_v32", "glm_moe_dsa"), default="deepseek_v32")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.child:
        child(args)
        return 0
    from dmi_connector.cli.tiny_models import make_model

    make_model(args.arch, args.model, dtype="bfloat16", **SIZES)
    results: dict[str, Any] = {"header": common.header(MODULE, argv)}
    engines: dict[str, dict[str, Any]] = {}
    wrong = []
    for name in (*args.owners.split(","), "stock"):
        if status := common.run_child(MODULE, argv, name, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
            wrong += [f"{name}: the engine ended with status {status}"] * (name not in STOCK)
            results[name] = {"status": status}
            continue
        engines[name] = take(args.out, name)
        results[name] = {"cudagraph_mode": engines[name]["cudagraph_mode"]}
        if name not in STOCK:
            results[name] |= compare(args, engines[name])
            wrong += [f"{name}: {failure}" for failure in failures(results[name])]
        print(name, json.dumps(results[name], indent=1), flush=True)
        common.save(args.out, results)
    if stock := engines.pop("stock", None):
        for name, found in engines.items():
            tokens = found["tokens"]
            logits = functools.partial(logits_of, found) if name not in STOCK else lambda _: None
            results[name] |= compare_tokens(tokens, stock["tokens"], [False] * len(tokens), logits)
    common.save(args.out, results)
    print("\n".join(wrong) or "all checks passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
