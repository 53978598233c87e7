# SPDX-License-Identifier: Apache-2.0
"""Analysis of captures: statistics, plots, export, training data, comparison with transformers. Imports no vllm."""
