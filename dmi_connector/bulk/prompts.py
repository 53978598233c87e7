# SPDX-License-Identifier: Apache-2.0
"""Turns a row of the input into a prompt, or rejects it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dmi_connector.request_options import MOST_SPANS
from dmi_connector.wording import show, suggest

_LARGEST_TOKEN = 2**31 - 1


class BadRow(ValueError):
    """A row has no valid prompt. The message says why."""


@dataclass(frozen=True)
class Columns:
    """The names of the input columns that hold the parts of a prompt."""

    prompt: str = "prompt"
    messages: str = "messages"
    prompt_token_ids: str = "prompt_token_ids"
    id: str = "id"
    loss_mask: str = "loss_mask"

    @classmethod
    def parse(cls, given: Sequence[str]) -> Columns:
        """Parse values of --column, such as "prompt=text". Raises ValueError."""
        known = [field.name for field in fields(cls)]
        named: dict[str, str] = {}
        for text in given:
            name, separator, column = text.partition("=")
            if not separator or not column or name not in known:
                near = suggest(name, known)
                raise ValueError(
                    f"--column {text!r} is not valid{near}; write NAME=COLUMN, NAME one of {', '.join(known)}"
                )
            named[name] = column
        return cls(**named)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns to read."""
        return *self.prompts, self.id, self.loss_mask

    @property
    def prompts(self) -> tuple[str, str, str]:
        """The columns that can hold the prompt."""
        return self.prompt, self.messages, self.prompt_token_ids


@dataclass(frozen=True)
class Prompt:
    """One prompt: a text, the messages of a chat, or token ids.

    messages: dicts with a `role`, and a text `content` unless it is absent. id: the user's name for the prompt, None
    without one. loss_spans: [start, stop) spans of `token_ids` on which a trainer computes its loss, from the loss mask
    of the row. None without a mask.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    id: str | None = None
    loss_spans: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, row: object, columns: Columns, chat: bool = False) -> Prompt:
        """The prompt of a row. chat: a text becomes the user's message of a chat. Raises BadRow.

        Token ids take precedence over messages, and messages over a text. A null value counts as absent.
        """
        if not isinstance(row, Mapping):
            raise BadRow("the row is not an object with columns")
        name = _name(row, columns)
        if (ids := row.get(columns.prompt_token_ids)) is not None:
            token_ids = _token_ids(columns.prompt_token_ids, ids)
            return cls(token_ids=token_ids, id=name, loss_spans=_loss_spans(row, columns, len(token_ids)))
        if row.get(columns.loss_mask) is not None:
            raise BadRow(f"{columns.loss_mask}: a mask needs token ids; give {columns.prompt_token_ids} too")
        if (messages := row.get(columns.messages)) is not None:
            return cls(messages=_messages(columns.messages, messages), id=name)
        if (text := row.get(columns.prompt)) is None:
            wanted = ", ".join(columns.prompts)
            raise BadRow(f"the row has none of the columns {wanted}; its columns: {', '.join(map(str, row)) or 'none'}")
        if not isinstance(text, str):
            raise BadRow(f"{columns.prompt}: {show(text)} is not a string")
        if not text:
            raise BadRow(f"{columns.prompt}: the text is empty")
        if chat:
            return cls(messages=({"role": "user", "content": text},), id=name)
        return cls(text=text, id=name)

    def to_json(self) -> dict[str, Any]:
        """The prompt for an engine process, JSON-serializable. "options": request options under `dmi`."""
        given = {"text": self.text, "messages": self.messages, "token_ids": self.token_ids}
        options = {} if self.loss_spans is None else {"options": {"loss_spans": self.loss_spans}}
        return {**{name: value for name, value in given.items() if value is not None}, **options}


def _name(row: Mapping[str, Any], columns: Columns) -> str | None:
    name = row.get(columns.id)
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    raise BadRow(f"{columns.id}: {show(name)} is not a string or an integer")


def _token_ids(column: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRow(f"{column}: {show(value)} is not a list of token ids")
    if not value:
        raise BadRow(f"{column}: the list is empty")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _LARGEST_TOKEN:
            raise BadRow(f"{column}: {show(item)} is not a token id")
    return tuple(value)


def _loss_spans(row: Mapping[str, Any], columns: Columns, count: int) -> tuple[tuple[int, int], ...] | None:
    """The [start, stop) spans in which the loss mask of a row is 1; None without a mask. count: number of token ids."""
    mask = row.get(columns.loss_mask)
    if mask is None:
        return None
    if not isinstance(mask, Sequence) or isinstance(mask, str | bytes) or not all(x in (0, 1) for x in mask):
        raise BadRow(f"{columns.loss_mask}: {show(mask)} is not a list of 0 and 1")
    if len(mask) != count:
        raise BadRow(f"{columns.loss_mask}: {len(mask)} values for {count} token ids")
    edges = [0, *map(int, mask), 0]
    changes = [i for i in range(count + 1) if edges[i] != edges[i + 1]]
    spans = tuple(zip(changes[::2], changes[1::2], strict=True))
    if len(spans) > MOST_SPANS:
        raise BadRow(f"{columns.loss_mask}: {len(spans)} runs of ones; the maximum is {MOST_SPANS}")
    return spans


def _messages(column: str, value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise BadRow(f"{column}: {show(value)} is not a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRow(f"{column}: {show(message)} is not a message with a role and a content")
        if not isinstance(message.get("content", ""), str):
            raise BadRow(f"{column}: the content of {show(message)} is not a string")
    return tuple(dict(message) for message in value)
