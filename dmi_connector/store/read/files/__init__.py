# SPDX-License-Identifier: Apache-2.0
"""Files of a store: local, in a zip file, in object storage."""
