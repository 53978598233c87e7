# SPDX-License-Identifier: Apache-2.0
"""The coordinator process, which runs between the engine and the writers."""
