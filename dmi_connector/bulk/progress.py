# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run: a bar on a terminal, or one JSON object per line for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from dmi_connector.wording import format_bytes, terminal_columns

_SPAN_S = 30.0
"""Speeds are means over this time. Without a terminal, a line of text appears this often."""
_INTERVAL_S = 1.0
_BAR, _LEAST_BAR = 20, 5
"""Maximum and minimum width of the bar in characters. If there is less room, no bar is shown."""


@dataclass
class Counts:
    """The progress of a run.

    total: number of input rows of this run (all, or those of `--shard`), None while it is unknown. estimated: `total`
    is an estimate, because the input file has not been read to its end. done: prompts with a store. before: prompts
    that had a store when this process started. rejected: rows without a valid prompt. failed: prompts that could not be
    captured. tokens: prompt and generated tokens of the prompts captured by this process. bytes: size of their stores.
    engine: unanswered prompts in the engines. backlog: answered prompts whose stores are not finished. waiting: why no
    prompts are submitted, "" if they are. starting: paths of the engines' logs; empty once one engine is ready.
    """

    total: int | None = None
    done: int = 0
    before: int = 0
    rejected: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    engine: int = 0
    backlog: int = 0
    waiting: str = ""
    estimated: bool = False
    starting: tuple[str, ...] = ()


@dataclass(frozen=True)
class Speed:
    """Mean speeds over the last _SPAN_S seconds. seconds_left: estimated time to the end, None if it is unknown."""

    tokens_per_s: float
    bytes_per_s: float
    seconds_left: float | None


class Speedometer:
    """Measures speeds from counts. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, int, int]] = deque()

    def look(self, counts: Counts) -> Speed:
        """Add the current counts, and return the speeds."""
        passed = counts.done - counts.before + counts.rejected + counts.failed
        now = self._clock()
        self._samples.append((now, counts.tokens, counts.bytes, passed))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SPAN_S:
            self._samples.popleft()
        then, tokens, nbytes, before = self._samples[0]
        seconds = max(now - then, 1e-9)
        left = None
        if counts.total is not None and passed > before:
            rest = max(0, counts.total - counts.done - counts.rejected - counts.failed)
            left = rest * seconds / (passed - before)
        return Speed((counts.tokens - tokens) / seconds, (counts.bytes - nbytes) / seconds, left)


class Progress:
    """Shows the counts and the events of a run.

    as_json: print JSON objects on standard output, one per line, with the counts once a second. If it is false, text is
    printed on standard error: on a terminal a bar that changes once a second, elsewhere a line every 30 seconds. out:
    another file to print to.
    """

    def __init__(self, as_json: bool, out: TextIO | None = None) -> None:
        self._json = as_json
        self._out = out or (sys.stdout if as_json else sys.stderr)
        self._meter, self._due = Speedometer(), 0.0
        self._bar: Any = None

    def show(self, counts: Counts, force: bool = False) -> None:
        """Show counts if the interval since the last ones has passed. force: show them in any case."""
        if time.monotonic() < self._due and not force:
            return
        speed = self._meter.look(counts)
        terminal = self._out.isatty()
        self._due = time.monotonic() + (_INTERVAL_S if terminal or self._json else _SPAN_S)
        if self._json:
            self.say({"event": "progress", **asdict(counts), **_rounded(asdict(speed))})
        elif terminal:
            self._show_bar(counts, speed)
        else:
            print(_line(counts, speed), file=self._out, flush=True)

    def say(self, event: dict[str, Any], text: str = "") -> None:
        """Print `event` if `as_json`, otherwise `text`. An empty text is not printed."""
        if self._json:
            print(json.dumps(event), file=self._out, flush=True)
        elif text:
            if self._bar is not None:
                self._bar.clear()
            print(text, file=self._out, flush=True)

    def _show_bar(self, counts: Counts, speed: Speed) -> None:
        columns = terminal_columns(self._out) - 1  # a full line would wrap
        text = _line(counts, speed, columns - len("100% "))
        bar = min(_BAR, columns - len("100% || ") - len(text))
        layout = f"{{percentage:3.0f}}% |{{bar:{bar}}}| {{desc}}" if bar >= _LEAST_BAR else "{percentage:3.0f}% {desc}"
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=1, bar_format=layout, file=self._out, ncols=columns)
        self._bar.ncols, self._bar.bar_format = columns, layout  # the size of the window may have changed
        self._bar.total = max(1, counts.total or 1)
        self._bar.n = min(self._bar.total, counts.done + counts.rejected + counts.failed)
        self._bar.set_description_str(text)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def _rounded(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 1) for name, value in values.items()}


def _line(counts: Counts, speed: Speed, room: int | None = None) -> str:
    """Counts and speeds as text.

    room: number of characters that the text should fit in, None for no limit. Bytes per second are left out first, then
    tokens per second, then the number of stored prompts. While engines start, nothing is left out.
    """
    left = "?" if speed.seconds_left is None else duration(speed.seconds_left)
    total = "?" if counts.total is None else f"about {counts.total}" if counts.estimated else str(counts.total)
    stored = f"{counts.done}/{total} stored"
    if counts.starting:
        return _starting(counts.starting) if not counts.done else f"{stored}, {_starting(counts.starting)}"
    speeds = [f"{speed.tokens_per_s:.0f} tokens/s", f"{format_bytes(round(speed.bytes_per_s))}/s"]
    parts = [f"backlog {counts.backlog}", f"{left} left"]
    needed = len(", ".join([stored, *parts]))
    parts += [f"{counts.rejected} bad rows"] if counts.rejected else []
    parts += [f"{counts.failed} failed"] if counts.failed else []
    parts += [f"waiting: {counts.waiting}"] if counts.waiting else []
    first = [stored, *speeds]
    if room is not None:
        while len(first) > 1 and len(", ".join([*first, *parts])) > room:
            first.pop()
        first = first if needed <= room else []
    return ", ".join([*first, *parts])


def _starting(logs: Sequence[str]) -> str:
    if len(logs) > 1:
        return f"starting {len(logs)} engines (first log: {logs[0]})"
    return f"starting the engine (its log: {logs[0]})"


def duration(seconds: float) -> str:
    """Seconds as text, such as "1:02:03" or "2:03"."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
