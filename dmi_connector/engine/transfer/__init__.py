# SPDX-License-Identifier: Apache-2.0
"""Worker half of the connector: copies rows from vLLM's cache or a pool into the shared ring."""
