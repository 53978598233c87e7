# SPDX-License-Identifier: Apache-2.0
"""From the rows in vLLM's cache to the shared ring: the worker half of the connector."""
