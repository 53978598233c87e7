# SPDX-License-Identifier: Apache-2.0
"""Defines the error that reductions raise."""

from __future__ import annotations


class ReduceError(ValueError):
    """Raised for a reduction that does not exist or does not fit its hook. The message names the option and the fix."""
