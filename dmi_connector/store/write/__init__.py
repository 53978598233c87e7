# SPDX-License-Identifier: Apache-2.0
"""Writing stores: from the shared ring to finished stores."""
