# SPDX-License-Identifier: Apache-2.0
"""As torchvision.transforms.v2."""
