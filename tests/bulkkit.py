# SPDX-License-Identifier: Apache-2.0
"""Bulk captures without an engine. Stores are copies of a template. A test may kill the run at each step of writing."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.bulk.budget import Budget
from dmi_connector.bulk.engines import Answer, Death
from dmi_connector.bulk.manifest import Manifest
from dmi_connector.bulk.order import Order
from dmi_connector.bulk.progress import Progress
from dmi_connector.bulk.prompts import Columns
from dmi_connector.bulk.recovery import recover
from dmi_connector.bulk.run import Outcome, Run
from dmi_connector.bulk.sources import open_source
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.run_manifest import read_manifest
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.commit import append_finish
from tests.storekit import Store

RUN = "0123abcd"
PROMPT, ROWS = 10, 17


class Killed(BaseException):
    """Simulates SIGKILL. No code may catch it."""


class Kills:
    """Kills the run in the middle of write number n, or just before flush, rename or copy number n."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.steps, self.kinds = at, 0, list[str]()

    def step(self, kind: str) -> bool:
        """Whether to kill the run at this step. kind: name of the function."""
        self.steps += 1
        self.kinds.append(kind)
        return self.steps == self.at

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count every write, flush, rename and copy of a file during the `with` block as a step."""
        write = os.write

        def torn(fd: int, data: Any) -> int:
            if self.step("write"):
                write(fd, bytes(data)[: len(data) // 2])
                raise Killed
            return write(fd, data)

        def before(function: Any, name: str) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                if self.step(name):
                    raise Killed
                return function(*args, **kwargs)

            return called

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", torn)
            for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (shutil, "copyfile"), (os, "unlink")):
                patch.setattr(module, name, before(getattr(module, name), name))
            yield


def template(path: Path) -> Path:
    """A complete store of 10 tokens of a prompt and 7 generated ones."""
    store = Store()
    attrs = {"prompt_len": PROMPT, "include_output_tokens": True, "finish_reason": "length"}
    store.write(path, [ArraySpec("q", "float32", (0,), 8)], ROWS, attrs=attrs)
    store.shutdown()
    assert verify_store(path, begun={}) == []
    return path


def write_store(source: Path, final: Path, key: str, **changes: Any) -> Iterator[None]:
    """Write a copy of a store like a writer, one piece before each `yield`. changes: other root attributes."""
    partial = final.with_name(final.name + ".partial")
    os.mkdir(partial)
    yield
    for path in sorted(path for path in source.rglob("*") if path.is_file() and path.parent != source):
        target = partial / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        yield
    attrs = {**read_attrs(source), "key": key, **changes}
    del attrs["checksum"]
    attrs["checksum"] = crc32c(schema.canonical(attrs))
    (partial / "zarr.json").write_bytes(schema.dump(schema.root_document(attrs)))
    yield
    os.rename(partial, final)
    yield
    append_finish(str(final), attrs, 100)


class FakeEngines:
    """Writes a store for each prompt, piece by piece, for all prompts in flight at the same time.

    faults: {position: changes of the root attributes of its first store}. refuses: {position: reason}. dies_with:
    positions at which the whole engine dies.
    """

    def __init__(
        self,
        source: Path,
        out: Path,
        window: int = 3,
        faults: Mapping[int, dict[str, Any]] | None = None,
        refuses: Mapping[int, str] | None = None,
        dies_with: Sequence[int] = (),
    ) -> None:
        self.source, self.out, self.window = source, out, window
        self.faults, self.refuses, self.dies_with = dict(faults or {}), dict(refuses or {}), dies_with
        self.work: dict[int, tuple[Iterator[None], Answer]] = {}
        self.submitted: list[int] = []
        self.most = 0
        self.started, self.dead = False, False

    def start(self) -> None:
        self.started = True

    def room(self) -> int:
        return 0 if self.dead else self.window - len(self.work)

    def submit(self, position: int, key: str, prompt: Mapping[str, Any]) -> None:
        assert self.started and self.room() > 0, "the run submitted a prompt without room"
        self.submitted.append(position)
        final = self.out / f"{key}--{position}-{len(self.submitted):012d}.zarr"
        changes = self.faults.pop(position, {})
        finish = changes.get("finish_reason", "length")
        answer = Answer(position, PROMPT, ROWS - PROMPT + 1, finish, str(final))
        self.work[position] = write_store(self.source, final, key, **changes), answer
        self.most = max(self.most, len(self.work))

    def events(self, timeout: float) -> list[Answer | Death]:
        found: list[Answer | Death] = []
        for position, (pieces, answer) in list(self.work.items()):
            if position in self.refuses:
                del self.work[position]
                found.append(Answer(position, refused=self.refuses[position]))
            elif next(pieces, self) is self:
                del self.work[position]
                found.append(answer)
            elif position in self.dies_with:
                lost, self.dead = tuple(self.work), True
                self.work.clear()
                return [*found, Death("engine 0", "it died (signal 9)", lost)]
        return found

    def starting(self) -> list[Path]:
        return []

    def finish(self) -> None:
        assert not self.work, "the run ended with prompts in flight"

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        pass


def start_run(
    prompts: Path,
    out: Path,
    engines: Any,
    order: Order | None = None,
    redo_missing: bool = False,
    budget: Budget | None = None,
    end_when_full: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Start a run like `dmi run`, with fake engines."""
    order = order or Order()
    manifest = out / f"manifest{order.suffix}.jsonl"
    recovered = recover(out, RUN, order, manifest, redo_missing)
    source = open_source(prompts, Columns())
    rejects = (out / f"rejects{order.suffix}.jsonl").open("w")
    return Run(
        RUN,
        out,
        order.rows(source, out),
        recovered,
        engines,
        Manifest(manifest),
        rejects,
        budget or Budget(out),
        progress or Progress(True, io.StringIO()),
        lambda: True,
        line_offset=source.line_offset,
        end_when_full=end_when_full,
    )


def go(prompts: Path, out: Path, engines: Any, **options: Any) -> Outcome:
    return start_run(prompts, out, engines, **options).go()


def write_prompts(path: Path, count: int, bad: Sequence[int] = ()) -> Path:
    """Write JSON lines, each with an id. The lines in `bad` are torn."""
    lines = [json.dumps({"prompt": f"text {i}", "id": f"id-{i}"}) for i in range(count)]
    path.write_text("".join(("{" if i in bad else line) + "\n" for i, line in enumerate(lines)))
    return path


def check_whole(out: Path, positions: Sequence[int], ids: Mapping[int, str] | None = None, suffix: str = "") -> None:
    """Check that each of `positions` has exactly one complete, valid store and one manifest line with its name."""
    assert not list(out.glob("*.partial"))
    keys = [f"{RUN}-{position:09d}" for position in positions]
    stores = sorted(out.glob("*.zarr"))
    assert sorted(store.name.split("--")[0] for store in stores) == sorted(keys)
    for store in stores:
        attrs = read_attrs(store)
        assert attrs["complete"] and attrs["finish_reason"] == "length" and verify_store(store, begun={}) == [], store
    path = out / f"manifest{suffix}.jsonl"
    entries = list(read_manifest(path))
    assert path.read_bytes().count(b"\n") == len(entries), "every line must be complete"
    assert sorted((e["key"], e["store"]) for e in entries) == sorted((s.name.split("--")[0], s.name) for s in stores)
    for entry in entries:
        position = int(entry["key"].split("-")[1])
        assert entry["id"] == (f"id-{entry['row']}" if ids is None else ids[position])
        assert (entry["prompt_tokens"], entry["generated_tokens"]) == (PROMPT, ROWS - PROMPT + 1)
        assert entry["finish_reason"] == "length" and entry["bytes"] > 0
