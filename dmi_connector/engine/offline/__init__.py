# SPDX-License-Identifier: Apache-2.0
"""Captures of engines inside the same process: vllm.LLM and dmi run."""
