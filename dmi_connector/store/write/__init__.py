# SPDX-License-Identifier: Apache-2.0
"""Writes stores: from the shared ring to finished stores."""
