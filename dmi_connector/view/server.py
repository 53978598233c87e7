# SPDX-License-Identifier: Apache-2.0
"""Serves the page of `dmi view` on the loopback address."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from dmi_connector.analysis.texts import Texts
from dmi_connector.view.app import make_app, new_token
from dmi_connector.view.data import Library
from dmi_connector.view.latents import Latents
from dmi_connector.view.lens import end_of

HOST = "127.0.0.1"


def serve(
    path: Path,
    port: int = 0,
    model: Path | None = None,
    tokenizer: Path | None = None,
    sae: Path | None = None,
    sae_hook: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a store directory, or one store, until the process is interrupted. say: called with the address.

    port: 0 for a free one. model, tokenizer: see `make_app`. sae, sae_hook: see `Latents.load`. Raises ValueError if
    `model`, `tokenizer` or `sae` cannot be loaded, or if the port cannot be used.
    """
    library = Library.at(path)
    if model is not None:
        end_of(model)
    if tokenizer is not None:
        Texts(tokenizer)
    latents = None if sae is None else Latents.load(sae, sae_hook)
    token = new_token()
    config = uvicorn.Config(
        make_app(library, token, model, tokenizer, latents),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
    )
    with _listen(port) as listener:
        say(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
        uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    if os.name == "posix":  # on Windows the option would let two servers share a port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--port {port} cannot be used ({error}); give another, or 0 for a free one") from error
    return listener
