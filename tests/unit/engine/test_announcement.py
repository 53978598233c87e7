# SPDX-License-Identifier: Apache-2.0
"""The log lines at the start: the costs of a selection, and its bottleneck for made-up speeds, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.sizing import BufferSizes
from dmi_connector.engine.transfer import announcement
from dmi_connector.engine.transfer.announcement import announce
from dmi_connector.settings import ServerOptions
from tests.exporterkit import make_exporter

TOKEN = 4 * 4096 + 8
"""Exported bytes per token: q in four layers of 1,024 float32 values, token id and position."""
FIRST = (
    "dmi_connector: 4 hooks of Qwen3ForCausalLM, target rows: 0.016 MB per token in the cache (64 tokens fit), 0.016 MB"
    " per token exported"
)
BUFFERS = (
    f"dmi_connector: host buffer 3 MiB = {(3 << 20) // TOKEN} tokens, staging 5 MiB = {(5 << 20) // TOKEN} tokens,"
    " policy drop"
)


def said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: float | None = None,
    writers: int = 0,
    patterns: int = 0,
    tp: int = 1,
    **options: Any,
) -> list[str]:
    """The logged lines. link: bytes per second of a lane, or None. patterns: layers with attention summaries."""
    exporter = make_exporter(tmp_path, 64, sink="null")
    given = {"store_dir": str(tmp_path), "hooks": "q", "codec": "zstd", "policy": "drop", **options}
    context = replace(exporter.context, options=ServerOptions.parse(given), tp=tp)
    if patterns:
        selection = SimpleNamespace(hooks={"q": (0, 1, 2, 3), "pattern": tuple(range(patterns))})
        context = replace(context, selection=selection)  # type: ignore[arg-type]
    lane: Any = None if link is None else SimpleNamespace(link_bytes_per_second=lambda: link)
    [full], lines = exporter.layouts.values(), list[str]()
    assert full.payload.token_bytes == TOKEN
    monkeypatch.setattr(announcement.logger, "info", lambda text, *values: lines.append(text % values))
    announce(context, full, exporter.rows, BufferSizes(3 << 20, 0, 5 << 20), lane, writers, "cache")
    exporter.ring.close()
    return lines


def bound(name: str, gb: float, every: str) -> str:
    tokens = f"{gb * 1e9 / TOKEN:.0f}"
    return f"dmi_connector: full capture is bound by {name} at about {gb} GB/s = {tokens} tokens/s (all: {every})"


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, None),
        ({"link": 5e9}, ("link", 5.0, "link 5.0 GB/s")),
        ({"writers": 2, "codec": "none"}, ("2 writers, codec none", 3.2, "2 writers, codec none 3.2 GB/s")),
        ({"writers": 2, "always_compress": True}, ("2 writers, codec zstd", 0.8, "2 writers, codec zstd 0.8 GB/s")),
        ({"writers": 2, "fsync": True}, ("2 writers, codec zstd", 0.8, "2 writers, codec zstd 0.8 GB/s")),
        (
            {"writers": 9, "codec": "none", "link": 5e9},
            ("link", 5.0, "link 5.0 GB/s, 9 writers, codec none 14.4 GB/s"),
        ),
    ],
)
def test_the_slowest_part_binds(given: Any, limit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that must compress, also those with fsync, are as fast as their codec."""
    lines = said(tmp_path, monkeypatch, **given)
    assert lines == [FIRST, BUFFERS, *([] if limit is None else [bound(*limit)])]


@pytest.mark.parametrize(("link", "name", "gb"), [(1e9, "link", 1.0), (7e9, "4 writers, uncompressed", 5.6)])
def test_writers_that_may_leave_chunks_uncompressed_have_two_speeds(
    link: float, name: str, gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, buffers, compress, last = said(tmp_path, monkeypatch, link=link, writers=4)
    assert (first, buffers) == (FIRST, BUFFERS)
    assert compress.startswith(
        f"dmi_connector: 4 writers compress with zstd up to about 1.6 GB/s = {1.6e9 / TOKEN:.0f} tokens/s; above that"
    )
    assert last == bound(name, gb, f"link {link / 1e9:.1f} GB/s, 4 writers, uncompressed 5.6 GB/s")


def test_without_stores_nothing_is_said_of_buffers_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(tmp_path, monkeypatch, sink="null", link=1e9, writers=4) == [FIRST]


@pytest.mark.parametrize(("tp", "flop"), [(1, "6.1"), (2, "3.1")])
def test_the_cost_of_attention_summaries_is_that_of_a_rank(
    tp: int, flop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost is two operations per value, for three layers, 16 heads of 64 and 1,000 keys."""
    first, summaries = said(tmp_path, monkeypatch, sink="null", patterns=3, tp=tp)
    assert first == FIRST.replace("4 hooks", "7 hooks")
    assert summaries == (
        f"dmi_connector: attention summaries of 3 layers read all keys twice: {flop} MFLOP for each token and 1,000"
        " tokens of its context"
    )
