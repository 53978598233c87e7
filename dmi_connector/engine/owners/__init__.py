# SPDX-License-Identifier: Apache-2.0
"""Where rows lie on the GPU."""
