# SPDX-License-Identifier: Apache-2.0
"""The texts above and below the options in the help of each command: a sentence above, examples below."""

from __future__ import annotations

import argparse
import textwrap
from typing import NamedTuple

_WIDTH = 79
"""Maximum columns of a line of help."""


class Help(NamedTuple):
    """One sentence about a command, and example command lines."""

    sentence: str
    examples: tuple[str, ...]


COMMANDS = {
    "demo": Help(
        "Serve a tiny random model with vLLM, capture every hook, and compare the values with transformers.",
        ("dmi demo", "dmi demo --dir /tmp/demo --hooks vllm-full,attention"),
    ),
    "serve": Help(
        "Start vLLM's OpenAI server, and write a store for each request that it answers.",
        ("dmi serve Qwen/Qwen3-0.6B --hooks hidden-states --store-dir captures --port 8000",),
    ),
    "run": Help(
        "Capture every prompt of a file of JSON lines or Parquet, or of a saved data set.",
        (
            "dmi run --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --out captures --hooks hidden-states",
            "dmi run --model Qwen/Qwen3-0.6B --prompts chats.parquet --out captures --chat --max-tokens 64",
        ),
    ),
    "ls": Help(
        "List the captures of a store directory, one per line.",
        ("dmi ls captures", "dmi ls captures --key run-1", "dmi ls captures --stats"),
    ),
    "tail": Help(
        "Print the captures that finished last, then each new capture when it finishes.",
        (
            "dmi tail captures",
            "dmi tail captures --last 3 --once --json",
            "dmi tail captures --rows run-1 --hook resid_pre@20",
        ),
    ),
    "info": Help(
        "Show the arrays, sizes and attributes of one store.",
        ("dmi info captures/REQUEST.zarr", "dmi info s3://bucket/captures/REQUEST.zarr --json"),
    ),
    "verify": Help(
        "Check that no byte of stores is damaged, and that their values are finite.",
        ("dmi verify captures", "dmi verify captures/REQUEST.zarr"),
    ),
    "repair": Help(
        "Make stores of the rows that killed writers left in a directory, and finish interrupted uploads.",
        ("dmi repair captures", "dmi repair captures/REQUEST.zarr.partial"),
    ),
    "prune": Help(
        "Remove the oldest finished stores of a directory, except stores that a process reads.",
        ("dmi prune captures --older-than 7d --dry-run", "dmi prune captures --keep-bytes 500G"),
    ),
    "diff": Help(
        "Show where the values of two captures of the same tokens first differ.",
        ("dmi diff captures/ONE.zarr captures/OTHER.zarr", "dmi diff before after --hooks 'resid_*'"),
    ),
    "export": Help(
        "Write stores in the formats of other programs.",
        (
            "dmi export captures/REQUEST.zarr --to safetensors -o hidden.safetensors",
            "dmi export captures --to speculators --layers 2,18,33 -o data",
        ),
    ),
    "fit-pca": Help(
        "Fit principal components on the rows of stores, for the reduction pca(FILE).",
        (
            "dmi fit-pca captures/*.zarr --hook mlp_out --rank 256 -o mlp_out.safetensors",
            "dmi fit-pca captures/*.zarr --hook z --rank 32 --group 128 -o heads.safetensors",
        ),
    ),
    "fit-scales": Help(
        "Fit a scale for each dimension of hooks on the rows of stores, for int8(channel=FILE) and rp(k,channel=FILE).",
        (
            "dmi fit-scales captures/*.zarr --hook resid_pre --hook mlp_post -o scales.safetensors",
            "dmi fit-scales captures/*.zarr --hook resid_mid --project 'rp(512)' -o projected.safetensors",
        ),
    ),
    "fit-pq": Help(
        "Fit the centroids of product quantisation on the rows of stores, for the reduction pq(FILE).",
        ("dmi fit-pq captures/*.zarr --hook resid_mid --subvectors 320 -o books.safetensors",),
    ),
    "fit-probe": Help(
        "Fit a linear probe to labelled captures, and test it on held-out captures.",
        ("dmi fit-probe captures --labels labels.csv --hook resid_pre --layer 20 -o risk.safetensors",),
    ),
    "fidelity": Help(
        "Measure what reductions would keep of the rows of stores.",
        ("dmi fidelity captures/*.zarr --hooks 'resid_*' --reduce int8 --reduce 'topk(64)'",),
    ),
    "sketch": Help(
        "Sketch the rows of each hook and layer as at most K rows (Frequent Directions), with a bound on the error.",
        (
            "dmi sketch captures --hooks resid_post@10-20 -k 64 -o sketches",
            "dmi sketch captures --hooks 'resid_*,mlp_out' --merge -o all.safetensors",
            "dmi sketch captures/REQUEST.zarr --hooks resid_pre --follow -o live.safetensors",
        ),
    ),
    "plot": Help(
        "Draw captures as a picture in PNG or SVG.",
        (
            "dmi plot captures/REQUEST.zarr -o norms.png",
            "dmi plot captures/REQUEST.zarr -o lens.svg --kind lens --model MODEL_DIR",
            "dmi plot captures/REQUEST.zarr -o text.svg --kind text --hook mlp_post --layer 1",
        ),
    ),
    "view": Help(
        "Serve a page that shows captures in a browser on this machine.",
        ("dmi view captures", "dmi view captures --model MODEL_DIR --port 8000"),
    ),
}
"""Name of a command -> its help."""


def describe(parser: argparse.ArgumentParser, command: str) -> None:
    """Put the sentence of a command above its options, and its examples below them, after the parser's own epilog."""
    sentence, examples = COMMANDS[command]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(sentence, _WIDTH)
    shown = "examples:\n" + "\n".join(f"  {line}" for line in examples)
    parser.epilog = f"{parser.epilog}\n\n{shown}" if parser.epilog else shown
