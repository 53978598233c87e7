# SPDX-License-Identifier: Apache-2.0
"""What happens to a store after its last row: commit, repair, retention, upload."""
