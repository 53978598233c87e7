# SPDX-License-Identifier: Apache-2.0
"""What is known of vLLM's model classes."""
