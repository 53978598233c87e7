# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that write, reduce and gather rows. Each has a torch version for CPUs, with the same result."""
