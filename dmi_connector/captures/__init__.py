# SPDX-License-Identifier: Apache-2.0
"""What `open_capture` and `open_captures` return: readers of stores, and what is computed from stored rows."""
