# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which tokens of which request have rows. Imports no torch."""
