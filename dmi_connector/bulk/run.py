# SPDX-License-Identifier: Apache-2.0
"""Captures the prompts of one share of a run (--shard), and writes a line of the manifest for each complete store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dmi_connector.bulk.budget import Budget
from dmi_connector.bulk.engines import Answer, Death, Engines
from dmi_connector.bulk.flight import Flight, failed, why_abandoned
from dmi_connector.bulk.manifest import Manifest, cannot_write
from dmi_connector.bulk.order import Placed, Rows
from dmi_connector.bulk.progress import Counts, Progress
from dmi_connector.bulk.prompts import BadRow, Columns, Prompt
from dmi_connector.bulk.recovery import Recovered, position_of, settle_left, store_key
from dmi_connector.store.format import schema
from dmi_connector.store.format.completeness import OWN_ENDS
from dmi_connector.store.format.locks import lock_alone
from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.index import IndexTail, info_of
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.write.finish.retention import remove_store

_TRIES = 2
"""Maximum number of times that a prompt is captured, if its stores are incomplete."""
_QUIET_S = 5.0
"""Seconds after an answer. If the index then has no line for the store, the store is looked up by its path."""
_MOST_FAILURES = 100
"""Number of consecutive failed captures that stops the run."""
_ROWS_PER_TURN = 10_000
"""Maximum number of rows to read between two polls of the engines."""
_WAIT_S = 0.1


@dataclass
class Outcome:
    """How a run ended.

    stopped: why it stopped early ("signal", "max_bytes", "engines" or "captures"), or None. deaths: dead engines.
    lost: submitted prompts without a store. beyond: prompts that earlier starts captured beyond the current limit.
    """

    counts: Counts
    stopped: str | None = None
    deaths: list[Death] = field(default_factory=list)
    lost: int = 0
    beyond: int = 0

    @property
    def all_done(self) -> bool:
        """Whether every prompt of the share has its store."""
        return self.stopped is None and not self.lost and not self.counts.failed

    @property
    def began(self) -> bool:
        """Whether an engine was ready for prompts, or none was needed."""
        return self.stopped != "engines" or any(death.began for death in self.deaths)


class Run:
    """Captures one share of a run. Memory holds only the prompts in flight, and one bit per position.

    out: directory of the stores. rejects: open file for rows without a store. writers_gone: returns whether all engines
    have exited. end_when_full: stop at a full disk budget instead of waiting. generates: whether tokens are generated.
    """

    def __init__(
        self,
        run: str,
        out: Path,
        rows: Rows,
        recovered: Recovered,
        engines: Engines,
        manifest: Manifest,
        rejects: TextIO,
        budget: Budget,
        progress: Progress,
        writers_gone: Callable[[], bool],
        columns: Columns | None = None,
        chat: bool = False,
        line_offset: int | None = None,
        end_when_full: bool = False,
        generates: bool = True,
    ) -> None:
        self._run, self._out, self._rows = run, out, rows
        self._recovered, self._engines, self._manifest, self._rejects = recovered, engines, manifest, rejects
        self._budget, self._progress, self._writers_gone = budget, progress, writers_gone
        self._columns, self._chat, self._line_offset = columns or Columns(), chat, line_offset
        self._end_when_full, self._generates = end_when_full, generates
        self._tail = IndexTail(out, new_only=True)
        self._flights: dict[int, Flight] = {}
        self._again: list[Flight] = []  # to submit: retries, and the next prompt of the input
        self._orphans: list[tuple[Death, list[Flight]]] = []  # prompts of dead engines whose writers have not exited
        self._condemned: list[Path] = []  # incomplete stores to remove
        self._failures = 0  # number of consecutive failed captures
        before = recovered.done.below(rows.limit)
        before += sum(rows.limit is None or position < rows.limit for position in recovered.found)
        beyond = len(recovered.done) + len(recovered.found) - before
        self.outcome = Outcome(Counts(done=before, before=before), beyond=beyond)
        self._next_look = 0.0

    def stop(self, why: str) -> None:
        """Submit no more prompts, and finish those in flight. why: see `Outcome.stopped`."""
        self.outcome.stopped = self.outcome.stopped or why

    def go(self) -> Outcome:
        """Capture all rows, or until something stops the run (`Outcome.stopped`). Raises OSError."""
        rows = iter(self._rows)
        more, cut = True, False
        while more or self._flights or self._again or self._orphans:
            if self.outcome.stopped or not self._engines.alive():
                cut |= more or bool(self._again)
                more = False
                self._again.clear()  # the next start of the run captures these
            handed = False
            if more or self._again:
                more, handed = self._hand_out(rows, more)
            for event in self._engines.events(0.0 if handed else _WAIT_S):
                if isinstance(event, Death):
                    self._on_death(event)
                else:
                    self._on_answer(event)
            self._look_at_stores()
            self._settle_orphans()
            self._manifest.flush(now=False)
            self._show()
        self._engines.finish()
        self._manifest.flush()
        self._clear_condemned()
        self._show(force=True)
        if self.outcome.stopped == "signal" and not (cut or self.outcome.lost or self.outcome.counts.failed):
            self.outcome.stopped = None  # the last prompts were in flight already
        return self.outcome

    # ---- prompts out ------------------------------------------------------------------------------------------------

    def _hand_out(self, rows: Iterator[Placed], more: bool) -> tuple[bool, bool]:
        """Submit prompts while engines have room. Returns (rows may be left, the caller polls without waiting)."""
        self.outcome.counts.waiting = ""
        for passed in range(_ROWS_PER_TURN):
            if not self._again:
                if not more or (placed := next(rows, None)) is None:
                    return False, passed > 0
                flight = self._take(placed)
                if flight is None:
                    continue
                self._again.append(flight)
            self._engines.start()
            if self._engines.room() <= 0 or not self._has_space():
                return more, False
            self._submit(self._again.pop())
        return more, True

    def _has_space(self) -> bool:
        """Whether the disk budget has room for one more prompt. With `end_when_full`, a full budget stops the run."""
        in_flight = len(self._flights) + sum(len(flights) for _, flights in self._orphans)
        if self._budget.allows(in_flight):
            return True
        if not in_flight:
            if self._end_when_full and self._budget.is_full():
                self.stop("max_bytes")
            failure = self._tail.upload_failure
            why = "" if failure is None else f", and uploads fail: {failure}"
            self.outcome.counts.waiting = f"the disk budget is used up{why}"
        return False

    def _take(self, placed: Placed) -> Flight | None:
        """Parse the prompt of a row. Returns None if the row needs no capture."""
        if placed.position in self._recovered.done:
            return None
        found = self._recovered.found.pop(placed.position, None)
        row: object = None
        try:
            row = self._rows.load(placed.raw)
            if row is None:
                return None
            prompt = Prompt.of(row, self._columns, self._chat)
        except BadRow as error:
            self._reject(placed, _id_of(row, self._columns), str(error))
            return None
        if found is not None:
            self._manifest.add(self._found_entry(placed, prompt, found))
            return None
        return Flight(placed, prompt)

    def _submit(self, flight: Flight) -> None:
        position = flight.placed.position
        self._flights[position] = flight
        self._engines.submit(position, store_key(self._run, position), flight.prompt.to_json())

    def _reject(self, placed: Placed, name: str | None, reason: str, failed: bool = False) -> None:
        """Record a row without a store. name: its id. failed: the prompt is valid, and the next start retries it."""
        entry: dict[str, Any] = {"row": placed.number}
        if self._line_offset is not None:
            entry["line"] = placed.number + self._line_offset
        entry |= {"id": name, "kind": "failed" if failed else "rejected", "reason": reason}
        try:
            print(json.dumps(entry), file=self._rejects, flush=True)
        except OSError as error:
            with contextlib.suppress(OSError):  # close() fails too, and a later close() would hide the first error
                self._rejects.close()
            raise cannot_write(Path(self._rejects.name), error) from error
        if failed:
            self.outcome.counts.failed += 1
        else:
            self.outcome.counts.rejected += 1

    # ---- answers in -------------------------------------------------------------------------------------------------

    def _on_answer(self, answer: Answer) -> None:
        flight = self._flights[answer.position]
        if answer.refused is not None or answer.error is not None:
            del self._flights[answer.position]
            reason = answer.refused or answer.error or ""
            self._reject(flight.placed, flight.prompt.id, reason, failed=answer.refused is None)
            return
        flight.answer, flight.answered_at = answer, time.monotonic()
        self._settle(flight)

    def _on_death(self, death: Death) -> None:
        self.outcome.deaths.append(death)
        had = [flight for position in death.positions if (flight := self._flights.pop(position, None))]
        event = {"event": "engine_ended", "engine": death.name, "why": death.how, "left": len(had)}
        text = f"dmi: {death.name} ended early: {death.how}. {len(had)} prompts are left to the next start of this run"
        if death.life is None:
            self.outcome.lost += len(had)
        else:
            unfinished = [f for f in self._flights.values() if f.answer is not None and f.answer.engine == death.name]
            for flight in unfinished:
                del self._flights[flight.placed.position]
            had += unfinished
            self._orphans.append((death, had))
            event |= {"left": 0, "again": len(had)}
            text = f"dmi: {death.name} ended early: {death.how}. {len(had)} prompts go to other engines"
        if not death.began:
            text = f"dmi: {death.name} did not start: {death.how}"
        self._progress.say(event, text)
        if not self._engines.alive():
            self.stop("engines")

    # ---- stores -----------------------------------------------------------------------------------------------------

    def _settle_orphans(self) -> None:
        """For dead engines whose writers have exited: keep complete stores, and submit the other prompts again."""
        if self._orphans and (self.outcome.stopped or not self._engines.alive()):
            self.outcome.lost += sum(len(flights) for _, flights in self._orphans)
            self._orphans.clear()
        elif self._orphans:
            self.outcome.counts.waiting = ""  # set below if writers are still running
        for orphans in list(self._orphans):
            death, flights = orphans
            assert death.life is not None
            with lock_alone(death.life) as alone:
                if not alone:
                    self.outcome.counts.waiting = f"writers of {death.name} finish their stores"
                    continue
            self._orphans.remove(orphans)
            kept = settle_left(self._out, self._run, [flight.placed.position for flight in flights])
            self._read_index()  # so that lines of these stores are not mistaken for lines of the next try
            for flight in flights:
                store = kept.get(flight.placed.position)
                if store is None:
                    self._again.append(flight.anew())
                else:
                    self._count(self._found_entry(flight.placed, flight.prompt, store))

    def _look_at_stores(self) -> None:
        gone = not self._engines.alive() and self._writers_gone()
        self._read_index()
        if gone or time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _QUIET_S
            self._look_at_paths(gone)

    def _read_index(self) -> None:
        for info in self._tail.read():
            position = position_of(self._run, info.key or "")
            flight = None if position is None else self._flights.get(position)
            if flight is not None:
                flight.captured = info
                self._settle(flight)

    def _look_at_paths(self, gone: bool) -> None:
        """Look for stores without a line in the index. The line is missing if the disk was full, for example."""
        for flight in list(self._flights.values()):
            if flight.answer is None or not (gone or time.monotonic() - flight.answered_at > _QUIET_S):
                continue
            path = self._path(flight.answer)
            if path is not None and (path / "zarr.json").exists():
                flight.captured = info_of(path)
                self._settle(flight)
            elif gone:
                del self._flights[flight.placed.position]
                self.outcome.lost += 1
            elif why := why_abandoned(path, time.monotonic() - flight.answered_at):
                if flight.abandoned:  # on the second check: a rename may fall between the two checks above
                    key = store_key(self._run, flight.placed.position)
                    flight.captured = failed(path or self._out / f"{key}.zarr", why)
                    self._settle(flight)
                flight.abandoned = True

    def _path(self, answer: Answer) -> Path | None:
        """The final path of the store of an answer, even if the store is unfinished; None if no store exists."""
        if answer.store is not None:
            return Path(answer.store)
        key = store_key(self._run, answer.position)
        found = next(self._out.glob(f"{key}--*.zarr"), None) or next(self._out.glob(f"{key}--*.zarr.partial"), None)
        return found and found.with_name(found.name.removesuffix(".partial"))

    def _settle(self, flight: Flight) -> None:
        """If a prompt has its answer and its capture has ended, record the prompt or try it again."""
        info, answer = flight.captured, flight.answer
        if info is None or answer is None:
            return
        if answer.store is not None and Path(answer.store).name != info.store.name:
            flight.captured = None  # the line is about the store of an earlier try
            return
        position = flight.placed.position
        del self._flights[position]
        self._failures = self._failures + 1 if info.state == "failed" else 0
        if self._failures == _MOST_FAILURES:
            self._progress.say(
                {"event": "captures_fail", "count": self._failures, "why": info.reason},
                f"dmi: {self._failures} captures in a row failed, the last one because: {info.reason}",
            )
            self.stop("captures")
        if info.state == "complete" and answer.finish_reason in OWN_ENDS:
            nbytes = info.bytes or 0
            tokens = answer.prompt_tokens, answer.generated_tokens
            finish = answer.finish_reason if self._generates else None
            self._count(self._entry(flight.placed, flight.prompt, info.store.name, tokens, finish, nbytes))
            return
        if info.state in ("complete", "incomplete"):
            self._condemned.append(self._out / info.store.name)
            self._clear_condemned()
        if flight.tries < _TRIES and not self.outcome.stopped and self._engines.alive():
            self._again.append(flight.anew(flight.tries + 1))
        else:
            reason = f"its capture is {info.state} ({info.reason}), its request ended with {answer.finish_reason}"
            self._reject(flight.placed, flight.prompt.id, reason, failed=True)

    def _count(self, entry: Mapping[str, Any]) -> None:
        """Record a prompt with a complete store. entry: its line in the manifest."""
        self._manifest.add(entry)
        self._budget.stored(entry["bytes"])
        self.outcome.counts.done += 1
        self.outcome.counts.tokens += entry["prompt_tokens"] + entry["generated_tokens"]
        self.outcome.counts.bytes += entry["bytes"]

    def _clear_condemned(self) -> None:
        """Remove incomplete stores. A store in use is left for the next call, or for the next start of the run."""
        self._condemned = [path for path in self._condemned if not remove_store(path)]

    # ---- lines ------------------------------------------------------------------------------------------------------

    def _entry(
        self, placed: Placed, prompt: Prompt, store: str, tokens: tuple[int, int], finish: str | None, nbytes: int
    ) -> dict[str, Any]:
        return {
            "row": placed.number,
            "id": prompt.id,
            "key": store_key(self._run, placed.position),
            "store": store,
            "prompt_tokens": tokens[0],
            "generated_tokens": tokens[1],
            "finish_reason": finish,
            "bytes": nbytes,
        }

    def _found_entry(self, placed: Placed, prompt: Prompt, store: Place) -> dict[str, Any]:
        """The line of the manifest for a complete store whose engine or run was killed before the line was written."""
        attrs = read_attrs(store)
        generates = attrs["include_output_tokens"]
        generated = attrs["num_tokens"] - attrs["prompt_len"] + 1 if generates else 0
        finish = attrs["finish_reason"] if generates else None
        return self._entry(
            placed, prompt, store.name, (attrs["prompt_len"], generated), finish, schema.listed_bytes(attrs)
        )

    def _show(self, force: bool = False) -> None:
        if not self.outcome.began:
            return  # counts would hide why no engine started
        counts = self.outcome.counts
        counts.total, counts.estimated = self._rows.total(), self._rows.estimates()
        if counts.total is not None and counts.estimated:
            counts.total = max(counts.total, counts.done + counts.rejected + counts.failed)
        counts.starting = tuple(str(log) for log in self._engines.starting())
        counts.engine = sum(flight.answer is None for flight in self._flights.values())
        counts.backlog = len(self._flights) - counts.engine
        self._progress.show(counts, force)


def _id_of(row: object, columns: Columns) -> str | None:
    """The id of a row that may lack a valid prompt; None without an id."""
    name = row.get(columns.id) if isinstance(row, dict) else None
    return name if isinstance(name, str) else None if name is None else str(name)[:200]
