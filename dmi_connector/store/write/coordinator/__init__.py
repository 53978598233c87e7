# SPDX-License-Identifier: Apache-2.0
"""The process between the engine and the writers: captures, their ends, the pool of writers."""
