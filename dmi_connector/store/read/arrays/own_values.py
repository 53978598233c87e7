# SPDX-License-Identifier: Apache-2.0
"""Which reductions store the hook's own values, and which store something else that was made of them."""

from __future__ import annotations

from dmi_connector.reduce import Reduction
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.projection import RandomProjection

OTHER_VALUES: tuple[type[Reduction], ...] = (RandomProjection, Pca, AttentionSummary)
"""Decoded rows of these are not the hook's values, whatever their width. Those of others are, rounded or with zeros."""
NO_LENGTHS: tuple[type[Reduction], ...] = (Pca, AttentionSummary)
"""Decoded rows of these do not have the hook's norms and angles. Random projections keep both approximately."""
