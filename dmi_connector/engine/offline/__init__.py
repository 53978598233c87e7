# SPDX-License-Identifier: Apache-2.0
"""Offline engines with capture, which run in the caller's process: for `dmi demo` and `dmi run`."""
