# SPDX-License-Identifier: Apache-2.0
"""Everything that imports vllm: the plugin, the taps, the rows, the connector and the export to the writers."""
