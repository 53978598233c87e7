# SPDX-License-Identifier: Apache-2.0
"""As torchvision.transforms."""

from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]
