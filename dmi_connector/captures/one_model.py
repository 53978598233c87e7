# SPDX-License-Identifier: Apache-2.0
"""Refuses to mix stores of different models: their rows differ in meaning, even if their shapes agree."""

from __future__ import annotations

from pathlib import PurePath

from dmi_connector.store.format.remote_path import Place


def is_named(model: str | None, name: str) -> bool:
    """Whether `name` is the path of a model, or its last part. model: the path; None if the store names no model."""
    return model is not None and name in (model, PurePath(model).name)


class OneModel:
    """Compares the models of stores, one after the other.

    chosen: the name by which all stores were chosen, with `open_captures(model=...)`; None without it. The stores then
    count as of one model, even if copies of the model have different paths.
    """

    def __init__(self, chosen: str | None = None) -> None:
        self._chosen = chosen is not None
        self._first: tuple[Place, str] | None = None

    def check(self, store: Place, model: str | None) -> None:
        """Raise ValueError for a store of another model than earlier ones. model: None if the store names none."""
        if self._chosen or model is None:
            return
        if self._first is None:
            self._first = store, model
        elif model != self._first[1]:
            raise ValueError(
                f"{store} is of the model {model}, {self._first[0]} of {self._first[1]}: their rows cannot be"
                " mixed; name one model with open_captures(model=...), with --model of dmi export, fit-pca, fit-pq"
                " and fit-scales, or give its stores alone"
            )
