# SPDX-License-Identifier: Apache-2.0
"""What is made of the operations of a GPU."""

from __future__ import annotations

from benchmarks.timeline import Event, summarise


def test_overlapping_kernels_count_once_and_copies_count_separately() -> None:
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
        "gaps": {"longer": [2, 1.0]},
        "ours": {"write_rows_kernel": [2, 1.7]},
        "others": {"gemm": [1, 1.0], "norm": [1, 0.5], "inside": [1, 0.1]},
    }


def test_gaps_are_counted_by_length() -> None:
    found = summarise([Event("a" * 100, 0, 1), Event("b", 2.5, 1), Event("b", 5.5, 4.5), Event("c", 14, 1)])
    assert found["gaps"] == {"under 2 us": [1, 0.002], "2 to 10 us": [2, 0.006]}
    assert list(found["others"]) == ["b", "a" * 80, "c"], "the longest first, names cut"


def test_a_timeline_without_events_has_a_window_of_0_ms() -> None:
    assert summarise([])["window_ms"] == 0
