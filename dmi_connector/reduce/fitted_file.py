# SPDX-License-Identifier: Apache-2.0
"""Reads the files of fitted reductions: float32 tensors of hooks and layers, with JSON in the metadata.

`dmi fit-...` writes them as safetensors. The SHA-256 of a file identifies it. For each hook and layer, the file has
tensors `HOOK.LAYER.NAME`. A hook that exists once has layer 0.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from dmi_connector.reduce.errors import ReduceError

F = TypeVar("F", bound="FittedFile")
_UNREADABLE = (SafetensorError, AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class FittedFile:
    """One file. A subclass defines one kind of file.

    hooks: {hook: {"width", "layers", ...}}. read: function that returns a tensor by name.
    """

    path: str
    sha256: str
    hooks: dict[str, dict[str, Any]]
    read: Callable[[str], np.ndarray] = field(repr=False, compare=False)
    metadata: ClassVar[str]
    """Key of our JSON in the metadata of the safetensors file."""
    what: ClassVar[str]
    """Name of the content in messages, such as "scales"."""
    command: ClassVar[str]
    """The command that writes such a file."""
    setting: ClassVar[str]
    """The setting that names such a file: "int8(channel={})"."""
    argument: ClassVar[str] = ""
    """The argument of a capture's methods that names such a file; "" without one."""
    least: ClassVar[float] = -np.inf
    """Minimum of the values."""
    cached: ClassVar[int] = 64
    """Number of tensors kept in memory after they were read."""

    @classmethod
    def shapes(cls, about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of one hook and layer, by NAME. about: the hook's entry in `hooks`."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file.

        Raises ReduceError if it cannot be read or has another format, and for a tensor that is missing, has another
        shape or dtype, or has values that are not finite or below `least`.
        """
        path = os.path.expanduser(os.fspath(path))
        try:
            found = os.stat(path)
            return _load(cls, path, found.st_mtime_ns, found.st_size)  # type: ignore[arg-type]  # a class is hashable
        except OSError as error:
            raise ReduceError(
                f"reduce: {cls.setting.format(path)} cannot be read ({error.strerror or error}); give a file that"
                f" {cls.command} made"
            ) from error

    @classmethod
    def parse(cls, content: bytes, path: str) -> Self:
        """Parse the content of a file. path: path for error messages. Raises ReduceError like `load`."""
        try:
            about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
            tensors = dict(deserialize(content))
        except _UNREADABLE as error:
            raise cls._unknown(path, error) from error
        return cls._checked(path, hashlib.sha256(content).hexdigest(), about, lambda name: _array(tensors[name]))

    @classmethod
    def _checked(
        cls, path: str, sha256: str, about: Mapping[str, str] | None, read: Callable[[str], np.ndarray]
    ) -> Self:
        try:
            hooks = json.loads((about or {})[cls.metadata])["hooks"]
            wanted = {
                f"{hook}.{layer}.{name}": shape
                for hook, info in hooks.items()
                for layer in info["layers"]
                for name, shape in cls.shapes(info).items()
            }
        except _UNREADABLE as error:
            raise cls._unknown(path, error) from error
        for name, shape in wanted.items():
            try:
                found = read(name)
            except _UNREADABLE:  # missing, or its dtype is unknown to numpy
                found = np.zeros(0)
            sound = found.dtype == np.float32 and found.shape == shape
            if not (sound and (np.isfinite(found) & (found >= cls.least)).all()):
                above = " above 0" if cls.least > 0 else ""
                raise ReduceError(
                    f"reduce: {path} is damaged: {name} has to be {' x '.join(map(str, shape))} finite float32"
                    f" numbers{above}; make it again with {cls.command}"
                )
        return cls(path, sha256, hooks, lru_cache(cls.cached)(read))

    @classmethod
    def _unknown(cls, path: str, error: Exception) -> ReduceError:
        return ReduceError(f"reduce: {path} holds no {cls.what} ({error!r}); give a file that {cls.command} made")

    def tensor(self, hook: str, layer: int, name: str) -> np.ndarray:
        """A tensor of one hook and layer. Raises ReduceError if the file lacks it, OSError if the file is gone."""
        if layer not in self.hooks.get(hook, {}).get("layers", ()):
            raise ReduceError(
                f"reduce: {self.path} holds no {self.what} of {hook} in layer {layer}; fit it for this layer too"
            )
        return self.read(f"{hook}.{layer}.{name}")

    def check(self, hook: str, layers: set[int], width: int) -> dict[str, Any]:
        """The entry of a hook with rows of `width` values. Raises ReduceError if the file does not fit the hook."""
        info = self.hooks.get(hook)
        if info is None:
            raise ReduceError(
                f"reduce: {self.path} holds no {self.what} of {hook}, only of {', '.join(self.hooks)}; fit {hook} with"
                f" {self.command}"
            )
        if lacking := sorted(layers - set(info["layers"])):
            raise ReduceError(
                f"reduce: {self.path} holds no {self.what} of {hook} in layer {lacking[0]}; fit it for this layer too"
            )
        if info["width"] != width:
            raise ReduceError(
                f"reduce: {self.path} is of another model: {hook} has {width} values, not {info['width']}"
            )
        return info


@lru_cache(maxsize=16)
def _load(kind: type[F], path: str, modified: int, size: int) -> F:
    def read(name: str) -> np.ndarray:
        with safe_open(path, "numpy") as file:
            return np.asarray(file.get_tensor(name))

    with open(path, "rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata()
    except _UNREADABLE as error:
        raise kind._unknown(path, error) from error
    return kind._checked(path, digest, about, read)


def _array(tensor: Mapping[str, Any]) -> np.ndarray:
    """A float32 tensor of a file. For a tensor of another dtype, an empty float64 array."""
    if tensor["dtype"] != "F32":
        return np.zeros(0)
    return np.frombuffer(tensor["data"], "<f4").reshape(tensor["shape"])
