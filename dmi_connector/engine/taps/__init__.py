# SPDX-License-Identifier: Apache-2.0
"""Taps: from a module's forward hook to the custom op that writes rows."""
