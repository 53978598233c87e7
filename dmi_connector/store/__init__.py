# SPDX-License-Identifier: Apache-2.0
"""The store: its on-disk format, writer processes, reader and verification. Needs neither vllm nor torch."""
