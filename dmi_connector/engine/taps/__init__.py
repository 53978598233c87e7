# SPDX-License-Identifier: Apache-2.0
"""Taps are forward hooks on the model's modules. They pass tensors to the custom op that writes rows."""
