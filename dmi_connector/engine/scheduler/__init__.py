# SPDX-License-Identifier: Apache-2.0
"""Scheduler half of the connector: tracks which tokens of which request have rows."""
