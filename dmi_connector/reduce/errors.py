# SPDX-License-Identifier: Apache-2.0
"""The error of reductions."""

from __future__ import annotations


class ReduceError(ValueError):
    """A reduction that does not exist or does not fit its hook; the message names the option and the fix."""
