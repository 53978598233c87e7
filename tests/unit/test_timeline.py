# SPDX-License-Identifier: Apache-2.0
"""What is made of the operations of a GPU."""

from __future__ import annotations

from benchmarks.timeline import Event, summarise


def test_kernels_that_overlap_count_once_and_copies_apart() -> None:
    events = [
        Event("Memcpy DtoH", 0, 5000),
        Event("gemm", 1500, 1000),  # not in order
        Event("write_rows_kernel", 1000, 700),
        Event("norm", 3000, 500),
        Event("inside", 3100, 100),
        Event("write_rows_kernel", 4000, 1000),
    ]
    assert summarise(events) == {
        "kernels": 5,
        "window_ms": 4.0,
        "busy_ms": 3.0,
        "copies_ms": 5.0,
        "ours_ms": {"write_rows_kernel": 1.7},
        "others_ms": {"gemm": 1.0, "norm": 0.5, "inside": 0.1},
    }


def test_nothing_is_recorded_where_nothing_ran() -> None:
    assert summarise([])["window_ms"] == 0
