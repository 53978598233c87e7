# SPDX-License-Identifier: Apache-2.0
"""Taps pass tensors from forward hooks on the model's modules to the custom op that writes rows."""
