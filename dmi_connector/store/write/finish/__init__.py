# SPDX-License-Identifier: Apache-2.0
"""Steps after the last row of a store: commit, repair, retention, upload."""
