# SPDX-License-Identifier: Apache-2.0
"""The formats that `dmi export` writes, and the options that each takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dmi_connector.analysis.export.progress import Done, Progress
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck

Write = Callable[..., Done]


@dataclass(frozen=True)
class Target:
    """One format of `dmi export`.

    name: the value of --to. doc: description for help. options: names of the options that the format takes. required:
    names of the options that it needs. counts: the unit of the progress of a directory. suffix: file name extension for
    a single store; "" for formats that are always directories. file_counts: the unit of the progress of a single file.
    finite: the default of --finite.

    The format's module has a function `export(captures, out, progress, finite, **options)`, which writes a directory.
    With a suffix the module also has `export_file`, which writes one file.
    """

    name: str
    doc: str
    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    counts: str = "stores"
    suffix: str = ""
    file_counts: str = ""
    finite: str = "skip"

    def load(self, file: bool = False) -> Write:
        """The function that writes a directory, or one file."""
        module = import_module(f"dmi_connector.analysis.export.{self.name.replace('-', '_')}")
        write: Write = module.export_file if file else module.export
        return write


TARGETS = {
    target.name: target
    for target in (
        Target(
            "safetensors",
            "the file of vLLM's own hidden-states connector",
            ("layers",),
            suffix=".safetensors",
            file_counts="rows",
        ),
        Target(
            "zip",
            "the files of a store in one uncompressed zip file, which open_capture reads",
            suffix=".zip",
            file_counts="MB",
            finite="keep",
        ),
        Target("numpy", "NAME.npz of hooks and tokens, for numpy.load", ("hook",), ("hook",)),
        Target("parquet", "NAME.parquet with a row per token", ("hook",), ("hook",)),
        Target("webdataset", "tar shards of hooks and tokens, for WebDataset", ("hook", "shard_size"), ("hook",)),
        Target("speculators", "hs_N.safetensors of cached hidden states", ("layers", "number_by")),
        Target("specforge", "rows_A-B/data_N.ckpt of hidden states", ("layers", "number_by", "loss", "gzip")),
        Target("routed-experts", "routed_experts_N.npy, as vLLM returns them", ("number_by", "prompt_start")),
        Target("saelens", "SAELens' cached activations", ("hook", "context_size", "skip"), ("hook",), "contexts"),
        Target(
            "delphi",
            "latents of an autoencoder, as Delphi caches them",
            ("hook", "sae", "context_size", "skip", "splits"),
            ("hook", "sae"),
            "contexts",
        ),
    )
}


def export(
    captures: Captures,
    to: str,
    out: Path,
    options: Mapping[str, Any],
    progress: Progress = lambda _done, _total: None,
    file: bool = False,
    finite: str | None = None,
) -> Done:
    """Write captures in a format.

    to: one of TARGETS. out: a directory, or a new file if `file`. options: {name: value} of the options that were
    given. progress: called with (done, total), in units of `Target.counts` or `Target.file_counts`. file: write one
    capture to a file, in a format with a suffix. finite: what happens to stores with values that are not finite, one of
    `POLICIES`; None: `Target.finite`.

    Raises ValueError without a capture, for captures of several models in one data set, for an option that the format
    does not take, and without an option that it needs. Raises FileExistsError if the file exists. Raises NotFinite if
    `finite` is "fail" and a value is not finite, and if every capture has such values.
    """
    target = TARGETS[to]
    foreign = [name for name in options if name not in target.options]
    lacking = [name for name in target.required if name not in options]
    if foreign or lacking:
        flags = ", ".join("--" + name.replace("_", "-") for name in foreign or lacking)
        what = "takes no" if foreign else "needs"
        raise ValueError(f"export: {to} {what} {flags}; see dmi export --help")
    if not len(captures):
        why = captures.why_empty or "give a store, or a directory of stores"
        raise ValueError(f"export: no finished capture matches; {why}")
    if not target.suffix:  # its files form one data set
        captures.check_one_model()
    check = FiniteCheck(target.finite if finite is None else finite, "--finite")
    done = target.load(file)(captures, out, progress, check, **options)
    return replace(done, not_finite=check.first)
