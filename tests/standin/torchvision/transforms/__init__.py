# SPDX-License-Identifier: Apache-2.0
"""Stand-in for torchvision.transforms."""

from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]
