# SPDX-License-Identifier: Apache-2.0
"""Stores with made-up values for the tests of `dmi view` and its pictures. No engine is needed."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from dmi_connector.cli.tiny_models import make_model
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE = 12, 64, 4, 2, 32
STORY = (
    "The lighthouse keeper counted the ships each evening. On the seventh day there were none, so she lit the lamp"
    " early and waited. By midnight a single lantern answered from the dark water: three short flashes, then a long"
    ' one. "Someone remembers," she said, and wrote it down.\n\nIn the morning the sea was flat and bright. The ship'
    " stood at the pier with no crew and no name. The keeper walked twice around it and went home to sleep.\n"
)
DATA = Path(__file__).parent / "data" / "stores-1.2.tar.xz"


def unpack(root: Path) -> Path:
    """Unpack the stores in tests/data, which an engine wrote, into one directory without an index."""
    with tarfile.open(DATA) as archive:
        archive.extractall(root / "tar", filter="data")
    for store in (root / "tar").glob("*/*.zarr"):
        shutil.move(store, root / f"{store.parent.name}.zarr")
    shutil.rmtree(root / "tar")
    return root


def make_lens_model(folder: Path) -> Path:
    """A tiny random model with a tokenizer. Its hidden size is that of the stores here."""
    make_model("qwen3", folder, num_hidden_layers=LAYERS)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 4)  # some tokens get a high probability
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_stores(root: Path, model: Path, many: int = 3) -> None:
    """Write the stores story (text, attention, lens), long (3,000 tokens), lossy (with missing rows), bare (only q),
    and `many` small ones.
    """
    owner = kit.Store(1 << 24)
    ids = np.array(Tokenizer.from_file(str(model / "tokenizer.json")).encode(STORY).ids, "<i4")
    about = {"model": str(model), "architecture": "Qwen3ForCausalLM", "dtype": "float32", "num_layers": LAYERS}
    about |= {"dims": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE}, "versions": {"vllm": "0.32.0"}}
    try:
        for name, tokens in (("story", ids), ("long", np.resize(ids, 3000)), ("lossy", ids[:200])):
            values, specs = _values(tokens, model)
            lost = [Loss.of(Cause.FELL_BEHIND, [(64, 96)])] if name == "lossy" else []
            options = {"attrs": about, "key": name, "request_id": f"cmpl-{name}-0", "losses": lost}
            owner.write(root / f"{name}.zarr", specs, len(tokens), values=values, ids=tokens, chunk=32, **options)
        q = (ArraySpec("q", "float32", (0, 1), 8),)
        for name in ("bare", *(f"run-{i:05}" for i in range(many))):
            owner.write(root / f"{name}.zarr", q, 5, attrs={"model": "tiny"}, key=name, wait=False)
        assert owner.flush(kit.PATIENCE)
    finally:
        assert owner.shutdown(kit.PATIENCE)


def write_spoilt(root: Path) -> None:
    """Write a store "spoilt" of 40 tokens and two layers. Rows 4 to 7 are missing. Row 10 of layer 1 and query 2 of
    layer 0 are not finite. Rows 20 to 29 have logits.
    """
    rng, owner = np.random.default_rng(1), kit.Store(1 << 22)
    widths = {"resid_pre": 8, "q_rot": 4, "k_rot": 4, "logits": 30}
    layers = {name: () if name == "logits" else (0, 1) for name in widths}
    specs = [ArraySpec(name, "float32", layers[name], width) for name, width in widths.items()]
    values = {s.name: 1 + rng.random((len(s.layers) or 1, 40, s.width), "f4") for s in specs}
    values["logits"] = values["logits"][0, :10]
    values["resid_pre"][0, 11] = 0.01  # the smallest norm
    values["resid_pre"][1, 10, 3] = values["q_rot"][0, 2, 1] = np.nan
    about = {"num_layers": 2, "rotary": True, "dims": {"heads": 1, "kv_heads": 1, "head_dim": 4}}
    lost = [Loss.of(Cause.FELL_BEHIND, [(4, 8)])]
    stored = {name: kit.bits(array) for name, array in values.items()}
    owner.write(root / "spoilt.zarr", specs, 40, 10, values=stored, attrs=about, losses=lost)
    assert owner.shutdown(kit.PATIENCE)


def write_list(root: Path, count: int) -> None:
    """Write a new directory whose index lists `count` empty stores. Only the list can be shown."""
    root.mkdir()
    with open(root / "index.jsonl", "w") as index:
        for number in range(count):
            name, day = f"run-{number:05}.zarr", f"2026-11-{1 + number * 28 // count:02}T00:00:00+00:00"
            (root / name).mkdir()
            line = {"store": name, "key": f"key-{number % 100}", "request_id": f"r-{number}", "created": day}
            done = {
                "event": "finish",
                "state": "complete",
                "bytes": 1,
                "num_tokens": 1,
                "prompt_len": 1,
                "model": "tiny",
            }
            index.write(f"{json.dumps({**line, 'event': 'start'})}\n{json.dumps({**line, **done})}\n")


def _values(ids: np.ndarray, model: Path) -> tuple[kit.Values, tuple[ArraySpec, ...]]:
    """Residual stream and rotated queries and keys of a request.

    The stream turns towards the next token layer by layer. The heads attend to the first and the previous token, to the
    previous token, to nearby tokens, and to all tokens.
    """
    rng, length = np.random.default_rng(0), len(ids)
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    towards = embedding[np.append(ids[1:], ids[:1])] / np.linalg.norm(embedding, axis=1).mean()
    depth = np.arange(LAYERS + 1)[:, None, None] / LAYERS
    noise = np.cumsum(rng.standard_normal((LAYERS + 1, length, HIDDEN)) * 0.4, axis=0)
    wave = 1 + 0.6 * np.sin(np.arange(length) / 9)[None, :, None] * depth
    stream = (noise * wave + 22 * depth**2 * towards).astype("f4")
    stream[2:, 0] *= 4  # the first token's norm is large, as in real models
    angles = np.arange(length)[:, None] * np.exp(np.linspace(0, -4, SIZE // 2))
    keys = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    before = np.roll(keys, 1, axis=0)
    first = keys[:1].repeat(length, 0)
    heads = [first * 2 + before * 5, before * 9, keys * 3, rng.standard_normal(keys.shape)]
    q = np.concatenate(heads, axis=1)[None].repeat(LAYERS, 0) * (0.3 + np.arange(LAYERS)[:, None, None] / LAYERS)
    k = np.tile(keys, (LAYERS, 1, KV_HEADS))
    specs = (
        ArraySpec("resid_pre", "float32", tuple(range(LAYERS)), HIDDEN),
        ArraySpec("resid_final", "float32", (), HIDDEN),
        ArraySpec("q_rot", "float32", tuple(range(LAYERS)), HEADS * SIZE),
        ArraySpec("k_rot", "float32", tuple(range(LAYERS)), KV_HEADS * SIZE),
    )
    arrays = dict(zip((s.name for s in specs), (stream[:-1], stream[-1:], q, k), strict=True))
    return {name: np.ascontiguousarray(values, "<f4") for name, values in arrays.items()}, specs


def write_panels(root: Path, model: Path) -> list[str | Path]:
    """Write a store "parts" of the first 60 tokens of the story, and an autoencoder of layer 6. Returns the options of
    `dmi view` for them.

    The outputs of the blocks add up to the residual stream. Each layer has routed experts.
    """
    rng, length = np.random.default_rng(2), 60
    ids = np.array(Tokenizer.from_file(str(model / "tokenizer.json")).encode(STORY).ids, "<i4")[:length]
    layers = tuple(range(LAYERS))
    embed, *blocks = rng.standard_normal((2 * LAYERS + 1, length, HIDDEN)).astype("f4")
    attn, mlp = np.stack(blocks[::2]), np.stack(blocks[1::2])
    stream = np.concatenate([embed[None], embed + np.cumsum(attn + mlp, axis=0)])
    experts = np.argsort(rng.random((LAYERS, length, 8)), axis=-1)[..., :2].astype("<i4")
    experts[3] = [5, 1]  # in this layer, all tokens are routed to the same experts
    weights = np.sort(rng.random((LAYERS, length, 2)).astype("f4"))[..., ::-1]
    arrays = {"resid_pre": stream[:-1], "resid_final": stream[-1:], "attn_out": attn, "mlp_out": mlp}
    arrays |= {"topk_ids": experts, "topk_weights": weights}
    specs = [
        ArraySpec(
            name, "int32" if name == "topk_ids" else "float32", () if name == "resid_final" else layers, v.shape[-1]
        )
        for name, v in arrays.items()
    ]
    about = {"model": str(model), "num_layers": LAYERS, "experts": {"count": 8, "layers": list(layers)}}
    owner = kit.Store(1 << 24)
    values = {name: kit.bits(np.ascontiguousarray(array)) for name, array in arrays.items()}
    owner.write(root / "parts.zarr", specs, length, values=values, ids=ids, attrs=about, chunk=32, key="parts")
    assert owner.shutdown(kit.PATIENCE)
    sae = root.parent / "sae"
    sae.mkdir()
    encoder = rng.standard_normal((HIDDEN, 24)).astype("f4")
    tensors = {"W_enc": encoder, "b_enc": np.full(24, -8, "f4"), "b_dec": np.zeros(HIDDEN, "f4")}
    save_file({**tensors, "W_dec": np.ascontiguousarray(encoder.T)}, sae / "sae_weights.safetensors")
    facts = {"architecture": "standard", "hook_name": "blocks.6.hook_resid_pre"}
    (sae / "cfg.json").write_text(json.dumps(facts))
    return ["--sae", sae]
