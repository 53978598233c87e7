# SPDX-License-Identifier: Apache-2.0
"""Rows as training data for PyTorch."""
