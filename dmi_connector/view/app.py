# SPDX-License-Identifier: Apache-2.0
"""The HTTP application of `dmi view`: a page, JSON and float32 values. It writes no file and contacts no other host."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dmi_connector.analysis.stats import find_statistic, of_layer
from dmi_connector.analysis.texts import Texts
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.capture import Capture
from dmi_connector.view import attention, experts, lens, predictions
from dmi_connector.view.data import Library, NoSuchStore, describe
from dmi_connector.view.latents import LATENTS, Latents
from dmi_connector.view.texts_index import TextIndex

STATIC = Path(__file__).parent / "static"
MOST_TOKENS = 1024
"""Maximum number of tokens per window."""
_MOST_CAPTURES = 200
"""Maximum number of captures per page of the list."""
_LENS_TOKENS = 5
"""Number of tokens per layer in the logit lens."""
_ALTERNATIVES, _LATENTS, _CONTEXTS = 10, 20, 12
"""Maximum numbers per response: alternatives to a token, active latents of a token, contexts of a latent."""
_CELLS = 128
"""Maximum number of cells along each side of a thumbnail."""
ACTIONS: tuple[str, ...] = (
    "capture",
    "tokens",
    "heat",
    "attention",
    "heads",
    "attended",
    "lens",
    "predicted",
    "alternatives",
)
ACTIONS += ("attribution", "experts", "load", "latents", "contexts", "verify")
"""Names of the actions on one store, in paths and as methods of `_Pages`."""

_REFUSALS = (NoSuchStore, FileNotFoundError, TimeoutError, ValueError, LookupError)
"""Errors for requests of something that does not exist, or that cannot be shown."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""With these headers the browser loads nothing from other hosts, and does not send them the secret token."""


def new_token() -> str:
    """A random secret token for the paths of `make_app`."""
    return secrets.token_urlsafe(24)


def make_app(
    library: Library,
    token: str,
    model: Path | None = None,
    tokenizer: Path | None = None,
    sae: Latents | None = None,
) -> ASGIApp:
    """The ASGI application. Every path begins with `token`, a secret.

    model: directory with the model's config.json and weights, for the logit lens. tokenizer: directory with
    tokenizer.json; None for that in `model`, or else in the model directory that the store names. sae: autoencoder
    whose latents are shown.
    """
    pages = _Pages(library, model, tokenizer, sae)
    routes = [
        Route("/{token}", lambda request: RedirectResponse(f"/{token}/"), methods=["GET"]),
        Route("/{token}/", lambda request: FileResponse(STATIC / "index.html"), methods=["GET"]),
        Route("/{token}/api/captures", _answer(pages.captures), methods=["GET"]),
        *(
            Route(f"/{{token}}/api/{action}/{{name:path}}", _answer(getattr(pages, action)), methods=["GET"])
            for action in ACTIONS
        ),
        Mount("/{token}/static", StaticFiles(directory=STATIC)),
    ]
    return _Guard(Starlette(routes=routes), token)


class _Guard:
    """Passes on only GET requests with the secret token, and adds headers to every response."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, and nothing to do at startup and shutdown

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        if scope["method"] != "GET":
            return PlainTextResponse("only GET is answered", 405, {"Allow": "GET"})
        given = scope["path"].removeprefix("/").split("/")[0].encode()
        if not secrets.compare_digest(given, self._token):
            return PlainTextResponse("wrong token: use the address that dmi view printed", 403)
        return None


def _share(p: np.floating[Any]) -> dict[str, float | None]:
    """The probability of a token as JSON; None if it is not finite."""
    return {"p": float(p) if np.isfinite(p) else None}


def _or_none(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON, with None for values that are not finite."""
    return [float(value) if np.isfinite(value) else None for value in values]


def _answer(page: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Wrap a page so that errors become responses: 404 if something does not exist, 400 if it cannot be shown."""

    def answered(request: Request) -> Response:
        try:
            try:
                return page(request)
            except FileNotFoundError:  # try once more: the store is renamed when its request ends
                return page(request)
        except _REFUSALS as error:
            return _error(error, 404 if isinstance(error, (NoSuchStore, FileNotFoundError, TimeoutError)) else 400)

    return answered


def _error(error: Exception, status: int) -> JSONResponse:
    return JSONResponse({"error": _words(error)}, status)


def _words(error: Exception) -> str:
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


def _number(request: Request, name: str, default: int | None = None) -> int:
    """A non-negative integer of the query."""
    text = request.query_params.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise ValueError(f"{name}={text!r} is not valid; give an integer")
    return int(text)


def _floats(values: np.ndarray) -> Response:
    """A response of float32 values, little-endian, in C order, with the shape in a header."""
    shape = {"X-Shape": ",".join(map(str, values.shape))}
    return Response(np.ascontiguousarray(values, "<f4").tobytes(), media_type="application/octet-stream", headers=shape)


def _stream(pieces: Iterator[dict[str, Any]]) -> Response:
    """Stream each piece as a line of JSON. After the client has disconnected, no further piece is computed.

    The first piece is computed before the response, so an error in it gives an error response. A later error becomes a
    line {"error": ...}.
    """
    first = [*itertools.islice(pieces, 1)]

    def lines() -> Iterator[str]:
        try:
            for piece in itertools.chain(first, pieces):
                yield json.dumps(piece) + "\n"
        except _REFUSALS as error:
            yield json.dumps({"error": _words(error)}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _window(request: Request, capture: Capture) -> slice:
    """The requested rows: at most MOST_TOKENS, within the store."""
    first, count = _number(request, "first", 0), _number(request, "count", MOST_TOKENS)
    tokens = int(capture.attrs["num_tokens"])
    first = min(first, tokens)
    return slice(first, min(first + min(count, MOST_TOKENS), tokens))


def _row(request: Request, capture: Capture) -> int:
    row, tokens = _number(request, "token"), int(capture.attrs["num_tokens"])
    if row >= tokens:
        raise ValueError(f"token {row} does not exist: the store has {tokens} tokens")
    if any(start <= row < stop for start, stop in capture.missing):
        raise ValueError(f"token {row} is among the rows that the store lacks")
    return row


@dataclass(frozen=True)
class _Pages:
    """The handlers of all paths."""

    library: Library
    model: Path | None
    tokenizer: Path | None
    sae: Latents | None = None

    @functools.cached_property
    def _index(self) -> TextIndex:
        return TextIndex(self._texts_of)

    def captures(self, request: Request) -> Response:
        search, first = request.query_params.get("search", ""), _number(request, "first", 0)
        count = min(_number(request, "count", _MOST_CAPTURES), _MOST_CAPTURES)
        again = "again" in request.query_params
        return JSONResponse(self.library.page(search, first, count, self._index, again))

    def capture(self, request: Request) -> Response:
        with self._open(request) as capture:
            found = describe(capture)
            found["hooks"] += predictions.described(capture, self.model)
            if self.sae is not None and self.sae.lacking(capture) is None:
                found["hooks"].append(self.sae.described())
            more: dict[str, Any] = {"attention": attention.shown(capture), "lens": lens.lacking(capture, self.model)}
            more |= {"predictions": predictions.lacking(capture, self.model)}
            more |= {"places": predictions.places(capture, self.model), "experts": experts.shown(capture)}
            more |= {"attribution": predictions.attribution_lacks(capture, self.model)}
            return JSONResponse({**found, **more, "latents": self._latents_of(capture)})

    def tokens(self, request: Request) -> Response:
        with self._open(request) as capture:
            window = _window(request, capture)
            ids = capture.token_ids[window].tolist()
            return JSONResponse({"first": window.start, "ids": ids, "texts": self._texts(capture).of(ids)})

    def heat(self, request: Request) -> Response:
        asked = request.query_params
        with self._open(request) as capture:
            window, index, hook = _window(request, capture), _number(request, "index", 0), asked.get("hook", "")
            if hook == predictions.PREDICTION:
                name = asked.get("statistic", predictions.STATISTICS[0])
                if name not in predictions.STATISTICS:
                    raise ValueError(f"statistic {name!r} does not exist for {hook!r}")
                own = predictions.predicted(capture, self._end(), predictions.FINAL, window)
                return _floats((own.logprobs if name == predictions.STATISTICS[0] else own.entropy)[None])
            if hook == LATENTS:
                return _floats(self._sae(capture).window(capture, index, window)[None])
            statistic = find_statistic(capture, hook, asked.get("statistic", "norm"))
            layers: list[int | None] = [*capture.layers[hook]] or [None]
            return _floats(np.stack([of_layer(capture, hook, one, statistic, index, window) for one in layers]))

    def attention(self, request: Request) -> Response:
        with self._open(request) as capture:
            layer, head = _number(request, "layer"), _number(request, "head")
            return _floats(attention.window(capture, layer, head, _window(request, capture)))

    def heads(self, request: Request) -> Response:
        return _stream(self._heads(request))

    def _heads(self, request: Request) -> Iterator[dict[str, Any]]:
        with self._open(request) as capture:
            found = attention.windows(capture, _number(request, "layer"), _window(request, capture))
            for head, whole in enumerate(found):
                small = np.ascontiguousarray(attention.pooled(whole[:, 1:], _CELLS), "<f4")
                yield {"head": head, "shape": small.shape, "values": base64.b64encode(small.tobytes()).decode()}

    def attended(self, request: Request) -> Response:
        with self._open(request) as capture:
            row = _row(request, capture)
            keys = attention.largest(capture, _number(request, "layer"), _number(request, "head"), row)
            ids = capture.token_ids[[key["row"] for key in keys]].tolist()
            return JSONResponse({"keys": self._with_texts(capture, keys, ids)})

    def lens(self, request: Request) -> Response:
        with self._open(request) as capture:
            row, missing = _row(request, capture), lens.lacking(capture, self.model)
            if missing is not None or self.model is None:
                return JSONResponse({"error": missing}, 400)
            places, best, shares = lens.predictions(capture, lens.end_of(self.model), row, _LENS_TOKENS)
            found = [
                {"place": place, "tokens": self._with_texts(capture, [_share(p) for p in of], ids.tolist())}
                for place, ids, of in zip(places, best, shares, strict=True)
            ]
            return JSONResponse({"places": found})

    def predicted(self, request: Request) -> Response:
        return _stream(self._predicted(request))

    def _predicted(self, request: Request) -> Iterator[dict[str, Any]]:
        with self._open(request) as capture:
            names, end = predictions.places(capture, self.model), self._end()
            if end is None or not names:
                raise ValueError(lens.lacking(capture, self.model))
            token = _number(request, "token") if "token" in request.query_params else None
            for place, first, found in predictions.lens_map(capture, end, names, _window(request, capture), token):
                best = self._with_texts(capture, [{} for _ in found.best], found.best.tolist())
                logprobs, entropy = (_or_none(values) for values in (found.logprobs, found.entropy))
                yield {"place": place, "token": first, "logprobs": logprobs, "entropy": entropy, "best": best}

    def alternatives(self, request: Request) -> Response:
        with self._open(request) as capture:
            row, lacks = _row(request, capture), predictions.lacking(capture, self.model)
            if lacks is not None:
                raise ValueError(lacks)
            found = predictions.alternatives(capture, self._end(), row, _ALTERNATIVES)
            tokens = self._with_texts(capture, [{"p": p} for p in found["p"]], found["ids"])
            return JSONResponse({"tokens": tokens, "rank": found["rank"], "came": found["came"]})

    def attribution(self, request: Request) -> Response:
        with self._open(request) as capture:
            row, end = _row(request, capture), self._end()
            lacks = predictions.attribution_lacks(capture, self.model)
            if lacks is not None or end is None:
                raise ValueError(lacks)
            found = predictions.attribution(capture, end, row)
            (target,) = self._with_texts(capture, [{}], [found["target"]])
            return JSONResponse({**found, "target": target})

    def experts(self, request: Request) -> Response:
        with self._open(request) as capture:
            return _floats(experts.window(capture, _window(request, capture), "weights" in request.query_params))

    def load(self, request: Request) -> Response:
        with self._open(request) as capture:
            known = experts.shown(capture)
            if known is None:
                raise ValueError("the store has no topk_ids")
            counts = experts.load(capture, _number(request, "layer"), known["count"])
            return JSONResponse({"counts": counts.tolist()})

    def latents(self, request: Request) -> Response:
        with self._open(request) as capture:
            return JSONResponse({"latents": self._sae(capture).strongest(capture, _row(request, capture), _LATENTS)})

    def contexts(self, request: Request) -> Response:
        with self._open(request) as capture:
            found = self._sae(capture).contexts(self.library.all(), _number(request, "latent"), _CONTEXTS)
            for context in found["found"]:
                context["texts"] = self._texts(capture).of(context["ids"])
            return JSONResponse(found)

    def verify(self, request: Request) -> Response:
        return JSONResponse(self.library.verify(request.path_params["name"]))

    def _open(self, request: Request) -> Capture:
        return self.library.open(request.path_params["name"])

    def _end(self) -> Unembedding | None:
        return None if self.model is None else lens.end_of(self.model)

    def _sae(self, capture: Capture) -> Latents:
        lacks = "start dmi view with --sae FILE" if self.sae is None else self.sae.lacking(capture)
        if self.sae is None or lacks is not None:
            raise ValueError(lacks)
        return self.sae

    def _latents_of(self, capture: Capture) -> dict[str, Any]:
        """The latents that can be shown, as JSON: {lacks, count, hook}. lacks: why none can be shown, else None."""
        if self.sae is None:
            return {"lacks": "Start dmi view with --sae FILE, an autoencoder of SAELens or sparsify.", "count": 0}
        return {"lacks": self.sae.lacking(capture), "count": self.sae.encoder.latents, "hook": self.sae.hook}

    def _texts(self, capture: Capture) -> Texts:
        return self._texts_of(capture.attrs.get("model"))

    def _texts_of(self, model: str | None) -> Texts:
        own = self.model if self.model and (self.model / "tokenizer.json").is_file() else None
        return Texts(self.tokenizer or own, model)

    def _with_texts(self, capture: Capture, items: list[dict[str, Any]], ids: list[int]) -> list[dict[str, Any]]:
        known = [max(i, 0) for i in ids]  # -1 means no token: the row is not finite
        texts: Sequence[str | None] = self._texts(capture).of(known) or [None] * len(ids)
        texts = [text if i >= 0 else None for text, i in zip(texts, ids, strict=True)]
        return [{**item, "id": i, "text": text} for item, i, text in zip(items, ids, texts, strict=True)]
