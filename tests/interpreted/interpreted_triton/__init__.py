# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named "cpu". It compiles nothing, because Triton never asks it to with TRITON_INTERPRET=1.

vLLM's V2 model runner needs Triton, and on a CPU it needs a Triton with such a backend. vLLM finds this one by its
entry point, and runs the V2 runner on a CPU. Its kernels run in Triton's interpreter, slowly, with the same code as on
a GPU.
"""
