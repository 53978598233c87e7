# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sustained load: its counts, and a short run on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report, summary, sustained
from benchmarks.loads import LOADS, Client, Load, growth, latency_ms, lengths, prompts
from dmi_connector.request_options import CaptureParams

pytestmark = pytest.mark.soak  # only benchmark code, which users do not run

ROOT = Path(__file__).parents[2]
SETUPS = "stock,hidden-states zstd:two"


class Engine:
    """A fake engine that gives each request one token per step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most = 0
        self.ends: list[int] = []
        self.steps = 0
        self.sent: list[Any] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.left[name] = params.max_tokens
        self.sent.append(params)
        self.most = max(self.most, len(self.left))

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.steps += 1
        outputs = []
        for name in [*self.left]:
            self.left[name] -= 1
            over = not self.left[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])], finished=over))
            if over:
                del self.left[name]
                self.ends.append(self.steps)
        return outputs


def test_a_client_keeps_requests_in_flight_that_end_one_by_one() -> None:
    engine, load = Engine(), Load(8, 5, 40)
    client = Client(engine, load, 512, True, 1)
    assert len(engine.left) == 8 and len(set(engine.left.values())) == 8
    seconds: list[int] = []
    client.run(0.2, lambda: seconds.append(len(engine.left)))
    assert seconds and engine.most == 8
    assert client.tokens == engine.steps * 8
    assert client.requests == len(engine.ends)
    assert len(client.first_s) + len(client.between_s) == client.tokens
    assert max(engine.ends.count(step) for step in engine.ends[8:]) == 1, "two requests must not end in the same step"
    client.finish()
    assert not engine.left


def test_requests_end_at_random_with_spread() -> None:
    load = Load(8, 5, 40, spread=10)
    drawn = list(islice(lengths(load, 3), 2008))
    assert len(set(drawn[:8])) == 8 and max(drawn[:8]) == 40
    assert set(drawn[8:]) == set(range(30, 51)), "both ends belong to the range"
    assert list(islice(lengths(load, 3), 2008)) == drawn, "all engines get the same lengths"
    assert load.rows == 5 + 50 - 1 and load.shrunk(2) == Load(4, 2, 20, spread=5)
    assert set(list(islice(lengths(load._replace(spread=0), 3), 20))[8:]) == {40}


@pytest.mark.parametrize(
    ("load", "captures"), [(Load(1, 5, 4), True), (Load(1, 5, 4, captured=False), True), (Load(1, 5, 4), False)]
)
def test_an_engine_is_told_which_requests_to_capture(load: Load, captures: bool) -> None:
    """Requests to an engine that captures have options, which say whether the request is captured."""
    engine = Engine()
    Client(engine, load, 512, captures, 1)
    params = (engine.sent[0].extra_args or {}).get("kv_transfer_params")
    assert (params is None) == (not captures)
    if params is not None:
        assert CaptureParams.parse(params).enabled == load.captured


def test_prompts_share_their_first_tokens_and_no_others() -> None:
    drawn = prompts(Load(1, 30, 5, shared=20), 512, 3)
    one, other = next(drawn), next(drawn)
    assert len(one) == len(other) == 30
    assert one[:20] == other[:20] and one[20:] != other[20:]


def test_growth_is_the_slope_and_latency_its_percentiles() -> None:
    assert growth([(t, 5.0 + 3 * t) for t in range(10)]) == pytest.approx(3)
    assert growth([(0.0, 1.0)]) == 0
    assert latency_ms([n / 1000 for n in range(101)]) == {"p50": 50.0, "p99": 99.0}
    assert latency_ms([]) == {}


def test_a_consumer_keeps_each_sixteenth_store(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    for n in range(33):
        (stores / f"{n:02}.zarr").mkdir(parents=True)
        (stores / f"{n:02}.zarr" / "zarr.json").write_text('{"attributes": {"dmi": {}}}')
    (stores / "50.zarr.partial").mkdir()
    command = [sys.executable, "-m", "benchmarks.loads", str(stores), str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, check=True, timeout=600)
    assert json.loads(done.stdout) == {"stores": 33, "kept": 2, "vanished": 0}
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["15.zarr", "31.zarr"]
    assert [path.name for path in stores.iterdir()] == ["50.zarr.partial"]


def test_a_speed_at_which_files_fall_behind_is_not_called_sustained() -> None:
    run = {"tok_per_s": 100.0, "first_token_ms": {"p50": 2.0}, "between_tokens_ms": {"p99": 3.0}, "keeps_up": True}
    late = {**run, "tok_per_s": 90.0, "keeps_up": False, "sustained_tok_per_s": 45.0, "exported_GB_per_s": 2.0}
    stores = {"stores": 5, "verified": False}
    engines = {"stock": {"loads": {"short64": [run]}}, "full none": {"loads": {"short64": [{**late, **stores}]}}}
    text = report.busy_table({"engines": engines})
    assert (
        "| short64 | full none | 90 (0.900) | 2.0 (1.000) | 3.0 (1.000) | 2.00 | no: 45 tok/s | 5, NOT VERIFIED |"
        in text
    )
    assert not sustained.sound({"engines": engines})
    gone = {"stores": 5, "verified": True, "vanished": 1}
    assert sustained.sound({"engines": {"full none": {"loads": {"short64": [{**run, **gone, "vanished": 0}]}}}})
    assert not sustained.sound({"engines": {"full none": {"loads": {"short64": [{**run, **gone}]}}}})
    flow = sustained.flow([(t, {"exported": 10.0 * t, "waiting": 5.0 * t}) for t in range(9)], 90)
    assert (flow["keeps_up"], flow["sustained_tok_per_s"]) == (False, 45.0)


def busy(tok_per_s: float, p99: float) -> dict[str, Any]:
    latencies = {"first_token_ms": {"p50": 2.0}, "between_tokens_ms": {"p50": 1.0, "p99": p99}}
    return {"tok_per_s": tok_per_s, **latencies}


def test_rounds_of_several_machines_are_one_table() -> None:
    def file(stock: float, mine: list[float]) -> dict[str, Any]:
        loads = {"stock": [stock] * 2, "full null": mine}
        runs = {name: [busy(speed, speed / 10) for speed in speeds] for name, speeds in loads.items()}
        return {"engines": {name: {"loads": {"short64": found}} for name, found in runs.items()}}

    text = report.busy_rounds([summary.summarise(one) for one in (file(100.0, [90.0, 80.0]), file(200.0, [194.0]))])
    assert text.splitlines()[2:] == ["| short64 | full null | 0.90, 0.80; 0.97 | 0.900 | 1.00 | 0.90 |"]


def test_a_ratio_of_slices_is_shown_with_its_interval() -> None:
    sliced = {**busy(91.0, 10.0), "of_stock": {"ratio": 0.9504, "low": 0.9411, "high": 0.9602, "seconds": 60}}
    runs = {"stock": [busy(100.0, 10.0)], "full null": [sliced]}
    file = {"engines": {name: {"loads": {"short64": found}} for name, found in runs.items()}}
    text = report.busy_rounds([summary.summarise(file)])
    assert text.splitlines()[2:] == ["| short64 | full null | 0.950 (0.941 to 0.960) | 0.910 | 1.00 | 1.00 |"]


def test_a_run_on_a_cpu_measures_and_verifies(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["--model", str(tiny_model("qwen3")), "--out", str(out), "--store-dir", str(tmp_path / "stores")]
    argv += ["--setups", SETUPS, "--loads", "cached64", "--shrink", "16", "--seconds", "3", "--warm", "1"]
    argv += ["--dtype", "float32", "--engine-args", '{"enforce_eager": true}', "--options", '{"chunk_tokens": 32}']
    argv += ["--options-of", '{"hidden-states zstd:two": {"writers": 2}}']
    command = [sys.executable, "-m", "benchmarks.sustained", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    engines = json.loads(out.read_text())["engines"]
    assert list(engines) == SETUPS.split(",")
    load = LOADS["cached64"].shrunk(16)
    for name, engine in engines.items():
        (found,) = engine["loads"]["cached64"]
        assert (found["in_flight"], found["prompt_tokens"], found["shared"]) == (load.in_flight, load.prompt_tokens, 80)
        assert found["tok_per_s"] > 0 and found["between_tokens_ms"]["p99"] >= found["between_tokens_ms"]["p50"] > 0
        assert ("stores" in found) == (name != "stock")
    assert found["verified"] is True and found["lost_rows"] == 0
    assert found["stores"] >= found["requests"] > 0 and found["kept"] == found["stores"] // 16
    assert engines[name]["bytes_per_token"] and not os.listdir(tmp_path / "stores")
    assert "| cached64 | hidden-states zstd:two |" in done.stdout
