# SPDX-License-Identifier: Apache-2.0
"""The on-disk format, its writer processes, its reader and verify. Needs neither vllm nor torch."""
