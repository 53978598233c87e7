# SPDX-License-Identifier: Apache-2.0
"""The benchmark of data-parallel servers: its clients, and its table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks import common, data_parallel, report, summary
from benchmarks.loads import Load

pytestmark = pytest.mark.soak


class Answers(BaseHTTPRequestHandler):
    """A fake server that answers each request for tokens after a delay, and counts the requests."""

    lock = threading.Lock()
    now = most = 0
    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Answers.lock:
            Answers.now += 1
            Answers.most = max(Answers.most, Answers.now)
            Answers.asked.append(body)
        time.sleep(0.02)
        with Answers.lock:
            Answers.now -= 1
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_client_keeps_requests_in_flight_until_its_input_ends() -> None:
    load = Load(4, 5, 40)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        command = [sys.executable, "-m", data_parallel.MODULE, "--client", url, "--load", json.dumps(load._asdict())]
        command += ["--vocab", "512"]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT)
        while len(Answers.asked) < 20 and client.poll() is None:
            time.sleep(0.01)
        text, _ = client.communicate(timeout=300)
        server.shutdown()
        thread.join()
    assert client.returncode == 0
    assert json.loads(text) == {"answered": len(Answers.asked)} and Answers.most == 4
    assert all(len(body["prompt"]) == 5 for body in Answers.asked)
    counts = [body["max_tokens"] for body in Answers.asked]
    assert len(set(counts[:4])) == 4 and set(counts[4:]) == {40}, "the first requests must end one by one"


def test_the_table_compares_each_engine_with_one_alone() -> None:
    def run(speeds: list[float], **more: Any) -> list[dict[str, Any]]:
        by_engine = {str(number): speed for number, speed in enumerate(speeds)}
        return [{"tok_per_s": sum(speeds), "by_engine": by_engine, "answered": 7, **more}]

    stores = {"stores": 7, "verified": True, "vanished": 0}
    servers = {
        "stock, 1 engine": run([100.0]),
        "capture, 1 engine": run([95.0], **stores),
        "stock, 2 engines": run([98.0, 102.0]),
        "capture, 2 engines": run([90.0, 92.0], **stores),
    }
    lines = report.servers_table(summary.summarise({"servers": servers})).splitlines()
    assert lines[-1] == "| capture, 2 engines | 182 | 90, 92 | 0.910 | 0.958 | 7, 7 |"
    assert lines[2] == "| stock, 1 engine | 100 | 100 | 1.000 | 1.000 |  |"
    assert data_parallel.sound({"servers": servers})
    for wrong in ({"stores": 6}, {"vanished": 1}, {"verified": False}):
        servers["capture, 2 engines"][0] |= {**stores, **wrong}
        assert not data_parallel.sound({"servers": servers}), wrong


def test_numbers_of_engines_are_above_one() -> None:
    assert data_parallel.numbers("2,4") == [2, 4]
    for text in ("1", "2,x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="give numbers above 1, as in 2,4"):
            data_parallel.numbers(text)
