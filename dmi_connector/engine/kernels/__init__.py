# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for rows. Each kernel has a launcher, and a torch twin that gives the same result."""
