# SPDX-License-Identifier: Apache-2.0
"""Plots, as SVG and PNG."""
