# SPDX-License-Identifier: Apache-2.0
"""The store format, shared by writers and readers: documents, names and locks."""
