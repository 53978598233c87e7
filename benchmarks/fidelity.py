# SPDX-License-Identifier: Apache-2.0
"""What reductions keep, on a model trained for a minute and on random weights (a table of docs/REDUCTIONS.md).

    python -m benchmarks.fidelity --out DIR

Everything is seeded: the weights, the order of the text (English of Python's own documentation, as installed), the
prompts. Trains on the CPU, captures through vLLM, and prints the report of `dmi fidelity`.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from dmi_connector.cli.tiny_models import ENV, make_model, make_tokenizer

WIDTH, TOKENS, BATCH, PROMPTS, HELD_OUT = 2560, 128, 8, 64, 200_000
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MORE = ("rp(1024)", "rp(1280)")
"""Wider projections, beside what `dmi fidelity` measures by default."""
HOOKS = "resid_pre,resid_mid,resid_final,q,k,v,z,mlp_post,mlp_out"


def text() -> str:
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def train(model: Path, steps: int) -> list[float]:
    """Train the model on all but the end of the text, from transformers' own initialisation.

    Returns the loss of each step, in nats a token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = torch.tensor(make_tokenizer()(text()[:-HELD_OUT])["input_ids"])
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - TOKENS, (BATCH,))
        batch = torch.stack([ids[i : i + TOKENS] for i in starts])
        loss = net(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(round(loss.item(), 4))
    net.save_pretrained(model)
    return losses


def capture(model: Path, folder: Path) -> list[Path]:
    """Stores of prompts from the end of the text."""
    from vllm import LLM, SamplingParams

    from dmi_connector import capture_args, open_capture

    ids = make_tokenizer()(text()[-HELD_OUT:])["input_ids"]
    prompts = [ids[i : i + TOKENS] for i in range(0, PROMPTS * TOKENS, TOKENS)]
    llm = LLM(str(model), dtype="bfloat16", enforce_eager=True, max_model_len=256, **capture_args(HOOKS, folder))
    replies = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False
    )
    stores = [Path(reply.kv_transfer_params["dmi_store"]) for reply in replies]
    for store in stores:
        open_capture(store, timeout=60).close()
    llm.llm_engine.engine_core.shutdown()
    return stores


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = common.parser("benchmarks.fidelity", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="for models, stores and figures")
    parser.add_argument("--steps", type=int, default=60, help="of training (default: %(default)s)")
    options = parser.parse_args(argv)
    for name, value in ENV.items():
        os.environ.setdefault(name, value)

    from dmi_connector.analysis.fidelity import DEFAULT, fidelity, markdown
    from dmi_connector.analysis.fit_pca import fit_pca

    result: dict[str, Any] = {"header": common.header("benchmarks.fidelity", argv)}
    for kind in ("trained", "random"):
        model = make_model("qwen3", options.out / kind, **SIZES)
        if kind == "trained":
            start = time.monotonic()
            losses = train(model, options.steps)
            result |= {"training_seconds": round(time.monotonic() - start, 1), "losses": [losses[0], losses[-1]]}
            print(f"trained {options.steps} steps: loss {losses[0]} to {losses[-1]}")
        stores = capture(model, options.out / f"{kind}-stores")
        basis = options.out / f"{kind}-basis.safetensors"
        basis.unlink(missing_ok=True)
        fit_pca(stores[: PROMPTS // 2], ["resid_mid"], 256, basis)
        found = fidelity(stores[PROMPTS // 2 :], [*DEFAULT, *MORE])
        projected = fidelity(stores[PROMPTS // 2 :], [f"pca({basis})"], "resid_mid")
        found += [replace(one, reduction="pca(256 components)") for one in projected]
        result[kind] = [asdict(one) for one in found]
        print(f"\n{kind}\n\n{markdown(found)}\n")
    common.save(options.out / "fidelity.json", result)


if __name__ == "__main__":
    main()
