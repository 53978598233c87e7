# SPDX-License-Identifier: Apache-2.0
"""Stands in for torchvision, which the test environment leaves out (requirements/cpu.txt).

vLLM's modules of models with a vision tower import it. It has the few functions with which transformers processes
images. Their pixels need not be those of torchvision: vLLM and transformers get the same ones.
"""

__version__ = "0.28.0"
