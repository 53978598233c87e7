# SPDX-License-Identifier: Apache-2.0
"""GPU kernels: each file holds a kernel, its launcher and its torch twin."""
