# SPDX-License-Identifier: Apache-2.0
"""Writes rows as chunks into shards, with journals."""
