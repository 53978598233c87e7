# SPDX-License-Identifier: Apache-2.0
"""Reads rows of a store's arrays: shards, chunks and decoded values."""
