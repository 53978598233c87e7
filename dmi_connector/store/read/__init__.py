# SPDX-License-Identifier: Apache-2.0
"""Finds, opens and verifies stores."""
