# SPDX-License-Identifier: Apache-2.0
"""Computes hooks with transformers from the same weights, and compares captured values with the results."""
