# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named "cpu" that compiles nothing: with TRITON_INTERPRET=1 Triton never asks it to.

vLLM's V2 model runner wants Triton, and on a CPU a Triton with such a backend. With this one, found by its entry point,
vLLM runs the V2 runner on a CPU, and its kernels run in Triton's interpreter: slow, and the same code as on a GPU.
"""
