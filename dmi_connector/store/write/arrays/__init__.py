# SPDX-License-Identifier: Apache-2.0
"""Rows become chunks, shards and journals."""
