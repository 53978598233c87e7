# SPDX-License-Identifier: Apache-2.0
"""The on-disk format: schema, writer processes, reader, verify and export. Needs neither vllm nor torch."""
