# SPDX-License-Identifier: Apache-2.0
"""Default sizes on machines with GPUs, where ranks and engines share cores and memory."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dmi_connector.engine import sizing
from dmi_connector.engine.scheduler.quota import UNLIMITED
from dmi_connector.engine.transfer.chunk_layout import sent_bytes
from dmi_connector.option_values import OptionError
from dmi_connector.settings import ServerOptions
from tests.exporterkit import SMALL, make_exporter

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """machine(gpus, cores): set the number of GPUs and cores."""

    def set_up(gpus: int, cores: int) -> None:
        for number in range(gpus):
            (tmp_path / f"nvidia{number}").touch()
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(sizing, "_DEVICES", str(tmp_path / "nvidia[0-9]*"))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))

    return set_up


def defaults(token_bytes: list[int]) -> tuple[list[int], list[float]]:
    """(number of writers, host buffer as a share of the memory) of each rank of an engine."""
    shares = [sizing.gpu_share(token_bytes, rank) for rank in range(len(token_bytes))]
    options = ServerOptions(store_dir="captures")
    hosts = [sizing.buffer_sizes(options, 1000, True, share=share).host / MEMORY for share in shares]
    return [sizing.default_writers(True, share) for share in shares], hosts


@pytest.mark.parametrize(
    ("gpus", "cores", "token_bytes", "writers", "hosts"),
    [
        (1, 16, [100], [16], [1 / 8]),
        (8, 128, [100], [16], [1 / 32]),
        (8, 128, [100] * 8, [16] * 8, [1 / 32] * 8),
        (2, 32, [97, 3], [31, 1], [1 / 8, 0.03 / 4]),
        (8, 128, [97, 1, 1, 1], [62, 1, 1, 1], [0.97 / 8, 0.01 / 8, 0.01 / 8, 0.01 / 8]),
        (8, 256, [93, *[1] * 7], [64, *[3] * 7], [1 / 8, *[0.01 / 4] * 7]),
        (1, 1, [50, 50], [1, 1], [1 / 8, 1 / 8]),
        (0, 16, [100], [16], [1 / 8]),
        (8, 128, [0, 0], [1, 1], [0.0, 0.0]),
    ],
)
def test_each_gpu_has_an_equal_part_which_ranks_share_by_their_bytes(
    machine: object, gpus: int, cores: int, token_bytes: list[int], writers: list[int], hosts: list[float]
) -> None:
    machine(gpus, cores)  # type: ignore[operator]
    found = defaults(token_bytes)
    assert found[0] == writers
    least = sizing.buffer_sizes(ServerOptions(store_dir="captures"), 1000, True).least_host / MEMORY
    assert found[1] == pytest.approx([max(host, least) for host in hosts])


def test_options_override_defaults(machine: object) -> None:
    machine(8, 128)  # type: ignore[operator]
    options = ServerOptions(store_dir="captures", host_buffer_bytes=1 << 30)
    assert sizing.buffer_sizes(options, 1000, True, share=1 / 8).host == 1 << 30


@pytest.mark.parametrize("option", ["host_buffer_bytes", "staging_bytes"])
def test_the_scheduler_accepts_the_minimum_sizes_in_the_workers_errors(tmp_path: Path, option: str) -> None:
    """Scheduler and worker compute with the bytes that are sent, which are fewer than the bytes of a row in the
    cache.
    """
    exporter = make_exporter(tmp_path, 8, SMALL, hooks="q,resid_pre")
    exporter.shutdown()
    options, token_bytes = exporter.context.options, sent_bytes(exporter.context)
    with pytest.raises(OptionError, match=rf"{option}: 1 holds less than .*; give at least \d+") as refused:
        sizing.buffer_sizes(replace(options, **{option: 1}), token_bytes[0], True)
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    rows = sizing.keep_rows(replace(options, **{option: least}), token_bytes, True)
    assert rows == (least if option == "staging_bytes" else sizing.GPU_STAGING_BYTES) // token_bytes[0] // 2
    with pytest.raises(OptionError, match=f"give at least {least}"):
        sizing.keep_rows(replace(options, **{option: least - 1}), token_bytes, True)


def test_a_host_buffer_that_is_too_small_for_logits_alone_says_so() -> None:
    options = ServerOptions(store_dir="captures", host_buffer_bytes=4 << 20)
    assert sizing.buffer_sizes(options, 1000, False).least_host < 4 << 20
    with pytest.raises(OptionError, match=r"two chunks of this selection and the logits of two steps;.*max_num_seqs$"):
        sizing.buffer_sizes(options, 1000, False, step_bytes=4 << 20)


def test_the_rank_with_the_longest_rows_fills_its_staging_memory_first() -> None:
    options = ServerOptions(store_dir="captures", staging_bytes=1 << 24)
    assert sizing.keep_rows(options, [100, 4000, 8], True) == (1 << 24) // 4000 // 2
    assert sizing.keep_rows(options, [100], False) == UNLIMITED
    assert sizing.keep_rows(replace(options, sink="null"), [100], True) == UNLIMITED
