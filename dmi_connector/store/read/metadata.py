# SPDX-License-Identifier: Apache-2.0
"""Reads a store's metadata and checks it before zarr-python sees it.

Only numeric data types and the Zarr codecs of this format are accepted. So a store cannot make a reader load a pickle,
an object dtype or code of a plugin.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from dmi_connector.codecs import zarr_names
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.store.format import schema
from dmi_connector.store.format.object_store import RemoteError
from dmi_connector.store.format.remote_path import Given, place_of
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.files.store_files import StoreFiles
from dmi_connector.store.read.files.thread_pool import in_fetch_threads

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_KEYS = {*schema.array_document("uint8", [], [], [], [])}
_NEEDED: dict[str, type | tuple[type, ...]] = {
    "format_version": (str, float),
    "complete": bool,
    "num_tokens": int,
    "prompt_len": int,
    "start": int,
    "reason": (str, type(None)),
    "missing": list,
    "hooks": dict,
    "files": dict,
}
"""{attribute of every store: its types}."""
_MOST_TOKENS = (1 << 31) - 1
"""Maximum of token counts and positions: the array `positions` is int32."""
_MOST_LAYERS = 1 << 16
"""More layers than any model has. Some readers loop over all layers of the model."""
_OF_ZARR_2 = (".zgroup", ".zarray", ".zmetadata")
_FRAMING = ("bytes", "crc32c", "sharding_indexed")
"""Zarr codecs of every store, in addition to compressors."""


class NotACapture(ValueError):
    """The path is not a capture. A damaged capture raises another ValueError."""


def read_attrs(path: Given) -> dict[str, Any]:
    """The root attribute of a store: the attribute `dmi` of its root group.

    Raises NotACapture (a ValueError) if the path is not a store, ValueError for a store that is damaged or has another
    format version, and RemoteError if a request to the object store fails.
    """
    return attrs_of(files_of(place_of(path)))


def attrs_of(files: StoreFiles) -> dict[str, Any]:
    """Like `read_attrs`, for the files of a store."""
    try:
        document = json.loads(files.read("zarr.json"))
    except RemoteError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        other = next((name for name in _OF_ZARR_2 if files.size(name) is not None), None)
        if other is not None:
            raise NotACapture(f"{files} is not a capture: it is a Zarr store of format 2 ({other})") from error
        raise NotACapture(f"{files} is not a capture: there is no {files}/zarr.json") from error
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{files} is not a capture: zarr.json cannot be read ({error})") from error
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or schema.ATTR_KEY not in attributes:
        raise NotACapture(f"{files} is not a capture: zarr.json has no {schema.ATTR_KEY!r} attribute")
    attrs = attributes[schema.ATTR_KEY]
    wrong = invalid(attrs)
    version = "" if "format_version" in wrong else str(attrs["format_version"])
    if version and version.split(".")[0] != schema.FORMAT_VERSION.split(".")[0]:
        raise ValueError(
            f"{files} has format version {version}, this package reads {schema.FORMAT_VERSION}: install a matching one"
        )
    if wrong:
        raise ValueError(f"{files} is not a capture: its {schema.ATTR_KEY!r} attribute has no valid {', '.join(wrong)}")
    return dict(attrs)


def invalid(attrs: object) -> list[str]:
    """The attributes with a value that readers cannot use, and the needed attributes that a store lacks."""
    known = attrs if isinstance(attrs, dict) else {}
    wrong = [name for name, types in _NEEDED.items() if name not in known or not isinstance(known[name], types)]
    checked = [name for name in _FORMS if name in known and name not in wrong]
    return wrong + [name for name in checked if not _FORMS[name](known[name])]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_TOKENS


def _are_pairs(value: object) -> bool:
    """Whether a value is a list of [start, stop], in any order."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in value
    )


def _is_hook(hook: object) -> bool:
    if not isinstance(hook, dict) or "array" not in hook or not isinstance(hook.get("reduce"), dict | None):
        return False
    layers = hook.get("layers")
    return isinstance(layers, list) and all(_is_count(layer) and layer < _MOST_LAYERS for layer in layers)


def _is_file(entry: object) -> bool:
    """Whether a value is [bytes, checksum]."""
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    size, checksum = entry  # without a loop, because a long capture has thousands of files
    return type(size) is int and type(checksum) is int and size >= 0 <= checksum


def _are_media(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and _are_pairs(one.get("positions")) for one in value)


def _are_files(files: dict[str, Any]) -> bool:
    """Whether all values are [bytes, checksum], and the sum of the bytes fits the int64 of `Captures.table`."""
    return all(map(_is_file, files.values())) and sum(entry[0] for entry in files.values()) < 1 << 63


def _are_layers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_experts(value: object) -> bool:
    return isinstance(value, dict) and _is_count(value.get("count")) and _are_layers(value.get("layers"))


def _is_dict_of(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_value, value.values()))


_FORMS: dict[str, Callable[[Any], bool]] = {
    "num_tokens": _is_count,
    "prompt_len": _is_count,
    "start": _is_count,
    "missing": _are_pairs,
    "hooks": lambda hooks: all(map(_is_hook, hooks.values())),
    "files": _are_files,
    "num_layers": lambda value: value is None or (_is_count(value) and value <= _MOST_LAYERS),
    "dims": _is_dict_of(_is_count),
    "media": _are_media,
    "experts": lambda value: value is None or _are_experts(value),
    "mlp_layers": lambda value: value is None or _are_layers(value),
    "draft_tokens": _is_dict_of(_is_count),
    "scores": _is_dict_of(lambda one: isinstance(one, dict)),
    "speculative": lambda value: isinstance(value, dict),
    **dict.fromkeys(("last_prompt_len", "visual_layers"), _is_count),
    **dict.fromkeys(("model", "key", "request_id", "created", "finished"), lambda value: isinstance(value, str | None)),
}
"""{attribute: whether readers can use its value}. The type of an attribute in _NEEDED is checked before."""


def check_arrays(files: StoreFiles, attrs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Check the metadata of every array that `attrs` names. Returns {name: document}.

    Raises ValueError that names the array and the fault.
    """
    names = [hook["array"] for hook in attrs["hooks"].values()]
    for name in names:
        if not isinstance(name, str):  # a forged value may not be hashable
            raise ValueError(f"{files}: {name!r} is not the name of an array")
    extra = ["logits_positions"] if "logits" in names else []
    found = dict.fromkeys([*names, *schema.token_arrays(attrs), *extra])
    if not files.remote:
        return {name: read_array(files, name) for name in found}
    documents: dict[str, dict[str, Any]] = {}

    def fetch(name: str) -> None:
        documents[name] = read_array(files, name)

    in_fetch_threads(fetch, found)
    return {name: documents[name] for name in found}


def read_array(files: StoreFiles, name: str) -> dict[str, Any]:
    """The checked zarr.json of one array. Do not modify it: it is cached.

    Raises ValueError that names the array and the fault.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{files}: {name!r} is not the name of an array")
    where = f"{files}: the metadata of array {name!r}"
    try:
        raw = files.read(f"{name}/zarr.json")
        return _checked(raw)
    except RemoteError:
        raise
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{where} cannot be read ({error})") from error
    except _Fault as fault:
        raise ValueError(f"{where} {fault}") from None


class _Fault(Exception):
    """A fault of an array's metadata. The message is the end of a sentence."""


@functools.lru_cache(maxsize=256)
def _checked(raw: bytes) -> dict[str, Any]:
    """Parse and check a document. Cached, because stores of equal length have equal documents. Raises _Fault."""
    document = json.loads(raw)
    if not isinstance(document, dict) or not document.keys() <= _KEYS or document.get("storage_transformers"):
        raise _Fault("has keys or storage transformers that this format does not have")
    dtype = document.get("data_type")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise _Fault(f"has the data type {dtype!r}; this format has {', '.join(ITEMSIZE)}")
    _check_codecs(document.get("codecs"))
    return document


def _check_codecs(codecs: object) -> None:
    known = [*_FRAMING, *zarr_names()]
    for codec in codecs if isinstance(codecs, list) else [codecs]:
        if not isinstance(codec, dict) or codec.get("name") not in known:
            raise _Fault(f"has the codec {codec!r}; this format has {', '.join(known)}")
        if codec["name"] == "sharding_indexed":
            inside = codec.get("configuration")
            if not isinstance(inside, dict):
                raise _Fault(f"has the codec {codec!r} without a configuration")
            for part in ("codecs", "index_codecs"):
                _check_codecs(inside.get(part))
