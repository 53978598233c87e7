# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchvision, which the test environment leaves out (requirements/cpu.txt).

vLLM's modules of models with a vision tower import it. It has the few functions that transformers needs to process
images. Pixels may differ from those of torchvision, because vLLM and transformers get the same ones.
"""

__version__ = "0.28.0"
