# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's model classes, and checks that their taps write every selected hook."""
