# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a store: local, in a zip file, or in an object store."""
