# SPDX-License-Identifier: Apache-2.0
"""Images, prompts with images, and the stand-in for torchvision."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.cli.tiny_vision import PATCH, TOKENS, VOCAB

STANDIN = str(Path(__file__).parent / "standin")
IMAGE = VOCAB
"""Token of a row that holds an image embedding."""
PLACEHOLDERS = {
    "gemma3": [IMAGE + 1],
    **{
        arch: [IMAGE + 2, IMAGE, IMAGE + 3]
        for arch in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
    },
    "internvl": [IMAGE],
    "mistral3": [IMAGE],
    "llama4": [IMAGE + 1],
}
"""{family: the placeholder of an image in a prompt of token ids}."""


def use_standin() -> None:
    """Make the stand-in for torchvision importable, also in children. Call it before transformers is imported."""
    if importlib.util.find_spec("torchvision") is None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STANDIN, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, STANDIN)


def image(rows: int, columns: int, seed: int = 0) -> Any:
    """A random PIL image of the given number of merged patches (2 x 2 patches each)."""
    from PIL import Image

    size = (2 * PATCH * rows, 2 * PATCH * columns, 3)
    return Image.fromarray(np.random.default_rng([rows, columns, seed]).integers(0, 256, size, np.uint8))


def processed(model: Path, arch: str, images: Sequence[Any]) -> Mapping[str, Any]:
    """The output of the model's processor for images, as arguments of transformers' forward."""
    from transformers import AutoProcessor

    text = "".join(TOKENS[arch][token - IMAGE] for token in PLACEHOLDERS[arch])
    processor = AutoProcessor.from_pretrained(model, local_files_only=True)
    found = processor(text=[text * len(images)], images=list(images), return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in found}
