# SPDX-License-Identifier: Apache-2.0
"""Checks of values and tokens on different versions and models. They measure no speed."""
