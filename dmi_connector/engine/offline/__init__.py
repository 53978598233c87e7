# SPDX-License-Identifier: Apache-2.0
"""Offline engines that capture, which are vLLM engines without a server. `dmi demo` and `dmi run` use them."""
