# SPDX-License-Identifier: Apache-2.0
"""Stand-in for torchvision.transforms.v2.functional."""

from torchvision.transforms.functional import (
    InterpolationMode,
    crop,
    grayscale_to_rgb,
    normalize,
    pad,
    pil_to_tensor,
    resize,
)

__all__ = ["InterpolationMode", "crop", "grayscale_to_rgb", "normalize", "pad", "pil_to_tensor", "resize"]
