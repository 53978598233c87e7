# SPDX-License-Identifier: Apache-2.0
"""Lists the owners. An owner keeps the rows of an engine. A row has all captured values of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmi_connector.engine.owners.draft import Draft
from dmi_connector.engine.owners.pool import Pool
from dmi_connector.engine.owners.target import Target

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Owner

OWNERS: dict[str, Owner] = {owner.name: owner for owner in (Draft(), Target(), Pool())}
"""name -> owner. `args.OWNER_ARGS` has the same names. The first owner that fits a configuration is used."""


def owner_of(vllm_config: VllmConfig) -> Owner:
    """The owner of the rows of an engine with our connector."""
    return next(owner for owner in OWNERS.values() if owner.fits(vllm_config))
