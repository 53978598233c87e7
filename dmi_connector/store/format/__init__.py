# SPDX-License-Identifier: Apache-2.0
"""The store format: documents, names, locks. Shared by writers and readers."""
