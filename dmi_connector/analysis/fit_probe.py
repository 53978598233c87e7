# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-probe`: fits a linear probe to labelled captures by the difference of means (Marks and Tegmark, 2023).

The probe's output is sigmoid((s - 1/2) / variance + log(n1 / n0)). Here s is `MeanDifference.score`, which is 1 at the
mean of label 1 and 0 at the mean of label 0. variance is the variance of s within the labels. n1 and n0 are the numbers
of training rows of each label. The output is the probability of label 1 if s is normally distributed with this variance
for both labels.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.directions import mean_difference, row_blocks
from dmi_connector.analysis.new_file import new_file
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.finite import WHAT, FiniteCheck
from dmi_connector.captures.one_model import OneModel
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.option_values import whole_number
from dmi_connector.reduce import Keeps
from dmi_connector.reduce.probe_file import ProbeFacts, save
from dmi_connector.store.format.remote_path import Given, local_path, place_of
from dmi_connector.wording import show

logger = logging.getLogger(__name__)

NAMES = ("key", "request_id", "store")
"""Fields of a labels file. Each can name a capture; "store" is the name of the store's directory."""
_LABELS = {"0": False, "false": False, "1": True, "true": True}
_LEAST = 2
"""Minimum number of captures per label: one to fit on, and one held out."""

Labels = dict[tuple[str, str], bool]
"""{(one of NAMES, its value): label}."""


@dataclass(frozen=True)
class FittedProbe:
    """The size of a probe's training set, and the probe's quality on held-out captures.

    captures, rows: number of captures and rows in the training set. held_out, held_rows: number of captures and rows in
    the test set. accuracy: fraction of the test rows that are classified correctly, with label 1 for outputs of at
    least 1/2. baseline: the accuracy of always predicting the more frequent label of the training set. auc: probability
    that a test row of label 1 has a higher output than a test row of label 0.
    """

    captures: int
    rows: int
    held_out: int
    held_rows: int
    accuracy: float
    baseline: float
    auc: float


def read_labels(path: str | os.PathLike[str]) -> Labels:
    """Read labels from a CSV file with a header, or from JSON lines. Each line has `label` (0, 1, true or false) and
    one of NAMES.

    Raises ValueError for a line that is not valid, for a capture with both labels, and for a file without labels.
    Raises OSError if the file cannot be read.
    """
    file = local_path(path)
    found: Labels = {}
    for number, line in _lines(file):
        name = next((field for field in NAMES if line.get(field) not in (None, "")), None)
        label = _LABELS.get(str(line.get("label")).lower())
        if name is None or label is None:
            raise ValueError(
                f"--labels {file}: line {number} is {show(line)}; give {', '.join(NAMES[:-1])} or {NAMES[-1]}, and the "
                "label 0 or 1"
            )
        if found.setdefault((name, str(line[name])), label) != label:
            raise ValueError(f"--labels {file}: {name} {show(line[name])} has both labels; leave one out")
    if not found:
        raise ValueError(f"--labels {file} holds no label; give a CSV file with a header, or JSON lines")
    return found


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, fields) of each line. Raises ValueError for text that is not UTF-8, CSV or JSON lines, and OSError
    that names the option.
    """
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--labels {file}: the text is not UTF-8 ({error}); save it as UTF-8") from error
    except OSError as error:
        raise OSError(f"--labels {file} cannot be read ({error.strerror}); give a CSV file, or JSON lines") from error
    if not text.lstrip().startswith("{"):
        rows = csv.DictReader(io.StringIO(text))
        try:
            for row in rows:
                yield rows.line_num, {str(name).strip(): value for name, value in row.items()}
        except csv.Error as error:
            raise ValueError(f"--labels {file}: line {rows.line_num + 1} is not CSV ({error}); correct it") from error
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, dict(json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"--labels {file}: line {number} is not a JSON object ({error})") from error


class _Stores:
    """Captures of stores, opened one at a time: thousands of captures would exceed the limit on open files."""

    def __init__(self, stores: Sequence[Given]) -> None:
        self._stores = stores

    def __iter__(self) -> Iterator[Capture]:
        for store in self._stores:
            with open_capture(store, 0, allow_incomplete=True) as capture:
                yield capture


def fit_probe(
    stores: Sequence[Given],
    labels: Mapping[tuple[str, str], bool],
    hook: str,
    out: str | os.PathLike[str],
    layer: int | None = None,
    rows: str = "all",
    held_out: float = 0.2,
    seed: int = 0,
) -> FittedProbe:
    """Fit a probe for one hook and layer, and write it to `out`, a new safetensors file. The probe's output is named
    after the file.

    labels: labels of captures, see `read_labels`. Captures without a label are left out, as are rows with a NaN or
    an infinity, both with a warning. layer: required if several layers were captured. rows: as in `mean_difference`.
    held_out: fraction of each label's captures in the test set. seed: seed of the random choice of these captures.

    Raises ValueError as `mean_difference` does, for a hook that was not stored in full, for stores of several models,
    and for fewer than two captures of a label. Raises KeyError for a hook or layer that was not captured,
    FileExistsError if `out` exists, and OSError before the fit if `out` cannot be written.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"--held-out {held_out} is not valid; give a share of the captures between 0 and 1")
    if (number := whole_number(seed)) is None or number < 0:
        raise ValueError(f"--seed {seed!r} is not valid; give 0 or more")
    groups, layer, layered = _by_label(stores, labels, hook, layer)
    rng = np.random.default_rng(seed)
    fit: list[list[Given]] = []
    test: list[list[Given]] = []
    for group in groups:
        order = [group[i] for i in rng.permutation(len(group))]
        count = min(len(group) - 1, max(1, round(held_out * len(group))))
        test.append(order[:count])
        fit.append(order[count:])
    with new_file(local_path(out), "fit-probe") as partial:
        at = layer if layered else None
        finite = FiniteCheck()
        found = mean_difference(_Stores(fit[1]), _Stores(fit[0]), hook, at, rows, finite)
        vector = found.first - found.second
        counts = [len(found.scores[1]), len(found.scores[0])]
        spread = sum(float(np.square(s - s.mean(dtype=np.float64)).sum()) for s in found.scores)
        variance = spread / max(1, sum(counts) - 2)
        if not vector.any() or not variance > 0:
            raise ValueError(
                f"fit-probe: rows of {hook} do not differ between the labels, or not within a label; give other"
                " captures"
            )
        weight = vector / (vector @ vector) / variance
        bias = -(found.second @ weight) - 0.5 / variance + np.log(counts[1] / counts[0])
        held = [_logits(test[label], hook, at, rows, weight, bias, finite) for label in (0, 1)]
        if finite.first:
            store, row = next(iter(finite.first.items()))
            words = "fit-probe: row %d of %s holds %s; such rows, in %d stores, are left out"
            logger.warning(words, row, store, WHAT, len(finite.first))
        result = _tested(counts, held, len(stores_of(fit)), len(stores_of(test)))
        facts = ProbeFacts(hook, (layer,) if layered else (), (local_path(out).stem,), output="sigmoid")
        about = {"fit": "difference of means", "rows": rows, "captures": str(result.captures)}
        about |= {"held_out_accuracy": f"{result.accuracy:.4f}", "baseline": f"{result.baseline:.4f}"}
        save(partial, facts, {layer: [(weight[None], np.array([bias]))]}, about)
    return result


def stores_of(groups: Iterable[Sequence[Given]]) -> list[Given]:
    """All stores of the groups."""
    return [store for group in groups for store in group]


def _by_label(
    stores: Sequence[Given], labels: Mapping[tuple[str, str], bool], hook: str, layer: int | None
) -> tuple[list[list[Given]], int, bool]:
    """([stores of label 0, stores of label 1], the layer, whether the hook has layers)."""
    groups: list[list[Given]] = [[], []]
    one, used, numbers = OneModel(), set(), set()
    for store in stores:
        with open_capture(store, 0, allow_incomplete=True) as capture:
            names = [(field, str(capture.attrs.get(field))) for field in NAMES[:-1]] + [("store", place_of(store).name)]
            name = next((name for name in names if name in labels), None)
            if name is None:
                told = ", ".join(f"{field} {value!r}" for field, value in names)
                continue
            one.check(capture.path, capture.attrs.get("model"))
            check_own_values(capture, hook, layer, Keeps.EVERY_VALUE)
            numbers.add(tuple(source.layer for source in capture.sources(hook, layer)))
            used.add(name)
            groups[labels[name]].append(store)
    if labels and stores and not used:
        field, value = next(iter(labels))
        raise ValueError(
            f"fit-probe: no label names a store: the first label is of {field} {value!r}, and the last store has"
            f" {told}; give one of these"
        )
    if unused := len(labels) - len(used):
        logger.warning("fit-probe: %d of %d labels name no store", unused, len(labels))
    if left := len(stores) - sum(map(len, groups)):
        logger.warning("fit-probe: %d of %d stores have no label; they are left out", left, len(stores))
    for label, group in enumerate(groups):
        if len(group) < _LEAST:
            raise ValueError(f"fit-probe: {len(group)} captures have the label {label}; {_LEAST} or more are needed")
    first = next(iter(numbers))
    if len(numbers) > 1 or len(first) > 1:
        raise ValueError(f"fit-probe: {hook} has several layers; name one with --layer")
    return groups, first[0] or 0, first[0] is not None


def _logits(
    stores: Sequence[Given],
    hook: str,
    layer: int | None,
    rows: str,
    weight: np.ndarray,
    bias: float,
    finite: FiniteCheck,
) -> np.ndarray:
    """The logits of the selected rows, [n]."""
    found = [block @ weight + bias for block in row_blocks(_Stores(stores), hook, layer, rows, finite)]
    return np.concatenate(found) if found else np.zeros(0)


def _tested(counts: Sequence[int], held: Sequence[np.ndarray], captures: int, held_out: int) -> FittedProbe:
    """The result of a fit. counts: training rows of labels 0 and 1. held: logits of the test rows of labels 0 and 1."""
    if not all(map(len, held)):
        raise ValueError("fit-probe: held-out captures of a label have no row that --rows selects; give more captures")
    total = sum(map(len, held))
    right = int((held[0] < 0).sum() + (held[1] >= 0).sum())
    usual = len(held[int(counts[1] > counts[0])])
    ranks = np.searchsorted(np.sort(held[0]), held[1], "left") + np.searchsorted(np.sort(held[0]), held[1], "right")
    auc = float(ranks.mean() / 2 / len(held[0]))
    return FittedProbe(captures, sum(counts), held_out, total, right / total, usual / total, auc)
