# SPDX-License-Identifier: Apache-2.0
"""Stores in the file formats of other programs: one module for each, `targets` names them."""
