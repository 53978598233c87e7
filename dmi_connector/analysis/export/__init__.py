# SPDX-License-Identifier: Apache-2.0
"""Exports stores to the file formats of other programs. Each format has a module, and `targets` lists the formats."""
