# SPDX-License-Identifier: Apache-2.0
"""An S3 server in a process of its own, and a proxy that counts requests and injects faults.

The server is moto. It is in the environment `.s3` (`make s3`), because its dependencies conflict with those of vLLM.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import storekit as kit
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("S3_PYTHON", ROOT / ".s3/bin/python"))
KEY, SECRET = "AKIAFORTESTSONLY0042", "sEcReTfOrTeStSoNlY/0123456789+abcdefABCDE"
"""Credentials that must not occur in any output or file. Tests search for them."""
BUCKET = "captures"
NOT_THERE = "no S3 server: run `make s3`, or name a Python that has moto and flask in S3_PYTHON"


@dataclass(frozen=True)
class Request:
    """One request that reached the server. path: without the bucket. sent: bytes of the response's body."""

    method: str
    path: str
    query: str
    range: str | None
    sent: int


Fault = Callable[[str, str, int], str | None]
"""(method, path with query, number of the request) -> the fault: "500", "slow", "break" (in the middle of the
response), "cut" (before the request is handled), "deny", "bad" (status 400), "flip" (a flipped bit in the response),
"hold" (until `gate` is set), or None.
"""


@dataclass
class Proxy:
    """A proxy of the server. log: requests since `clear`. fault: decides which requests fail.

    keys: access keys that signed requests. together: hold the first requests until this many have arrived.
    """

    server: int
    port: int = field(default_factory=free_port)
    log: list[Request] = field(default_factory=list)
    fault: Fault | None = None
    slow_s: float = 0.3
    faults: int = 0
    most_at_once: int = 0
    together: int = 0
    held: int = 0
    keys: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    _now: int = 0
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """The URL of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def clear(self) -> None:
        """Clear the log, and inject no more faults."""
        with self._lock:
            self.log.clear()
            self.keys.clear()
            self.gate.set()
            self.gate, self.held = threading.Event(), 0
            self.fault, self.faults, self.most_at_once, self._count, self.together = None, 0, 0, 0, 0

    def gets(self, part: str = "") -> list[Request]:
        """The reads of objects whose names contain `part`."""
        return [r for r in self.log if r.method == "GET" and part in r.path and "list-type" not in r.query]

    def start(self) -> ThreadingHTTPServer:
        """Start to listen."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

            def _pass(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore the error: clients break connections in these tests."""

        server = Quiet(("127.0.0.1", self.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Forward one request, or inject a fault."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        signed = re.search(r"Credential=(\w+)/", handler.headers.get("Authorization", ""))
        with self._lock:
            self.keys |= {signed[1]} if signed else set()
            self._count += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            what = self.fault(handler.command, handler.path, self._count) if self.fault else None
            self.faults += what is not None
        if self.together:
            kit.until(lambda: self.most_at_once >= self.together)
        try:
            self._answer(handler, body, what)
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes, what: str | None) -> None:
        if what == "slow":
            time.sleep(self.slow_s)
        if what == "hold":
            self.held += 1
            self.gate.wait(kit.PATIENCE)
        if what == "500":
            return _send(handler, 500, b"<Error><Code>InternalError</Code></Error>")
        if what == "bad":
            return _send(handler, 400, b"<Error><Code>BadThing</Code></Error>")
        if what == "deny":
            text = f"<Error><Code>AccessDenied</Code><AWSAccessKeyId>{KEY}</AWSAccessKeyId></Error>"
            return _send(handler, 403, text.encode())
        if what == "cut":  # before the request is handled
            return _close(handler)
        if what == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        upstream = http.client.HTTPConnection("127.0.0.1", self.server, timeout=kit.PATIENCE)
        upstream.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
        for name, value in handler.headers.items():
            if name.lower() not in ("connection", "content-length"):
                upstream.putheader(name, value)
        if body or handler.command in ("PUT", "POST"):
            upstream.putheader("Content-Length", str(len(body)))
        upstream.endheaders(body)
        reply = upstream.getresponse()
        data = reply.read()
        upstream.close()
        path, _, query = handler.path.partition("?")
        path = path.removeprefix(f"/{BUCKET}").lstrip("/")
        with self._lock:
            self.log.append(Request(handler.command, path, query, handler.headers.get("Range"), len(data)))
        handler.send_response(reply.status)
        for name, value in reply.getheaders():
            skipped = ("connection", "transfer-encoding", "date", "server")
            if name.lower() not in (*skipped, *(() if handler.command == "HEAD" else ("content-length",))):
                handler.send_header(name, value)
        if handler.command != "HEAD":
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data[: len(data) // 2] if what == "break" else data)
        if what == "break":
            _close(handler)
        return None


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _close(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)  # `close` would leave the connection open in forked processes


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """A running server with an empty bucket, behind a proxy. Skips the test if the server is not installed."""
    if not PYTHON.exists():
        pytest.skip(NOT_THERE)
    port = free_port()
    process = subprocess.Popen(
        [str(PYTHON), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        kit.until(lambda: process.poll() is not None or _put(f"http://127.0.0.1:{port}/{BUCKET}"))
        if process.poll() is not None:
            pytest.fail(f"the S3 server of {PYTHON} ended at its start; {NOT_THERE}")
        proxy = Proxy(port)
        server = proxy.start()
        yield proxy
        server.shutdown()
        server.server_close()
    finally:
        process.kill()
        process.wait()


def _put(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=kit.PATIENCE) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def environment(proxy: Proxy) -> dict[str, str]:
    """The environment variables that lead programs to the server."""
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def copy_up(store: Path, key: str) -> None:
    """Upload a directory or file to the bucket with obstore, without the package."""
    import obstore

    from dmi_connector.store.format.object_store import bucket_store
    from dmi_connector.store.format.remote_path import RemotePath

    bucket = bucket_store(RemotePath(BUCKET))
    for path in [store] if store.is_file() else sorted(p for p in store.rglob("*") if p.is_file()):
        name = key if store.is_file() else f"{key}/{path.relative_to(store).as_posix()}"
        obstore.put(bucket, name, path.read_bytes())


def objects(prefix: str = "") -> dict[str, bytes]:
    """{name: bytes} of all objects below a prefix."""
    import obstore

    from dmi_connector.store.format.object_store import bucket_store
    from dmi_connector.store.format.remote_path import RemotePath

    bucket = bucket_store(RemotePath(BUCKET))
    metas = [meta for page in obstore.list(bucket, prefix or None) for meta in page]
    return {meta["path"]: bytes(obstore.get(bucket, meta["path"]).bytes()) for meta in metas}


def holds_secret(text: str | bytes, names: Mapping[str, str] | None = None) -> list[str]:
    """The credentials that occur in a text."""
    text = text.decode("latin1") if isinstance(text, bytes) else text
    return [secret for secret in (KEY, SECRET, *(names or {}).values()) if re.search(re.escape(secret), text)]
