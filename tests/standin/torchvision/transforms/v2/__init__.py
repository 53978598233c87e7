# SPDX-License-Identifier: Apache-2.0
"""Stand-in for torchvision.transforms.v2."""
