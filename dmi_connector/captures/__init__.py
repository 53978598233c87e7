# SPDX-License-Identifier: Apache-2.0
"""What `open_capture` and `open_captures` return: the store reader, and everything that is computed from what it reads."""
