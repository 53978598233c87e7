# SPDX-License-Identifier: Apache-2.0
"""transformers on the same weights, to compare captured values with."""
