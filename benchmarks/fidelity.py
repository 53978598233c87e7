# SPDX-License-Identifier: Apache-2.0
"""Fidelity of reductions, on a model trained for a minute and on one with random weights (docs/REDUCTIONS.md).

    python -m benchmarks.fidelity --out DIR

The program trains a model on the CPU, captures with vLLM, trains autoencoders on captured rows, and prints the tables
of `dmi fidelity`. The model is trained on Python's own documentation (`pydoc_data`). Weights, order of the text and
prompts have fixed seeds. With --again, the captures of an earlier run are measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import common
from dmi_connector.cli.tiny_models import ENV, make_model, make_tokenizer
from dmi_connector.cli.tiny_training import texts, train
from dmi_connector.reduce import parse
from dmi_connector.reduce.attn import AttentionSummary

if TYPE_CHECKING:
    from dmi_connector.analysis.autoencoder import Autoencoder
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
"""Projections that are measured in addition to the defaults of `dmi fidelity`."""
COMPARED = ("int8", "int8(32)", "fp8", "rp(512)", "cs(512)", "topk(64)")
"""Reductions that `downstream` measures in addition to those with fitted files."""
PROJECTED = 512
"""Values per row of the projection whose scales are fitted."""
OF_HEADS, HEAD_RANK = ("q", "k", "v", "z", "q_rot", "k_rot"), 16
"""Hooks whose heads are reduced one by one, and the number of values to which the 64 values of a head are reduced."""
SUBVECTOR = 4
"""Number of values of a sub-vector of product quantisation."""
HOOKS = "resid_pre,resid_mid,resid_final,q,k,v,z,q_rot,k_rot,mlp_post,mlp_out"
ENCODED, ENCODED_LAYER, ENCODED_PROMPTS = ("resid_pre", "z", "mlp_post", "mlp_out"), 1, 192
"""Hooks for which autoencoders are trained, their layer, and the number of prompts whose rows are trained on. These
prompts are from the text that the model was trained on.
"""
LATENTS, ACTIVE = 512, 16
"""Number of latents of an autoencoder, and maximum number of active latents per row."""
STEPS, BATCH, RATE = 500, 256, 1e-3
"""Steps, batch size and maximum learning rate of the training of an autoencoder."""
COMPONENTS = 256
"""Number of principal components of the hooks in WHOLE."""
WHOLE = ("resid_pre", "resid_mid", "mlp_out")
"""Hooks whose whole rows are reduced to principal components."""
OF_COMPACT = "rp(256)"
"""The reduction of `z` that the mode `compact` chooses."""
SUMMARIES = ("attn(8)", "attn(4,half)")
"""Reductions of `pattern` of the modes `summary` and `compact`."""
MOST_KEPT = 8
"""The largest number of weights that SUMMARIES keep. Queries that see no more keys than this are not counted."""


def capture(model: Path, folder: Path) -> dict[str, list[Path]]:
    """Capture prompts. Returns {"measured": stores of prompts from held-out text, "encoded": stores that autoencoders
    are trained on}.
    """
    from vllm import LLM, SamplingParams

    from dmi_connector import capture_args, open_capture

    first, last = (make_tokenizer()(text, verbose=False)["input_ids"] for text in texts(flat=False))
    prompts = {
        "measured": [last[i : i + TOKENS] for i in range(0, PROMPTS * TOKENS, TOKENS)],
        "encoded": [first[i : i + TOKENS] for i in range(0, ENCODED_PROMPTS * TOKENS, TOKENS)],
    }
    llm = LLM(str(model), dtype="bfloat16", enforce_eager=True, max_model_len=256, **capture_args(HOOKS, folder))
    stores = {}
    for name, asked in prompts.items():
        hooks = {"dmi": {"hooks": ",".join(ENCODED), "layers": [ENCODED_LAYER]}} if name == "encoded" else {}
        wanted = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": hooks})
        replies = llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
        stores[name] = [Path(reply.kv_transfer_params["dmi_store"]) for reply in replies]
        for store in stores[name]:
            open_capture(store, timeout=60).close()
    llm.llm_engine.engine_core.shutdown()
    return stores


def prepared(kind: str, out: Path, steps: int) -> dict[str, Any]:
    """Make a model in `out`, and capture with it. Returns paths and facts, as values that JSON can hold.

    kind: "trained" or "random", its weights. steps: steps of training.
    """
    model = make_model("qwen3", out / kind, **SIZES)
    about: dict[str, Any] = {}
    if kind == "trained":
        start = time.monotonic()
        losses = train(model, texts(flat=False)[0], steps, tokens=TOKENS, rate=1e-3)
        about = {"training_seconds": round(time.monotonic() - start, 1), "losses": [losses[0], losses[-1]]}
        print(f"trained {steps} steps: loss {losses[0]} to {losses[-1]}")
    stores = capture(model, out / f"{kind}-stores")
    return {"model": str(model), "about": about, **{name: [*map(str, paths)] for name, paths in stores.items()}}


def fitted_files(stores: list[Path], folder: Path) -> dict[str, dict[str, str]]:
    """Fit files on `stores`. Returns the reductions that read them: {hook: {setting: name in the tables}}."""
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
    whole = folder / "whole"
    fit_pca(stores, OF_HEADS, HEAD_RANK, heads, group=SIZES["head_dim"])
    fit_pca(stores, WHOLE, COMPONENTS, whole)
    found = {hook: {f"int8(channel={channel})": "int8(channel=file)"} for hook in hooks}
    for hook in wide:
        found[hook][f"rp({PROJECTED},channel={projected})"] = f"rp({PROJECTED},channel=file)"
    for hook in OF_HEADS:
        found[hook] |= {f"pca({heads})": "pca(file) of heads", f"rp({HEAD_RANK},group={SIZES['head_dim']})": ""}
    for hook in WHOLE:
        found[hook][f"pca({whole})"] = "pca(file)"
    for hook in hooks:
        fit_pq(stores, [hook], widths[hook] // SUBVECTOR, folder / hook)
        found[hook][f"pq({folder / hook})"] = "pq(file)"
    return found


def rows_of(stores: Sequence[Path], hook: str, layer: int) -> np.ndarray:
    """The rows of all stores except the first row of each store, float32 [n, width].

    The first token attends only to itself, so its row differs from all others.
    """
    from dmi_connector.captures.capture import open_capture

    found = []
    for store in stores:
        with open_capture(store, timeout=60) as capture:
            found.append(capture.numpy(hook, layer)[1:])
    return np.concatenate(found)


def train_autoencoder(rows: np.ndarray, folder: Path) -> dict[str, Any]:
    """Train a top-k autoencoder on `rows` [n, width], on the CPU with a fixed seed. Returns facts about it.

    Latents are relu((x - b_dec) W_enc + b_enc). The ACTIVE largest are kept. The decoder's output is latents
    W_dec + b_dec. Training scales the rows; the weights that are written to `folder`, as SAELens writes them, include
    the scale.
    """
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    scale = rows.shape[1] ** 0.5 / float(np.linalg.norm(rows, axis=1).mean())
    data = torch.from_numpy(rows * np.float32(scale))
    directions = torch.nn.functional.normalize(torch.randn(LATENTS, rows.shape[1]), dim=1)
    made = {"W_enc": directions.T.clone(), "b_enc": torch.zeros(LATENTS), "W_dec": directions, "b_dec": data.mean(0)}
    parts = {name: torch.nn.Parameter(value) for name, value in made.items()}
    optimiser = torch.optim.Adam(parts.values(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS)
    variance, fired, left = (data - data.mean(0)).square().sum(1).mean(), torch.zeros(LATENTS), 0.0
    for step in range(STEPS):
        batch = data[torch.randint(0, len(data), (BATCH,))]
        latents = torch.relu((batch - parts["b_dec"]) @ parts["W_enc"] + parts["b_enc"])
        most = latents.topk(ACTIVE, dim=1)
        kept = torch.zeros_like(latents).scatter(1, most.indices, most.values)
        loss = (kept @ parts["W_dec"] + parts["b_dec"] - batch).square().sum(1).mean() / variance
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        with torch.no_grad():
            parts["W_dec"].div_(parts["W_dec"].norm(dim=1, keepdim=True))
            if step >= STEPS - 100:
                fired += (kept > 0).sum(0)
                left += loss.item() / 100
    found = {name: part.detach() for name, part in parts.items()}
    found |= {"W_enc": found["W_enc"] * scale, "b_dec": found["b_dec"] / scale, "W_dec": found["W_dec"] / scale}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in found.items()}, folder / "sae_weights.safetensors")
    settings = {"architecture": "topk", "k": ACTIVE, "apply_b_dec_to_input": True}
    (folder / "cfg.json").write_text(json.dumps(settings))
    about = {"latents": LATENTS, "k": ACTIVE, "rows": len(rows), "explained_in_training": round(1 - left, 4)}
    return {**about, "dead": int((fired == 0).sum())}


def autoencoders(stores: list[Path], measured: list[Path], folder: Path) -> tuple[dict[str, Autoencoder], list[Any]]:
    """({hook: autoencoder trained on `stores`} for each hook of ENCODED, facts about each autoencoder for the result).

    measured: stores on which the explained variance is measured.
    """
    from dmi_connector.analysis.autoencoder import Autoencoder

    made, about = {}, []
    for hook in ENCODED:
        start = time.monotonic()
        facts = train_autoencoder(rows_of(stores, hook, ENCODED_LAYER), folder / hook)
        made[hook] = one = Autoencoder.load(f"{folder / hook}, hook={hook}, layer={ENCODED_LAYER}")
        rows = rows_of(measured, hook, ENCODED_LAYER)
        facts |= {"explained": round(1 - one.unexplained(rows, rows), 4), "seconds": round(time.monotonic() - start)}
        about.append({"hook": hook, "layer": ENCODED_LAYER, **facts})
        print(f"autoencoder of {hook} in layer {ENCODED_LAYER}: {facts}")
    return made, about


def downstream(
    model: Path, fitted: list[Path], measured: list[Path], encoders: dict[str, Autoencoder], folder: Path
) -> list[Fidelity]:
    """The results of `dmi fidelity --labels tokens --model MODEL --sae SAE` on the stores `measured`.

    fitted: stores on which the files of reductions are fitted. encoders: {hook: autoencoder}. folder: for fitted files.
    """
    from dmi_connector.analysis.fidelity import fidelity
    from dmi_connector.analysis.unembedding import Unembedding

    unembedding, found = Unembedding.load(model), []
    for hook, names in fitted_files(fitted, folder).items():
        rows = fidelity(
            measured,
            [*COMPARED, *names],
            hook,
            labels="tokens",
            unembedding=unembedding,
            autoencoder=encoders.get(hook),
        )
        found += [replace(f, reduction=names.get(f.reduction) or f.reduction) for f in rows]
        print(f"measured {hook}", flush=True)
    return found


def weights_kept(weights: Sequence[np.ndarray], spec: str) -> dict[str, float]:
    """The part of causal attention weights that a reduction of `pattern` keeps. weights: [heads, queries, keys] of each
    capture.

    Returns "mass", the mean share over heads and queries, and "least_head", the share of the head that keeps the least.
    Only queries that see more than MOST_KEPT keys count.
    """
    reduction = parse(spec)
    assert isinstance(reduction, AttentionSummary)
    sums = []
    for one in weights:
        kept = -np.sort(-one[:, MOST_KEPT:], axis=2)[..., : reduction.m]
        sums.append((kept.astype(np.float16) if reduction.half else kept).sum(2, dtype=np.float64))
    by_head = np.concatenate(sums, 1).mean(1)
    return {"mass": float(by_head.mean()), "least_head": float(by_head.min())}


def parts_of_compact(stores: Sequence[Path]) -> list[dict[str, Any]]:
    """What the mode `compact` keeps of `z`, and of the attention weights that follow from `q_rot` and `k_rot`."""
    from dmi_connector.analysis.fidelity import fidelity
    from dmi_connector.captures.capture import open_capture

    found = [asdict(one) for one in fidelity(stores, [OF_COMPACT], "z")]
    for layer in range(SIZES["num_hidden_layers"]):
        weights = []
        for store in stores:
            with open_capture(store, timeout=60) as capture:
                weights.append(capture.attention(layer))
        for spec in SUMMARIES:
            measures = {name: round(value, 6) for name, value in weights_kept(weights, spec).items()}
            found.append({"hook": "pattern", "layer": layer, "reduction": spec, "measures": measures})
    return found


def as_table(parts: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown of the result of `parts_of_compact`."""
    names = list(dict.fromkeys(name for part in parts for name in part["measures"]))
    lines = [["hook", "layer", "reduction", *(name.replace("_", " ") for name in names)]]
    for part in parts:
        measures = (f"{part['measures'][name]:.5f}" if name in part["measures"] else "" for name in names)
        lines.append([part["hook"], str(part["layer"]), f"`{part['reduction']}`", *measures])
    return common.markdown(lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = common.parser("benchmarks.fidelity", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for models, stores and results")
    parser.add_argument("--steps", type=int, default=60, help="steps of training (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure the models and stores that an earlier run left")
    options = parser.parse_args(argv)
    for name, value in ENV.items():
        os.environ.setdefault(name, value)

    from dmi_connector.analysis.fidelity import DEFAULT, fidelity, markdown
    from dmi_connector.analysis.fit_pca import fit_pca

    header = common.header("benchmarks.fidelity", argv)
    for kind in ("trained", "random"):
        if not options.again:
            (options.out / f"{kind}.json").write_text(json.dumps(prepared(kind, options.out, options.steps)))
    result: dict[str, Any] = {"header": header}
    compact: dict[str, Any] = {"header": header}
    analyses: dict[str, Any] = {"header": header}
    for kind in ("trained", "random"):
        about = json.loads((options.out / f"{kind}.json").read_text())
        stores, encoded = ([*map(Path, about[name])] for name in ("measured", "encoded"))
        fitted, measured = stores[: PROMPTS // 2], stores[PROMPTS // 2 :]
        result |= about["about"]
        basis = options.out / f"{kind}-basis.safetensors"
        basis.unlink(missing_ok=True)
        fit_pca(fitted, ["resid_mid"], COMPONENTS, basis)
        rows = fidelity(measured, [*DEFAULT, *MORE])
        projected = fidelity(measured, [f"pca({basis})"], "resid_mid")
        rows += [replace(one, reduction=f"pca({COMPONENTS} components)") for one in projected]
        result[kind] = [asdict(one) for one in rows]
        print(f"\n{kind}\n\n{markdown(rows)}\n", flush=True)
        compact[kind] = parts_of_compact(measured)
        print(f"parts of the mode compact\n\n{as_table(compact[kind])}\n", flush=True)
        if kind == "trained":
            encoders, analyses["autoencoders"] = autoencoders(encoded, measured, options.out / "autoencoders")
            more = downstream(Path(about["model"]), fitted, measured, encoders, options.out / "fitted")
        else:  # tokens and latents of a random model have no meaning, and neither has a fit to its rows
            more = fidelity(measured, COMPARED, labels="tokens")
        print(f"\nwhat analyses find\n\n{markdown(more, 0.95)}", flush=True)
        analyses[kind] = [asdict(one) for one in more]
    common.save(options.out / "downstream.json", analyses)
    common.save(options.out / "compact.json", compact)
    common.save(options.out / "fidelity.json", result)


if __name__ == "__main__":
    main()
