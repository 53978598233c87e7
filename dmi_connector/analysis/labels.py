# SPDX-License-Identifier: Apache-2.0
"""Short texts of tokens, for the axes of pictures."""

from __future__ import annotations

import os
from collections.abc import Callable

from dmi_connector.analysis.texts import find_tokenizer
from dmi_connector.captures.capture import Capture
from dmi_connector.hooks import PROBE

_LONGEST_LABEL = 10
"""Maximum number of characters of a label."""
_NEURONS = ("mlp_pre", "mlp_pre_linear", "mlp_post")


def token_labels(capture: Capture, tokenizer: str | os.PathLike[str] | None = None) -> list[str]:
    """One short label for each row: the text of the row's token, or the id of the token without a tokenizer.

    tokenizer: directory of tokenizer.json; None: the model directory that the store names, if that exists. Raises
    ValueError as `find_tokenizer` does.
    """
    label = labeller(capture.attrs.get("model"), tokenizer)
    return [label(i) for i in capture.token_ids.tolist()]


def labeller(
    model: str | os.PathLike[str] | None, tokenizer: str | os.PathLike[str] | None = None
) -> Callable[[int], str]:
    """Return a function from a token id to its short label, see `token_labels`.

    model: the model that the store names; None if the store names no model. tokenizer: as in `token_labels`.
    """
    core = find_tokenizer(tokenizer, model)
    if core is None:
        return str
    return lambda token: _label_of(token, core.decode([token], skip_special_tokens=False))


def name_of_values(hook: str) -> str:
    """The word for one value of a row of this hook: "neuron" for hooks inside the MLP, "output" for probes, else
    "dimension".
    """
    if hook.startswith(PROBE):
        return "output"
    return "neuron" if hook in _NEURONS else "dimension"


def _label_of(token: int, text: str) -> str:
    """`text` with visible spaces, cut to _LONGEST_LABEL characters, or the token's id in brackets if `text` cannot be
    printed.
    """
    if not text or "\N{REPLACEMENT CHARACTER}" in text or not text.isprintable():
        return f"[{token}]"
    shown = text.replace(" ", "·").replace("$", r"\$")  # matplotlib parses text between two dollar signs as math
    return shown if len(shown) <= _LONGEST_LABEL else shown[: _LONGEST_LABEL - 1] + "…"
