# SPDX-License-Identifier: Apache-2.0
"""The functions of torchvision that transformers calls. Images are tensors [..., channels, height, width]."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch


class InterpolationMode(enum.Enum):
    """Interpolation modes of `resize`."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(image: Any) -> torch.Tensor:
    """Convert a PIL image to uint8 [channels, height, width]."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[:, :, None] if pixels.ndim == 2 else pixels).permute(2, 0, 1).contiguous()


def to_pil_image(*_: Any, **__: Any) -> NoReturn:
    """Not implemented. Raises NotImplementedError."""
    raise NotImplementedError("tests/standin makes no PIL images")


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """Resize the image to (height, width), in its own dtype. All modes except NEAREST are bilinear."""
    batch = image.reshape(-1, *image.shape[-3:]).float()
    nearest = interpolation is InterpolationMode.NEAREST
    how: dict[str, Any] = {"mode": "nearest"} if nearest else {"mode": "bilinear", "antialias": antialias}
    found = torch.nn.functional.interpolate(batch, tuple(size), **how)
    found = found if image.is_floating_point() else found.round().clamp(0, 255)
    return found.to(image.dtype).reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """Compute (image - mean) / std, with a mean and a std per channel."""
    mean, std = (torch.as_tensor(value, dtype=image.dtype).view(-1, 1, 1) for value in (mean, std))
    return (image - mean) / std


def pad(image: torch.Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> torch.Tensor:
    """Pad the image by (left, top, right, bottom) pixels. Only the first fill value per channel is used."""
    left, top, right, bottom = padding
    value = fill[0] if isinstance(fill, Sequence) else fill
    return torch.nn.functional.pad(image, (left, right, top, bottom), padding_mode, value or 0)


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """Cut out a part of the image."""
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """Repeat the only channel three times."""
    return image if image.shape[-3] == 3 else image.expand(*image.shape[:-3], 3, *image.shape[-2:])
