# SPDX-License-Identifier: Apache-2.0
"""What people do with captures: statistics, comparison with transformers, plots, export. Needs no vllm."""
