"""The router: one HTTP server in front of several engines, on one host or many.

Engines tell the router once a second that they live (`registration`). A request goes to the engine that has seen most
of its prompt's beginning, or to the least busy one (`engine_choice`). The router passes the answer on as it arrives.
Until the first part of it has gone to the client, a request whose engine dies, falls silent or refuses it for now is
sent to another engine, so that the client does not notice.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxstack.config.base import Component
from jaxstack.serve.access import KnownHosts, is_key
from jaxstack.serve.answers import Refused
from jaxstack.serve.bodies import GONE, read_body, read_json
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine_choice import SeenPrefixes, choose, prefix_blocks
from jaxstack.serve.http import failure, http_error, refusal
from jaxstack.serve.metrics import add_up, render_router
from jaxstack.serve.protocol import error_body
from jaxstack.serve.registration import BEAT_SECONDS, ROUTE, key_header
from jaxstack.serve.submission import until_gone
from jaxstack.serve.upstream import Address, Answer, EngineGone, Headers, Unreachable, forwarded, send

_LOST_SECONDS = 10.0
"""Silence after which an engine counts as lost."""
_LOOK_SECONDS = 0.5
_MOST_DEATHS = 3
"""Number of engines that may die with a request before it is given up: it may be the cause."""
_MOST_REFUSALS = 3
"""Number of times that the only engine may answer that it cannot serve a request now (status 503)."""
_SCRAPE_SECONDS = 5.0
_ADAPTER_SECONDS = 600.0
_SHUTS_DOWN = "the server is shutting down."

T = TypeVar("T")


class EngineNotice(Component):
    """JSON body of what an engine tells the router."""

    id: str = Field(min_length=1, max_length=64)
    """Random name of the engine's process."""
    port: int = Field(ge=1, lt=2**16)
    """Its port; its host is the one that the notice comes from."""
    model: str
    """Name of its model."""
    failure: str | None = None
    """Reason why it gets no requests; None: it is well."""
    draining: bool = False
    """True if it takes no more requests."""


@dataclasses.dataclass(eq=False)
class KnownEngine:
    """An engine that has registered, as the router sees it."""

    address: Address
    notice: EngineNotice
    heard: float
    """Time of its newest notice."""
    ready: bool = False
    """True once it has the adapters that requests have loaded."""
    suspect: bool = False
    """True from a broken connection until its next notice."""
    requests: int = 0
    """Requests that the router has given it and that are not answered."""
    seen: SeenPrefixes = dataclasses.field(default_factory=SeenPrefixes)
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the engine has fallen silent. If it dies, its connections break."""
    metrics: str = ""
    """Its metrics, as it has told them last."""

    @property
    def takes_requests(self) -> bool:
        """True if requests may be sent to it."""
        told = self.notice.draining or self.notice.failure is not None
        return self.ready and not (told or self.suspect or self.lost.is_set())


class Router:
    """The HTTP application (`app`, ASGI) that distributes requests over engines.

    Args:
      config: limits.
      loopback: True if only this machine can connect; then the header Host must name it.
      api_key: key with which engines register and which they ask of clients; None: only this machine's can register.
      report: prints a message.
    """

    def __init__(
        self, config: ServerConfig, *, loopback: bool, api_key: str | None, report: Callable[[str], None] = print
    ):
        self.config = config
        self._api_key = api_key
        self._report = report
        self._engines: dict[str, KnownEngine] = {}
        self._changed = asyncio.Condition()
        self._adapters: dict[str, bytes] = {}
        """Name of each adapter that requests have loaded -> body of that request."""
        self._past_metrics = ""
        """Counters of engines that have ended."""
        self._retried = 0
        self._unanswered = 0
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        methods = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]
        self.app = Starlette(
            routes=[
                Route(ROUTE, self._register, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/load_lora_adapter", self._change_adapters, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._change_adapters, methods=["POST"]),
                Route("/{path:path}", self._forward, methods=methods),
            ],
            exception_handlers={Refused: refusal, HTTPException: http_error, Exception: failure},
        )
        if loopback and "*" not in config.allowed_hosts:
            self.app.add_middleware(KnownHosts, ["localhost", *config.allowed_hosts])

    @property
    def unanswered(self) -> int:
        """Number of requests that are not answered yet."""
        return self._unanswered

    def end(self) -> None:
        """Refuse all requests that have not begun to be answered (status 503); to be called in the event loop."""
        self._ending.set()

    async def watch(self) -> None:
        """Notice engines that fall silent, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for engine in list(self._engines.values()):
                if time.monotonic() - engine.heard > _LOST_SECONDS:
                    self._lose(engine)

    def _lose(self, engine: KnownEngine) -> None:
        del self._engines[engine.notice.id]
        engine.lost.set()
        self._past_metrics = add_up([], [self._past_metrics, engine.metrics])
        if not engine.notice.draining:
            self._report(f"engine {engine.address} is lost: silent for {_LOST_SECONDS:g} s")

    def _suspect(self, engine: KnownEngine, error: EngineGone) -> None:
        """Send an engine no requests until it tells again that it lives."""
        if engine.takes_requests:
            self._report(f"engine {error}")
        engine.suspect = True

    async def _register(self, request: Request) -> Response:
        host = request.client.host if request.client is not None else ""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if self._api_key is None and not _is_loopback(host) and host != request.scope["server"][0]:
            raise Refused(403, "engines of other hosts can only register with an API key.")
        if self._api_key is not None and not (kind.lower() == "bearer" and is_key(key, self._api_key)):
            raise Refused(401, "engines register with the router's API key.", "invalid_api_key")
        notice = await read_json(request, EngineNotice, self.config)
        known = self._engines.get(notice.id)
        if known is None:
            known = KnownEngine(Address(host, notice.port), notice, time.monotonic())
            self._engines[notice.id] = known
            task = asyncio.ensure_future(self._prepare(known))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif notice.draining and not known.notice.draining:
            self._report(f"engine {known.address} takes no more requests")
        known.notice = notice
        known.suspect = False
        known.heard = time.monotonic()
        await self._announce()
        return JSONResponse({})

    async def _prepare(self, engine: KnownEngine) -> None:
        """Load the adapters that requests have loaded into a new engine, then let it take requests."""
        for name, body in list(self._adapters.items()):
            answer = await self._change_adapter(engine, "/v1/load_lora_adapter", body)
            if answer.status != 200:
                self._report(f"engine {engine.address} cannot load the adapter {name!r}: it answered {answer.status}")
        engine.ready = True
        self._report(f"engine {engine.address} ({engine.notice.model}) takes requests; {len(self._engines)} in all")
        await self._announce()

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _health(self, request: Request) -> Response:
        working = sum(engine.takes_requests for engine in self._engines.values())
        about = {"status": "ok" if working else "no engine takes requests", "engines": working}
        return JSONResponse(about, 200 if working else 503)

    async def _metrics(self, request: Request) -> Response:
        engines = list(self._engines.values())
        await asyncio.gather(*(self._scrape(engine) for engine in engines))
        working = sum(engine.takes_requests for engine in engines)
        text = add_up([engine.metrics for engine in engines], [self._past_metrics])
        text += render_router(working, self._unanswered, self._retried)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _scrape(self, engine: KnownEngine) -> None:
        """Read an engine's metrics; those that it told before stay if it does not answer."""
        with contextlib.suppress(EngineGone, TimeoutError, UnicodeDecodeError):
            async with asyncio.timeout(_SCRAPE_SECONDS):
                answer = await send(engine.address, "GET", "/metrics", [], b"")
                content = await answer.read()
                answer.close()
            if answer.status == 200:
                engine.metrics = content.decode()

    async def _change_adapters(self, request: Request) -> Response:
        """Load or unload an adapter in all engines, or in none."""
        body = await read_body(request, self.config)
        headers = forwarded(request.headers.raw)
        engines = [engine for engine in self._engines.values() if engine.takes_requests]
        if not engines:
            raise Refused(503, "no engine takes requests now.")
        path = request.url.path
        answers = await asyncio.gather(*(self._change_adapter(engine, path, body, headers) for engine in engines))
        bad = next((answer for answer in answers if answer.status != 200), None)
        name = _adapter_name(body)
        if bad is None:
            self._adapters.pop(name, None)
            if path == "/v1/load_lora_adapter":
                self._adapters[name] = body
        elif path == "/v1/load_lora_adapter" and name not in self._adapters:
            undo = json.dumps({"lora_name": name}).encode()
            loaded = [engine for engine, answer in zip(engines, answers, strict=True) if answer.status == 200]
            await asyncio.gather(
                *(self._change_adapter(engine, "/v1/unload_lora_adapter", undo, headers) for engine in loaded)
            )
        chosen = bad or answers[0]
        return Response(chosen.content, chosen.status, dict(chosen.headers))

    async def _change_adapter(
        self, engine: KnownEngine, path: str, body: bytes, headers: Headers | None = None
    ) -> "_Whole":
        if headers is None:
            headers = [(b"content-type", b"application/json"), *key_header(self._api_key)]
        try:
            async with asyncio.timeout(_ADAPTER_SECONDS):
                answer = await send(engine.address, "POST", path, headers, body)
                return _Whole(answer.status, _as_text(answer.headers), await answer.read())
        except (EngineGone, TimeoutError) as error:
            message = f"an engine did not answer: {error or 'no answer in time'}."
            return _Whole(502, {"content-type": "application/json"}, json.dumps(error_body(message, 502)).encode())

    async def _forward(self, request: Request) -> Response:
        """Pass a request on to an engine, and its answer back."""
        body = await read_body(request, self.config)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        call = (request.method, target, forwarded(request.headers.raw), body)
        blocks = await asyncio.to_thread(prefix_blocks, body) if body else []
        self._unanswered += 1
        response = None
        try:
            response = await self._unless_gone(request, self._answer(call, blocks))
            return response
        finally:
            if not isinstance(response, _Relay):
                self._unanswered -= 1

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """Return the result of `work`, which is cancelled if the client goes away or the router ends."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(until_gone(request))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((task, gone, ending), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                return Response(status_code=GONE)
            raise Refused(503, _SHUTS_DOWN)
        finally:
            for one in (task, gone, ending):
                one.cancel()

    async def _answer(self, call: tuple[str, str, Headers, bytes], blocks: Sequence[bytes]) -> Response:
        """Return the answer of some engine; a stream once its first part is there, another answer once it is whole."""
        deaths = refusals = 0
        tried: set[KnownEngine] = set()
        while True:
            engine = await self._pick(blocks, tried)
            tried.add(engine)
            engine.requests += 1
            relayed = False
            try:
                found = await _unless_lost(engine, self._ask(engine, call))
                relayed = isinstance(found, _Relay)
                others = any(other.takes_requests for other in self._engines.values() if other not in tried)
                if found.status_code not in (429, 503):
                    return found
                if not others:  # it may be ending, and another one about to come
                    refusals += 1
                    if found.status_code == 429 or refusals == _MOST_REFUSALS:
                        return found
                    await asyncio.sleep(BEAT_SECONDS)
            except EngineGone as error:
                self._suspect(engine, error)
                deaths += not isinstance(error, Unreachable)
                if deaths == _MOST_DEATHS:
                    raise Refused(502, f"{deaths} engines ended before they answered this request.") from None
            finally:
                if not relayed:
                    engine.requests -= 1
            self._retried += 1

    async def _pick(self, blocks: Sequence[bytes], tried: set[KnownEngine]) -> KnownEngine:
        """Choose an engine, one that was not tried if possible; wait until there is one.

        Raises:
          Refused: none has come within `server.timeout`.
        """
        limit = self.config.timeout
        try:
            async with asyncio.timeout(limit), self._changed:
                await self._changed.wait_for(lambda: any(e.takes_requests for e in self._engines.values()))
        except TimeoutError:
            raise Refused(503, f"no engine took the request within {limit:g} s (server.timeout).") from None
        working = [engine for engine in self._engines.values() if engine.takes_requests]
        engines = [engine for engine in working if engine not in tried] or working
        known = [engine.seen.count_known(blocks) for engine in engines]
        chosen = engines[choose([engine.requests for engine in engines], known)]
        chosen.seen.add(blocks)
        return chosen

    async def _ask(self, engine: KnownEngine, call: tuple[str, str, Headers, bytes]) -> Response:
        method, target, headers, body = call
        answer = await send(engine.address, method, target, headers, body)
        try:
            if not _is_stream(answer):
                content = await answer.read()
                answer.close()
                return Response(content, answer.status, _as_text(answer.headers))
            chunks = answer.chunks()
            first = await anext(chunks, b"")
        except BaseException:
            answer.close()
            raise
        return _Relay(answer, self._relay(engine, first, chunks), lambda: self._finish(engine))

    async def _relay(self, engine: KnownEngine, first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the parts of a stream; end it with an error event if its engine dies."""
        yield first
        try:
            while True:
                chunk = await _unless_lost(engine, _next(chunks))
                if chunk is None:
                    return
                yield chunk
        except EngineGone as error:
            self._suspect(engine, error)
            message = "the engine that answered this request has ended; ask again."
            yield f"data: {json.dumps(error_body(message, 502))}\n\n".encode()

    def _finish(self, engine: KnownEngine) -> None:
        engine.requests -= 1
        self._unanswered -= 1


class _Relay(StreamingResponse):
    """Response that passes on a stream, and closes the connection to the engine when the client is gone."""

    def __init__(self, answer: Answer, chunks: AsyncIterator[bytes], on_end: Callable[[], None]):
        super().__init__(chunks, answer.status, _as_text(answer.headers))
        self._answer = answer
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            self._on_end()


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A whole answer of an engine."""

    status: int
    headers: dict[str, str]
    content: bytes


async def _unless_lost(engine: KnownEngine, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`.

    Raises:
      EngineGone: the engine was lost meanwhile.
    """
    task = asyncio.ensure_future(work)
    lost = asyncio.ensure_future(engine.lost.wait())
    try:
        await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineGone(f"{engine.address}: lost")
    finally:
        task.cancel()
        lost.cancel()


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def _is_stream(answer: Answer) -> bool:
    kind = next((value for name, value in answer.headers if name.lower() == b"content-type"), b"")
    return kind.lower().startswith(b"text/event-stream")


def _as_text(headers: Headers) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def _adapter_name(body: bytes) -> str:
    try:
        return str(json.loads(body)["lora_name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
