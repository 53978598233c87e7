# SPDX-License-Identifier: Apache-2.0
"""Builds the `kv_transfer_params` in the response of a captured request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dmi_connector.engine.messages import Close
from dmi_connector.engine.scheduler.tracked_request import Tracked
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format import completeness
from dmi_connector.store.format.completeness import Loss


def response(
    tracked: Tracked,
    close: Close,
    options: ServerOptions,
    lost: Sequence[Loss],
    warning: str,
) -> dict[str, Any]:
    """The `kv_transfer_params` of a response.

    lost: rows that the workers dropped or could not borrow. warning: part of all responses.
    """
    store = tracked.path if options.sink == "disk" else None
    said = {**dropped(tracked, warning), "dmi_store": store}
    if store is not None and options.upload:
        said["dmi_url"] = f"{options.upload}/{os.path.basename(store)}"
    if losses := [*lost, *close.losses]:
        said["dmi_reason"] = completeness.reason(losses)
        if missing := completeness.missing(losses):
            said["dmi_missing"] = missing
    if not close.length and not close.losses:
        said["dmi_reason"] = tracked.why_empty()
    return said


def dropped(tracked: Tracked, warning: str) -> dict[str, Any]:
    """The `kv_transfer_params` of a response without a store. warning: part of all responses."""
    said: dict[str, Any] = {"dmi_store": None, "dmi_request_id": tracked.request.request_id}
    if tracked.params.key is not None:
        said["dmi_key"] = tracked.params.key
    if warnings := [text for text in (warning, tracked.ignored) if text]:
        said["dmi_warning"] = "; ".join(warnings)
    return said
