# SPDX-License-Identifier: Apache-2.0
"""Parses names of hooks: `q`, `resid_pre@3` (hook@layer), or TransformerLens' `blocks.3.attn.hook_z`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dmi_connector.captures.lens_names import ALL_NAMES, equal_hooks, split_name, why_not_equal
from dmi_connector.store.read.hook_names import HookTable
from dmi_connector.wording import suggest


def check_equal(name: str, attrs: Mapping[str, Any]) -> None:
    """Raise KeyError, with the reason, for a TransformerLens name of a tensor that is not a hook of the model."""
    why = why_not_equal(split_name(name)[0], attrs)
    if why is not None:
        raise KeyError(f"{name!r} has no equivalent here: {why}")


def parse_name(name: str, attrs: Mapping[str, Any]) -> tuple[str, int | None]:
    """(hook, layer) of a name of this package (`q`) or of TransformerLens (`blocks.3.attn.hook_z`, `hook_embed`).

    layer: None for a name without a layer. attrs: the root attribute of the store, because some names depend on its
    model. A name that is not from TransformerLens is returned as it is, whether or not the store has the hook. Raises
    KeyError for a TransformerLens name of a tensor that is not a hook of the store's model.
    """
    check_equal(name, attrs)
    short, layer = split_name(name)
    equal = dict(equal_hooks(attrs))
    if short in equal:
        return equal[short], layer
    if layer is not None:
        near = suggest(short, equal)
        raise KeyError(f"{name!r} has no equivalent here; suffixes that have one: {', '.join(equal)}{near}")
    return name, None


def hook_and_layer(name: str, attrs: Mapping[str, Any]) -> tuple[str, int | None]:
    """(hook, layer) of "resid_pre@3", or of a name as in `parse_name`.

    Raises ValueError if the text after "@" is not an integer, and KeyError as `parse_name` does.
    """
    hook, at, layer = name.partition("@")
    if not at:
        return parse_name(name, attrs)
    check_equal(hook, attrs)
    if not re.fullmatch("-?[0-9]+", layer):
        raise ValueError(f"{name!r} names no layer; write a hook as in 'resid_pre@3'")
    return hook, int(layer)


def is_lens_name(name: str, hook: str) -> bool:
    """Whether `name`, which `hook_and_layer` resolves to `hook`, is TransformerLens' name of the hook.

    TransformerLens' name means the values before reduction. This package's name means the stored values.
    """
    return name.partition("@")[0] != hook


def names_rows(name: object, table: HookTable, attrs: Mapping[str, Any]) -> bool:
    """Whether a store has the hook and layer of a name as in `hook_and_layer`. False for any other object.

    table: the hooks of the store. attrs: its root attribute.
    """
    try:
        return isinstance(name, str) and table.holds(*hook_and_layer(name, attrs))
    except (KeyError, ValueError):  # as `hook_and_layer` raises them
        return False


def holds(name: str, attrs: Mapping[str, Any]) -> bool:
    """Whether a store has the hook and layer of a name as in `hook_and_layer`. attrs: the store's root attribute.

    False for a TransformerLens name of a tensor that is a hook in other models only. Raises KeyError if the tensor is a
    hook in no model, and ValueError as `hook_and_layer` does.
    """
    if (short := split_name(name)[0]) in ALL_NAMES and short not in dict(equal_hooks(attrs)):
        return False
    return HookTable.of(attrs).holds(*hook_and_layer(name, attrs))
