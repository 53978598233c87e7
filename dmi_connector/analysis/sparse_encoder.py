# SPDX-License-Identifier: Apache-2.0
"""The encoder of a sparse autoencoder. Taps use the same encoder (`reduce.latents`)."""

from dmi_connector.reduce.sparse_encoder import SparseEncoder as SparseEncoder
