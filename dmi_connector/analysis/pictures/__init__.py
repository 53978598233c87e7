# SPDX-License-Identifier: Apache-2.0
"""Plots of captures and of analyses, as SVG or PNG files."""
