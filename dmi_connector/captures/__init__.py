# SPDX-License-Identifier: Apache-2.0
"""Readers of stores, which `open_capture` and `open_captures` return, and computations on stored rows."""
