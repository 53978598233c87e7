# SPDX-License-Identifier: Apache-2.0
"""Reading stores: open, find, verify."""
