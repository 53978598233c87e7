# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that write, reduce and gather rows. Each has a launcher, and a torch twin with the same result."""
