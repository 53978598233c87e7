# SPDX-License-Identifier: Apache-2.0
"""Request options (`kv_transfer_params`), parsed and validated."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from dmi_connector.conditions import AGGREGATES, Condition, keep_if, stop_if
from dmi_connector.hook_table import PROBE
from dmi_connector.option_values import (
    SUGGEST_FROM,
    boolean,
    check_names,
    hook_items,
    integer,
    is_directory_name,
    one_of,
    refuse,
)
from dmi_connector.reduce.probe import NORM, TOP, Probe
from dmi_connector.wording import suggest

INLINE = tuple(AGGREGATES)
"""Aggregates of a probe's scores that a request may ask for in its response."""
MOST_SPANS = 4096
"""Maximum number of spans in `dmi.loss_spans`."""
_MOST_TOKENS = 1 << 40
"""Upper bound of token positions in options."""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INCLUDE = "include_output_tokens"
_NEAR, _NEAR_LENGTH = 0.85, 3
"""Minimum similarity (0 to 1) of a misspelt name to the option, and maximum difference in length."""
_DMI_LIKE = re.compile(r"\s*dmi\s*(?:[._-]\s*(.*))?", re.IGNORECASE | re.DOTALL)
"""Matches "dmi" in any case, alone or with a suffix as in "dmi.key". The group is the suffix."""
_ANSWERED = (
    "dmi_store",
    "dmi_request_id",
    "dmi_url",
    "dmi_key",
    "dmi_reason",
    "dmi_probe",
    "dmi_summary",
    "dmi_stop",
    "dmi_missing",
    "dmi_warning",
    "dmi_error",
)
"""Names in responses. They are accepted in requests, because a proxy may pass them on to the next server."""
_LOOKED_AT = 32
"""Maximum number of names per request that are checked for misspelling. The check takes time of the engine process."""


def _meant(name: str, params: Mapping[Any, Any], known: Sequence[str]) -> str:
    """The correct spelling of a misspelt or misplaced option; "" for a name that is not meant for this package.

    name: a name beside `dmi` in `params`, the request's `kv_transfer_params`. known: the options under `dmi`.
    """
    like = _DMI_LIKE.fullmatch(name[:SUGGEST_FROM])
    answered = name in _ANSWERED and (name != "dmi_key" or "dmi_request_id" in params)
    if name == "dmi" or answered or not (like or _is_slip(name, "dmi")):
        return ""
    option = like[1] if like else None
    if option == _INCLUDE:
        return f'{{"{_INCLUDE}": ...}}'
    return f'{{"dmi": {{"{option}": ...}}}}' if option in known else f'{{"dmi": ...}}, with any of {", ".join(known)}'


def _is_slip(name: str, word: str) -> bool:
    """Whether a name differs from `word` by one letter: missing, wrong, additional, or swapped with its neighbour."""
    name = name[:SUGGEST_FROM].lower()
    if len(name) == len(word):
        wrong = [i for i, (a, b) in enumerate(zip(name, word, strict=True)) if a != b]
        swapped = len(wrong) == 2 and wrong[1] == wrong[0] + 1 and sorted(name) == sorted(word)
        return len(wrong) == 1 or swapped
    shorter, longer = sorted((name, word), key=len)
    return len(longer) - len(shorter) == 1 and any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))


@dataclass(frozen=True)
class CaptureParams:
    """The options of one request, from its `kv_transfer_params`.

    include_output_tokens: capture rows of generated tokens too (False: only prompt rows, as in vLLM). key: the client's
    name for the store. hooks, layers: narrow the server's selection. start, stop: range of positions to keep, from the
    option `tokens`; stop None: to the end. enabled: False skips the capture. save_path: absolute directory of the
    store, if the server allows it. loss_spans: [start, stop) positions of the prompt on which a trainer computes its
    loss. They are stored for `dmi export`.

    probes: {probe: aggregates in INLINE that the response contains}. summary: the response contains the norms and the
    largest neurons of rows that the server's probes compute. keep_if: the store is kept only if this condition is not
    false at the end of the request. stop_if: the request ends after the first row for which this condition is true.
    """

    include_output_tokens: bool = False
    key: str | None = None
    hooks: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    enabled: bool = True
    save_path: str | None = None
    loss_spans: tuple[tuple[int, int], ...] | None = None
    probes: dict[str, tuple[str, ...]] | None = None
    summary: bool = False
    keep_if: Condition | None = None
    stop_if: Condition | None = None

    @classmethod
    def parse(cls, params: object) -> CaptureParams:
        """Parse a request's `kv_transfer_params`. None gives the defaults. Raises OptionError."""
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise refuse("kv_transfer_params", params, "is not valid; give a JSON object")
        known = tuple(_OPTIONS)
        cls._check_places(params, known)
        include = boolean(_INCLUDE, params.get(_INCLUDE, False))
        options = params.get("dmi")
        if options is None:
            return cls(include_output_tokens=include)
        if not isinstance(options, Mapping):
            raise refuse("dmi", options, f"is not valid; give a JSON object with any of {', '.join(known)}")
        if _INCLUDE in options:
            raise refuse(f"dmi.{_INCLUDE}", options[_INCLUDE], "is in the wrong place; write it beside dmi, not in it")
        check_names("dmi", options, known)
        given = {name: read(options[name]) for name, read in _OPTIONS.items() if name in options}
        start, stop = given.pop("tokens", (0, None))
        return cls(include_output_tokens=include, start=start, stop=stop, **given)

    @property
    def store_attributes(self) -> dict[str, Any]:
        """The attributes that these options add to the root of the store."""
        spans = {} if self.loss_spans is None else {"loss_spans": self.loss_spans}
        return {"include_output_tokens": self.include_output_tokens, **spans}

    def check_prompt(self, prompt_len: int) -> None:
        """Raise OptionError for loss spans beyond the end of a prompt of `prompt_len` tokens."""
        if self.loss_spans and self.loss_spans[-1][1] > prompt_len:
            raise refuse(
                "dmi.loss_spans",
                list(self.loss_spans[-1]),
                f"reaches beyond the {prompt_len} tokens of the prompt; give spans within the prompt",
            )

    @property
    def scored(self) -> set[str]:
        """The probes whose scores are needed while the request runs."""
        conditions = [one.probe for one in (self.keep_if, self.stop_if) if one is not None]
        return {*(self.probes or ()), *conditions}

    def check_probes(self, known: Mapping[str, Probe], others: Collection[str]) -> None:
        """Raise OptionError if the server's probes do not give what the options ask for.

        known: name -> probe with scores. others: names of autoencoders, which have no score.
        """
        conditions = {"dmi.keep_if": self.keep_if, "dmi.stop_if": self.stop_if}
        asked = [("dmi.probes", name) for name in self.probes or ()]
        asked += [(option, condition.probe) for option, condition in conditions.items() if condition is not None]
        if self.summary and not any(probe.form in (NORM, TOP) for probe in known.values()):
            fix = """start it with probes {"norm": "norm(resid_pre)", "top": "top(mlp_post)"}, and probe.* in hooks"""
            what = "needs norms or largest neurons of rows, and this server computes none"
            raise refuse("dmi.summary", True, f"{what}; {fix}")
        for option, name in asked:
            if name in others:
                raise refuse(option, name, "is an autoencoder, which has no score; name a probe")
            if name not in known:
                near = suggest(name[:SUGGEST_FROM], known) or ";"
                has = ", ".join(known) or "none (start it with the option probes)"
                raise refuse(option, name, f"is not a probe of this server{near} it has: {has}")
            if option == "dmi.probes" and known[name].form == TOP:
                raise refuse(option, name, "has indexes of neurons, which are not scores; ask for dmi.summary")
            if option in conditions and not known[name].one_score:
                raise refuse(option, name, "has several scores per row; name a probe of one output in one layer")

    def check_waits(self, hooks: Collection[str]) -> None:
        """Raise OptionError for `keep_if` if values of `hooks`, the captured hooks, are written before the end."""
        if self.keep_if is not None and "logits" in hooks:
            raise refuse(
                "dmi.keep_if",
                self.keep_if.text,
                "cannot be combined with logits, which are written in each step; leave logits out of dmi.hooks",
            )

    @staticmethod
    def _check_places(params: Mapping[Any, Any], known: Sequence[str]) -> None:
        """Raise OptionError for an option that is misspelt or not inside `dmi`. Other names are ignored."""
        for name in known:
            if name in params:
                fix = f'write it in dmi, as in {{"dmi": {{"{name}": ...}}}}'
                raise refuse(name, params[name], f"is in the wrong place; {fix}")
        for name in islice(params, _LOOKED_AT):
            if isinstance(name, str) and (fix := _meant(name, params, known)):
                raise refuse("kv_transfer_params", name, f"is unknown; write {fix}")
            near = isinstance(name, str) and abs(len(name) - len(_INCLUDE)) <= _NEAR_LENGTH
            if near and name != _INCLUDE and get_close_matches(name, [_INCLUDE], cutoff=_NEAR):
                raise refuse("kv_transfer_params", name, f"is unknown; did you mean {_INCLUDE!r}?")


def _key(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or _KEY.fullmatch(value) is None):
        raise refuse(
            "dmi.key",
            value,
            "is not valid; use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit",
        )
    return value


def _hooks(value: Any) -> tuple[str, ...] | None:
    return None if value is None else hook_items("dmi.hooks", value)


def _enabled(value: object) -> bool:
    return boolean("dmi.enabled", value)


def _save_path(value: Any) -> str | None:
    if value is None:
        return None
    if not is_directory_name(value):
        raise refuse("dmi.save_path", value, "is not valid; give an absolute directory, without '.' and '..'")
    return os.path.normpath(value)


def _layers(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(x, int) and not isinstance(x, bool) for x in value)
    ):
        raise refuse("dmi.layers", value, "is not valid; give a list of layer numbers, as in [0, 5, -1]")
    return tuple(value)


def _tokens(value: object) -> tuple[int, int | None]:
    if value is None:
        return 0, None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise refuse("dmi.tokens", value, "is not valid; give [start, stop], as in [0, 128] or [64, null]")
    start = integer("dmi.tokens start", value[0], 0, _MOST_TOKENS)
    if value[1] is None:
        return start, None
    stop = integer("dmi.tokens stop", value[1], 0, _MOST_TOKENS)
    if stop <= start:
        raise refuse("dmi.tokens", list(value), "is empty; stop must be larger than start")
    return start, stop


def _loss_spans(value: object) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > MOST_SPANS:
        raise refuse(
            "dmi.loss_spans",
            value,
            f"is not valid; give a list of at most {MOST_SPANS} [start, stop], as in [[12, 80], [95, 130]]",
        )
    end = 0
    for span in value:
        pair = isinstance(span, list | tuple) and len(span) == 2 and all(type(x) is int for x in span)
        if not pair or not end <= span[0] < span[1] <= _MOST_TOKENS:
            raise refuse(
                "dmi.loss_spans",
                span,
                "is not valid; give [start, stop] with start below stop, each after the one before",
            )
        end = span[1]
    return tuple((start, stop) for start, stop in value)


def _probes(value: object) -> dict[str, tuple[str, ...]] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise refuse("dmi.probes", value, 'is not valid; give {name: {"inline": "max"}}')
    for name in value:
        if name.startswith(PROBE) and name.removeprefix(PROBE) in value:
            raise refuse("dmi.probes", name, f"is named twice, with and without {PROBE!r}; name it once")
    return {name.removeprefix(PROBE): _inline(name, asked) for name, asked in value.items()}


def _inline(name: str, asked: object) -> tuple[str, ...]:
    """The aggregates of one probe for the response. asked: {"inline": a name in INLINE, or a list of them}."""
    if not isinstance(asked, Mapping):
        raise refuse("dmi.probes", {name: asked}, 'is not valid; give {name: {"inline": "max"}}')
    check_names("dmi.probes", asked, ["inline"])
    value = asked.get("inline")
    items = value if isinstance(value, list | tuple) and value else [value]
    return tuple(dict.fromkeys(one_of("dmi.probes inline", item, INLINE) for item in items))


def _summary(value: object) -> bool:
    return boolean("dmi.summary", value)


_OPTIONS: dict[str, Callable[[object], Any]] = {
    "key": _key,
    "hooks": _hooks,
    "layers": _layers,
    "tokens": _tokens,
    "enabled": _enabled,
    "save_path": _save_path,
    "loss_spans": _loss_spans,
    "probes": _probes,
    "summary": _summary,
    "keep_if": keep_if,
    "stop_if": stop_if,
}
"""Option under `dmi` -> the function that parses its value. The result is the field of the same name. "tokens" gives
the two fields `start` and `stop`.
"""
