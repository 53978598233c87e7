# SPDX-License-Identifier: Apache-2.0
"""Checks: whether values and tokens are right, on which versions and models. They measure no speed."""
