# SPDX-License-Identifier: Apache-2.0
"""Arrays of a store as rows: shards, chunks, decoded values, views."""
