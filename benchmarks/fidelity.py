# SPDX-License-Identifier: Apache-2.0
"""What reductions keep, on a model trained for a minute and on random weights (a table of docs/REDUCTIONS.md).

    python -m benchmarks.fidelity --out DIR

Everything is seeded: the weights, the order of the text (English of Python's own documentation, as installed), the
prompts. Trains on the CPU, captures through vLLM, and prints the report of `dmi fidelity`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common
from dmi_connector.cli.tiny_models import ENV, make_model, make_tokenizer
from dmi_connector.cli.tiny_training import texts, train

if TYPE_CHECKING:
    from dmi_connector.analysis.fidelity import Fidelity

WIDTH, TOKENS, PROMPTS = 2560, 128, 64
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
COMPARED = ("int8", "int8(32)", "rp(512)", "cs(512)", "topk(64)")
"""What is compared with reductions of fitted files by what analyses find, on the trained model."""
PROJECTED = 512
"""Values of the projection that scales are fitted for."""
OF_HEADS, HEAD_RANK = ("q", "k", "v", "z"), 16
"""Hooks whose heads are reduced by themselves, and to how many of 64 values."""
SUBVECTOR = 4
"""Values that a code of product quantisation stands for."""
HOOKS = "resid_pre,resid_mid,resid_final,q,k,v,z,mlp_post,mlp_out"


def capture(model: Path, folder: Path) -> list[Path]:
    """Stores of prompts from the end of the text."""
    from vllm import LLM, SamplingParams

    from dmi_connector import capture_args, open_capture

    ids = make_tokenizer()(texts(flat=False)[1])["input_ids"]
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


def fitted_files(stores: list[Path], folder: Path) -> dict[str, dict[str, str]]:
    """Reductions of files that are fitted on `stores`: {hook: {setting: name in the tables}}."""
    from dmi_connector.analysis.fit_pca import fit_pca
    from dmi_connector.analysis.fit_pq import fit_pq
    from dmi_connector.analysis.fit_scales import fit_scales
    from dmi_connector.captures.capture import open_capture

    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    hooks = HOOKS.split(",")
    with open_capture(stores[0]) as capture:
        widths = {hook: capture.shape(hook)[-1] for hook in hooks}
    wide = [hook for hook in hooks if widths[hook] >= PROJECTED]
    channel, projected, heads = (folder / name for name in ("scales", "projected", "heads"))
    fit_scales(stores, hooks, channel)
    fit_scales(stores, wide, projected, project=f"rp({PROJECTED})")
    fit_pca(stores, OF_HEADS, HEAD_RANK, heads, group=SIZES["head_dim"])
    found = {hook: {f"int8(channel={channel})": "int8(channel=file)"} for hook in hooks}
    for hook in wide:
        found[hook][f"rp({PROJECTED},channel={projected})"] = f"rp({PROJECTED},channel=file)"
    for hook in OF_HEADS:
        found[hook] |= {f"pca({heads})": "pca(file) of heads", f"rp({HEAD_RANK},group={SIZES['head_dim']})": ""}
    for hook in hooks:
        fit_pq(stores, [hook], widths[hook] // SUBVECTOR, folder / hook)
        found[hook][f"pq({folder / hook})"] = "pq(file)"
    return found


def downstream(model: Path, stores: list[Path], folder: Path) -> list[Fidelity]:
    """What `dmi fidelity --labels tokens --model MODEL` measures. Files are fitted on the first half of the stores."""
    from dmi_connector.analysis.fidelity import fidelity
    from dmi_connector.analysis.unembedding import Unembedding

    fitted, measured = stores[: PROMPTS // 2], stores[PROMPTS // 2 :]
    unembedding, found = Unembedding.load(model), []
    for hook, names in fitted_files(fitted, folder).items():
        rows = fidelity(measured, [*COMPARED, *names], hook, labels="tokens", unembedding=unembedding)
        found += [replace(f, reduction=names.get(f.reduction) or f.reduction) for f in rows]
    return found


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
            losses = train(model, texts(flat=False)[0], options.steps, tokens=TOKENS, rate=1e-3)
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
        if kind == "trained":
            more = downstream(model, stores, options.out / "fitted")
            print(f"\nwhat analyses find\n\n{markdown(more, 0.95)}")
            header = {"header": common.header("benchmarks.fidelity", argv)}
            common.save(options.out / "downstream.json", {**header, kind: [asdict(one) for one in more]})
        print(f"\n{kind}\n\n{markdown(found)}\n")
    common.save(options.out / "fidelity.json", result)


if __name__ == "__main__":
    main()
