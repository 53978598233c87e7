# SPDX-License-Identifier: Apache-2.0
"""Compares tokens with stock vLLM and hooks with transformers, on a GPU (V2 model runner, CUDA graphs, bf16).

    python -m benchmarks.checks.check_gpu --out results.json [--owners draft,target] [--arch gemma3_text]

A small random model (Qwen3, or --arch) answers prompts of many lengths, greedily and with seeds, with and without
prefix-cache hits. The result has:

- the number of requests whose tokens equal those of an engine without our connector. If those of a greedy request
  differ, the logits in its store must show that rounding explains it. Seeded requests are counted separately
  (`same_tokens.py` says why);
- the number of tokens that the scheduler scheduled, and the number that was needed. After the prompt, a step has one
  token per request;
- the number of missing rows;
- for each hook the minimum cosine of a row, and the largest error relative to the row's largest value, compared with
  transformers in float32.

Engine "reduced" reduces all hooks. Decoded rows are compared with transformers' values after the same reduction, and
attention summaries with the patterns that q_rot and k_rot of the same store give. Engine "pca" reduces some hooks by a
basis that is fitted on the stores of the engine before it. These two engines only work with models that have Qwen3's
hooks.

With --drafts, all engines use speculative decoding (`benchmarks.drafts`), also stock, and prompts repeat themselves. A
step then computes several tokens of a request, and the result has the largest number. The run fails if no draft token
was scheduled or accepted, or if a step has more than 1 + K tokens of a request. With "eagle3", vLLM accepts draft
tokens at random, so differing tokens are counted but do not fail the run.

The exit status is 1 if an engine fails, tokens differ by more than rounding, the number of computed tokens is not the
number of needed ones, rows are missing, a store has problems, or values exceed the limits below.

On a CPU, add `--engine-args '{"max_num_batched_tokens": 2048}'`: there, vLLM cannot split a seeded prompt over steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common, drafts
from benchmarks.checks.engines import cosines_of, end, take
from benchmarks.checks.reduced_rows import attention_error, kept_rows
from benchmarks.checks.same_tokens import MOST_TIE, MOST_TIE_OF_ARCH, UNIT, compare_tokens, own_gap, token_failures
from dmi_connector.cli.tiny_hybrids import ON_CPU

MODULE = "benchmarks.checks.check_gpu"
HOOKS = "vllm-full,attention,mlp_pre*"
"""Every hook except `pattern` and `indexer_topk`. Presets and wildcards leave out hooks that a family lacks."""
LENGTHS = (5, 16, 31, 64, 127, 128, 129, 200, 300, 400)
SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 4}
SIZES_OF_ARCH: dict[str, dict[str, Any]] = {
    **{name: {"qk_nope_head_dim": 128, "v_head_dim": 128} for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
    "granitemoehybrid": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "nemotron_h": {"head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 128},
    **{name: {"head_dim": 64, **ON_CPU} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
"""Sizes for families whose GPU kernels do not support the default ones."""
ENGINE = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_batched_tokens": 320, "gpu_memory_utilization": 0.5}
"""Some prompts are prefilled in several steps. Some steps have more tokens than `deferred.MOST_TOKENS`, some fewer."""
LEAST_COSINE_OF_ARCH, LEAST_COSINE = {"qwen3": 0.998, "nemotron_h": 0.96, "gemma4_text": 0.96}, 0.99
"""Minimum cosine of a row with the float32 row of transformers, for these families and for all others.

transformers in bfloat16 reaches 0.9994, 0.960 and 0.963 for these families, and 0.996 for a Gemma 3, whose residual
stream is large.
"""
MOST_FLIPPED = 0.08
"""Maximum fraction of a hook's rows below the minimum cosine in models with experts. Rounding may change the experts
that a row is routed to.

With transformers in bfloat16, 0.5 to 5.0 % of the rows of a hook are below it, and 7.5 % in `glm_moe_dsa`.
"""
ROUTING = {"router_logits", "topk_ids"}
"""Hooks of models with experts. On vLLM's Transformers backend, models with experts lack these hooks."""
MOST_GAP = 0.1
"""Maximum by which a value that top k left out may exceed a kept one, relative to the row's largest value."""
MOST_ATTENTION_ERROR = 1e-4
REDUCE = {
    "resid_*": "rp(64)",
    "mlp_post": "topk(64)",
    "q,k": "int8",
    "v": "int8(affine)",
    "z": "fp8",
    "ln1": "int8(32)",
    "ln2": "round(5)",
    "mlp_out": "topk(9,exact)",
    "q_rot,k_rot": "none",
    "pattern": "attn(8)",
    "*": "int8",
}
PERIOD = 12
"""Tokens after which prompts repeat themselves with --drafts."""
MOST_THREADS = 8
"""Maximum number of CPU threads for transformers. A model this small runs slower on all 64 cores of a node."""
PCA_HOOKS = ("resid_mid", "q", "mlp_post")
PCA_RANK = 32


def sizes_of(arch: str, head_dim: int = SIZES["head_dim"], heads: int = 0) -> dict[str, Any]:
    """The sizes of the small model of a family, if they are not those of tiny_models. head_dim, heads: for Qwen3."""
    more = {"num_attention_heads": heads} if heads else {}
    return {**SIZES, "head_dim": head_dim, **more} if arch == "qwen3" else SIZES_OF_ARCH.get(arch, {})


def _prompts(period: int = 0) -> list[dict[str, list[int]]]:
    """Make the prompts. period: number of tokens after which each prompt repeats itself; 0: prompts are random."""
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": np.resize(rng.integers(10, 500, period or n), n).tolist()} for n in LENGTHS]


def _count_tokens(llm: Any) -> dict[str, int]:
    """Count the tokens that an engine in this process schedules, in counts that grow with every step.

    They are the scheduled tokens, the draft tokens among them, and the largest number of tokens of a request in a step
    after its prompt.
    """
    counts = {"scheduled_tokens": 0, "draft_tokens": 0, "largest_decode_step": 0}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        computed = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
        output = schedule(*args, **kwargs)
        for name, tokens in output.num_scheduled_tokens.items():
            counts["scheduled_tokens"] += tokens
            if computed[name] >= scheduler.requests[name].num_prompt_tokens:
                counts["largest_decode_step"] = max(counts["largest_decode_step"], tokens)
        counts["draft_tokens"] += sum(len(drafts) for drafts in output.scheduled_spec_decode_tokens.values())
        return output

    scheduler.schedule = counted
    return counts


def _generate(llm: Any, period: int) -> tuple[list[Any], list[bool]]:
    """Generate greedily, with seeds, and greedily again. Returns the outputs, and which of them have seeds. period: as
    for `_prompts`.
    """
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"include_output_tokens": True}}
    fields: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "extra_args": extra}
    greedy = SamplingParams(temperature=0, **fields)
    seeded = [SamplingParams(temperature=0.9, top_p=0.9, seed=100 + i, **fields) for i in range(len(LENGTHS))]
    outputs, are_seeded = [], []
    for params in (greedy, seeded, greedy):
        outputs += llm.generate(_prompts(period), params, use_tqdm=False)
        are_seeded += [params is seeded] * len(LENGTHS)
    return outputs, are_seeded


def child(args: argparse.Namespace) -> None:
    """Run one engine, `args.child`, on all prompts. Its scheduler runs in this process."""
    from vllm import LLM

    from dmi_connector import capture_args

    ours = not args.child.startswith("stock")
    extra: dict[str, Any] = {}
    if ours:
        reduces: dict[str, tuple[str, str, dict[str, str]]] = {
            "reduced": (f"{args.hooks},pattern", "target" if args.drafts else "draft", REDUCE),
            "pca": (args.hooks, "target", {",".join(PCA_HOOKS): f"pca({_basis(args)})"}),
        }
        hooks, owner, reduce = reduces.get(args.child, (args.hooks, args.child, {}))
        extra = capture_args(hooks, args.store_dir, owner, chunk_tokens=64, reduce=reduce)
    if args.drafts:
        folder = Path(f"{args.model}-{args.drafts}")
        extra["speculative_config"] = drafts.speculative_config(args.drafts, args.model, folder, weights=True)
    llm = LLM(args.model, **{**ENGINE, "enforce_eager": args.eager, **args.engine_args, **extra})
    counts = _count_tokens(llm)
    outputs, seeded = _generate(llm, PERIOD if args.drafts else 0)
    cached = sum(o.num_cached_tokens or 0 for o in outputs)
    # The last sampled token is never an input.
    needed = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "facts": {
            "v2_model_runner": bool(config.use_v2_model_runner),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "compilation_mode": str(config.compilation_config.mode),
            "cached_tokens": cached,
        },
        "steps": {"expected_tokens": needed - cached, **counts},
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "seeded": seeded,
        "prompts": [list(o.prompt_token_ids) for o in outputs],
        "stores": [(o.kv_transfer_params or {}).get("dmi_store") for o in outputs],
    }
    common.save(f"{args.out}.{args.child}", found)
    end(llm, found["stores"] if ours else [])


def _basis(args: argparse.Namespace) -> str:
    """The path of the basis of engine "pca"."""
    return f"{args.out}.safetensors"


def stored_logits(store: str, tokens: int) -> np.ndarray | None:
    """The logits in a store, float32 [tokens, vocab]; None unless it has a row for each of `tokens` tokens."""
    from dmi_connector import open_capture

    capture = open_capture(store, timeout=10, allow_incomplete=True)
    rows = capture.numpy("logits") if "logits" in capture.hooks else ()
    return np.asarray(rows, np.float32) if len(rows) == tokens else None


def compare(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Compare every row of every store with transformers in float32."""
    import torch

    from dmi_connector import open_capture
    from dmi_connector.analysis.oracle.transformers_oracle import Oracle

    torch.set_num_threads(min(MOST_THREADS, torch.get_num_threads()))
    oracle = Oracle(args.model, torch.float32)
    expect = functools.cache(lambda ids: oracle.run(ids))  # greedy requests occur twice
    cosine: dict[str, float] = {}
    below: dict[str, list[int]] = {}
    error: dict[str, float] = {}
    missing, rows, problems, attention, gap, own = 0, 0, [], None, 0.0, 0.0
    experts = any(".experts." in parameter for parameter, _ in oracle.model.named_parameters())
    drafted = {"scheduled": 0, "accepted": 0, "rows_of_accepted": 0}
    requests = zip(found["stores"], found["prompts"], found["tokens"], found["seeded"], strict=True)
    for store, prompt, tokens, seeded in requests:
        ids = prompt + tokens
        capture, name = open_capture(store, timeout=10, allow_incomplete=True), Path(store).name
        problems += common.store_problems(store)
        if not capture.complete:
            problems.append(f"{name}: {capture.reason}")
        expected = len(ids) - 1
        rows += len(capture.token_ids)
        missing += expected - len(capture.token_ids)
        if list(capture.token_ids) != ids[:expected]:
            problems.append(f"{name}: token ids differ")
        if counts := capture.attrs.get("draft_tokens"):
            drafted["scheduled"] += counts["scheduled"]
            drafted["accepted"] += counts["accepted"]
            drafted["rows_of_accepted"] += int(np.count_nonzero(capture.draft_index))
        experts = experts or not ROUTING.isdisjoint(capture.hooks)
        if not seeded and (logits := stored_logits(store, len(tokens))) is not None:
            own = float(np.maximum(own, own_gap(logits, tokens)))
        if "pattern" in capture.hooks:
            attention = float(np.maximum(attention or 0.0, attention_error(capture)))
        reference = expect(tuple(ids))
        for hook in reference:
            if hook not in capture.hooks or hook in ("token_ids", "positions", "topk_ids", "topk_weights"):
                continue
            if hook == "mrope_positions":
                if not np.array_equal(capture.numpy(hook), reference[hook][0, :expected]):
                    problems.append(f"{name}: {hook} differs")
                continue
            want, layers = reference[hook], capture.layers[hook]
            if layers and len(want) == capture.attrs["num_layers"]:
                want = want[layers]
            if hook == "logits":
                got, want = capture.numpy("logits"), want[len(prompt) - 1 : expected]
            else:
                got, want = capture.numpy(hook), want[:, :expected]
                got = got[None] if got.ndim == 2 else got
                want, this = kept_rows(capture.reduction(hook), want, got, _basis(args))
                gap = float(np.maximum(gap, this))
            if got.shape != want.shape:
                problems.append(f"{name}: {hook} has shape {got.shape}, not {want.shape}")
                continue
            cosines = cosines_of(got, want)
            least = float(cosines.min())
            limit = args.least_cosine or LEAST_COSINE_OF_ARCH.get(args.arch, LEAST_COSINE)
            below.setdefault(hook, []).extend((~(cosines >= limit)).ravel().tolist())
            worst = float((np.abs(got - want).max(-1) / np.maximum(np.abs(want).max(-1), 1e-30)).max())
            cosine[hook] = float(np.minimum(cosine.get(hook, 1.0), least))
            error[hook] = float(np.maximum(error.get(hook, 0.0), worst))  # NaN counts as the largest
    return {"requests": len(found["stores"]), "rows": rows, "rows_missing": missing, "problems": problems[:10],
            "least_cosine": cosine, "rows_below": {hook: float(np.mean(low)) for hook, low in below.items()},
            "experts": experts, "largest_own_gap": own, "largest_relative_error": error, "top_k_gap": gap,
            "attention_error": attention, **({"drafts": drafted} if args.drafts else {})}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = common.engine_parser(MODULE, __doc__, "benchmarks/results/check_gpu.json", "/dev/shm/dmi-check")
    p.add_argument("--model", default="/tmp/dmi-check-model", help="directory of the small model")
    p.add_argument(
        "--owners",
        default="draft,target",
        help="also stock2, a second stock engine; reduced, with REDUCE; pca, after an engine that captures",
    )
    p.add_argument("--hooks", default=HOOKS, help="(default: %(default)s)")
    p.add_argument("--arch", default="qwen3", help="a family of dmi_connector.cli.tiny_models (default: %(default)s)")
    p.add_argument("--heads", type=int, default=0, help="attention heads of Qwen3 (0: 4)")
    p.add_argument("--head-dim", type=int, default=SIZES["head_dim"], help="with 128, each step is one CUDA graph")
    p.add_argument("--sizes", type=json.loads, default={}, help="JSON: other fields of the configuration of the model")
    p.add_argument("--drafts", choices=drafts.METHODS, help="use speculative decoding, with owner target only")
    p.add_argument("--least-cosine", type=float, default=0.0, help="minimum cosine of a row (0: that of the family)")
    p.add_argument("--eager", action="store_true")
    return p


def _failures(found: dict[str, Any]) -> list[str]:
    """The failures in the findings of one engine, as messages."""
    steps = found["steps"]
    wrong = list(found.get("problems", []))
    if found.get("drafts_of"):
        if not 1 < steps["largest_decode_step"] <= 1 + drafts.K or not steps["draft_tokens"]:
            wrong.append(f"steps: {steps}")
        if not found.get("drafts", {"rows_of_accepted": 1})["rows_of_accepted"]:
            wrong.append(f"no draft token was accepted: {found['drafts']}")
    else:
        if steps["scheduled_tokens"] != steps["expected_tokens"] or steps["largest_decode_step"] != 1:
            wrong.append(f"steps: {steps}")
        if steps["draft_tokens"]:
            wrong.append(f"{steps['draft_tokens']} draft tokens were computed")
    below = found.get("rows_below", {})
    most = MOST_FLIPPED if found.get("experts") else 0.0
    wrong += [f"{hook}: {part:.2%} of rows have a lower cosine" for hook, part in below.items() if not part <= most]
    if found.get("drafts_of") != "eagle3" and not found.get("largest_own_gap", 0.0) <= UNIT:
        wrong.append(f"a greedy token's stored logit is below the largest one, by {found['largest_own_gap']} of it")
    if not found.get("top_k_gap", 0.0) <= MOST_GAP:
        wrong.append(f"top k left out a value larger than a kept one, by {found['top_k_gap']} of the row's largest")
    if not (found.get("attention_error") or 0.0) <= MOST_ATTENTION_ERROR:
        wrong.append(f"attention weights are off by {found['attention_error']}")
    if found.get("rows_missing"):
        wrong.append(f"{found['rows_missing']} rows are missing")
    judged = "seeded_same" in found and found.get("drafts_of") != "eagle3"
    return wrong + (token_failures(found, found.get("experts", False)) if judged else [])


def _tokens(args: argparse.Namespace, name: str, found: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Compare an engine's tokens with those of stock. The logits are those of its stores; a stock engine has none."""

    def logits(number: int) -> np.ndarray | None:
        store = found["stores"][number]
        return None if name.startswith("stock") else stored_logits(store, len(found["tokens"][number]))

    most_tie = MOST_TIE_OF_ARCH.get(args.arch, MOST_TIE)
    return compare_tokens(found["tokens"], stock["tokens"], stock["seeded"], logits, most_tie)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.child:
        child(args)
        return 0
    from dmi_connector.analysis.fit_pca import fit_pca
    from dmi_connector.cli.tiny_models import make_model

    sizes = {**sizes_of(args.arch, args.head_dim, args.heads), **args.sizes}
    make_model(args.arch, args.model, dtype="bfloat16", **sizes)
    results: dict[str, Any] = {"header": common.header(MODULE, argv)}
    stock: dict[str, Any] = {}
    found: dict[str, Any] = {}
    failures: list[str] = []
    for name in ("stock", *args.owners.split(",")):
        begin = time.perf_counter()
        if name == "pca":
            Path(_basis(args)).unlink(missing_ok=True)
            fit_pca(found["stores"], PCA_HOOKS, PCA_RANK, _basis(args))
        # The scheduler must be in the child process, where `_count_tokens` wraps it.
        if status := common.run_child(MODULE, argv, name, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
            print(f"{name}: the engine ended with status {status}", file=sys.stderr)
            return 1
        found = take(args.out, name)
        stock = stock or found
        results[name] = {k: found[k] for k in ("facts", "steps")} | {"seconds": round(time.perf_counter() - begin, 1)}
        results[name] |= {"drafts_of": args.drafts} if args.drafts else {}
        if name != "stock":
            results[name] |= _tokens(args, name, found, stock)
        common.save(args.out, results)  # save now, because a time limit may end the comparison with transformers
        if not name.startswith("stock"):
            results[name] |= compare(args, found)
        print(name, json.dumps(results[name], indent=1), flush=True)
        common.save(args.out, results)
        failures += [f"{name}: {failure}" for failure in _failures(results[name])]
    print("\n".join(failures) or "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
