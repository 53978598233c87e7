# SPDX-License-Identifier: Apache-2.0
"""Computes hooks with transformers on the same weights. Captured values are compared with them."""
