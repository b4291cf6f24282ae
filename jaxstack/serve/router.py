"""The router: one HTTP server in front of several engines, on one host or many.

Engines tell the router once a second that they live (`registration`). A request goes to the engine that has seen most
of its prompt's beginning, or to the least busy one (`engine_choice`). The router passes the answer on as it arrives.
Until the first part of it has gone to the client, a request whose engine dies, falls silent or refuses it for now is
sent to another engine, so that the client does not notice.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxstack.serve.access import check_hosts, check_key, is_key, read_body, read_json, sent_key
from jaxstack.serve.adapters import LOAD, UNLOAD, SharedAdapters
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine_choice import KnownEngine, choose, prefix_blocks
from jaxstack.serve.metrics import add_up, is_metrics, render_router
from jaxstack.serve.refusals import HANDLERS, Refused, error_event, until_ending, until_gone
from jaxstack.serve.registration import BEAT_SECONDS, ENGINE_KEY, ROUTE, EngineNotice
from jaxstack.serve.request_ids import RequestIds
from jaxstack.serve.tasks import unless
from jaxstack.serve.upstream import (
    Address,
    EngineGone,
    Headers,
    Relay,
    Unreachable,
    Unsendable,
    count_events,
    forwarded,
    send,
    whole_events,
)

_LOST_SECONDS = 10.0
"""Silence after which an engine counts as lost."""
_LOOK_SECONDS = 0.5
_MOST_DEATHS = 3
"""Number of engines that may die with a request before it is given up: it may be the cause."""
_MOST_REFUSALS = 3
"""Number of times that the only engine may answer that it cannot serve a request now (status 503)."""
_SCRAPE_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_MOST_ENGINES = 1024
_LONGEST_PAUSE_SECONDS = 8.0
"""Longest time between two attempts to make an engine ready."""
_BODILESS = ("GET", "HEAD", "OPTIONS")


class Router:
    """The HTTP application (`app`, ASGI) that distributes requests over engines.

    Args:
      config: limits.
      loopback: True if only this machine can connect; then the header Host must name it.
      api_key: key that the engines ask of clients; None: they ask for none.
      engine_key: key with which engines register.
      report: prints a message.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        loopback: bool,
        api_key: str | None,
        engine_key: str,
        report: Callable[[str], None] = print,
    ):
        self.config = config
        self._api_key = api_key
        self._engine_key = engine_key
        self._report = report
        self._engines: dict[str, KnownEngine] = {}
        self._changed = asyncio.Condition()
        self._adapters = SharedAdapters(api_key)
        self._past_metrics = ""
        """Counters of engines that have ended."""
        self._retried = 0
        self._unanswered = 0
        self._ending = asyncio.Event()
        self._tending: dict[KnownEngine, asyncio.Task] = {}
        """Engine -> the task that makes it ready."""
        methods = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]
        self.app = Starlette(
            routes=[
                Route(ROUTE, self._register, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *(Route(path, self._change_adapters, methods=["POST"]) for path in (LOAD, UNLOAD)),
                Route("/{path:path}", self._forward, methods=methods),
            ],
            exception_handlers=HANDLERS,
        )
        check_hosts(self.app, config, loopback=loopback)
        self.app.add_middleware(RequestIds)

    @property
    def unanswered(self) -> int:
        """Number of requests that are not answered yet."""
        return self._unanswered

    def end(self) -> None:
        """Refuse all requests that have not begun to be answered (status 503); to be called in the event loop."""
        self._ending.set()

    async def watch(self) -> None:
        """Notice engines that fall silent, for ever.

        Raises:
          Exception: what has failed in the background.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for engine, task in list(self._tending.items()):
                if task.done():
                    task.result()
                if time.monotonic() - engine.heard > _LOST_SECONDS:
                    self._lose(engine)

    def _lose(self, engine: KnownEngine) -> None:
        del self._engines[engine.notice.id]
        self._tending.pop(engine).cancel()
        engine.lost.set()
        try:
            self._past_metrics = add_up([], [self._past_metrics, engine.metrics])
        except ValueError as error:
            self._report(f"the metrics of engine {engine.address} cannot be added to those of the others: {error}")
        if not engine.notice.draining:
            self._report(f"engine {engine.address} is lost: silent for {_LOST_SECONDS:g} s")

    def _doubt(self, engine: KnownEngine, reason: str) -> None:
        """Send an engine no requests until `_tend` finds it ready again."""
        if engine.takes_requests:
            self._report(f"engine {reason}")
        engine.doubted.set()

    async def _register(self, request: Request) -> Response:
        host = request.client.host if request.client is not None else ""
        if not is_key(sent_key(request), self._engine_key):
            raise Refused(401, f"engines register with the router's key, {ENGINE_KEY}.", "invalid_api_key")
        notice = await read_json(request, EngineNotice, self.config)
        known = self._engines.get(notice.id)
        if known is None:
            self._check_new(notice)
            known = KnownEngine(Address(host, notice.port), notice, time.monotonic())
            self._engines[notice.id] = known
            self._tending[known] = asyncio.ensure_future(self._tend(known))
        elif notice.draining and not known.notice.draining:
            self._report(f"engine {known.address} takes no more requests")
        known.notice = notice
        known.heard = time.monotonic()
        await self._announce()
        return JSONResponse({})

    def _check_new(self, notice: EngineNotice) -> None:
        """Check that a new engine can join the others.

        Raises:
          Refused: there are too many, or it has another model.
        """
        if len(self._engines) >= _MOST_ENGINES:
            raise Refused(503, f"the router has {_MOST_ENGINES} engines and takes no more.")
        served = next((engine.notice.model for engine in self._engines.values()), notice.model)
        if notice.model != served:
            raise Refused(409, f"the router's engines serve {served!r}, and this one {notice.model!r} (--name).")

    async def _tend(self, engine: KnownEngine) -> None:
        """Make an engine ready whenever its connection has broken, and at first."""
        while True:
            pause = BEAT_SECONDS / 2
            said = None
            while (wrong := await self._prepare(engine)) is not None:
                if wrong != said and not engine.notice.draining:
                    self._report(f"engine {engine.address} gets no requests yet: {wrong}")
                said = wrong
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                await asyncio.sleep(pause)
            self._report(f"engine {engine.address} ({engine.notice.model}) takes requests; {len(self._engines)} in all")
            await self._announce()
            await engine.doubted.wait()
            await asyncio.sleep(BEAT_SECONDS)

    async def _prepare(self, engine: KnownEngine) -> str | None:
        """Connect to an engine, and make the changes of adapters that it has missed; then it takes requests.

        Returns:
          Reason why it gets no requests; None if it takes them now.
        """
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                async with await send(engine.address, "GET", "/health", [], b""):
                    pass
            async with self._adapters.lock:
                wrong = await self._adapters.reconcile(engine)
                if wrong is None:
                    engine.doubted.clear()
                return wrong
        except (EngineGone, TimeoutError) as error:
            return f"the router cannot connect to it ({str(error) or 'no answer in time'})"

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
                async with await send(engine.address, "GET", "/metrics", [], b"") as answer:
                    text = (await answer.read()).decode()
            if answer.status == 200 and is_metrics(text):
                engine.metrics = text

    async def _change_adapters(self, request: Request) -> Response:
        """Load or unload an adapter in all engines, or in none; those that miss the change make it later."""
        check_key(request, self._api_key)
        body = await read_body(request, self.config)
        async with self._adapters.lock:
            engines = [engine for engine in self._engines.values() if engine.takes_requests]
            answer = await self._adapters.change(engines, request.scope["path"], body, forwarded(request.headers.raw))
            await asyncio.gather(*(self._catch_up(engine, engine in engines) for engine in self._engines.values()))
        if answer is None:
            raise Refused(503, "no engine has answered; once one takes requests, ask again.")
        return Response(answer.content, answer.status, answer.headers)

    async def _catch_up(self, engine: KnownEngine, answers: bool) -> None:
        """Let an engine that has missed a change of adapters make it: now, or once it answers again."""
        wrong = None
        if answers:
            try:
                wrong = await self._adapters.reconcile(engine)
            except EngineGone as error:
                wrong = str(error)
        if wrong is not None or not self._adapters.is_current(engine):
            self._doubt(engine, f"{engine.address}: {wrong or 'it has missed a change of adapters'}")

    async def _forward(self, request: Request) -> Response:
        """Pass a request on to an engine, and its answer back."""
        body = b""
        if request.method not in _BODILESS:  # engines ask for the key at GET /v1/models too, but not for the page
            check_key(request, self._api_key)
            body = await read_body(request, self.config)
        call = _Call(request.method, _target(request), forwarded(request.headers.raw), body)
        blocks = await asyncio.to_thread(prefix_blocks, body) if body else []
        self._unanswered += 1
        with contextlib.ExitStack() as ends:
            ends.callback(self._count_answered)
            answer = self._answer(call, blocks)  # given up if the client goes away or the router ends
            response = await unless(answer, until_gone(request), until_ending(self._ending))
            if isinstance(response, Relay):
                response.on_close.push(ends.pop_all())
            return response

    def _count_answered(self) -> None:
        self._unanswered -= 1

    async def _answer(self, call: "_Call", blocks: Sequence[bytes]) -> Response:
        """Return the answer of some engine; a stream once its first event is there, another answer once it is whole.

        Raises:
          Refused: none has answered within `server.timeout`, or too many have ended.
        """
        limit = self.config.timeout
        reasons = ["no engine takes requests"]
        try:
            async with asyncio.timeout(limit):
                return await self._ask_engines(call, blocks, reasons)
        except TimeoutError:
            raise Refused(504, f"no answer within {limit:g} s (server.timeout): {reasons[-1]}.") from None
        except Unsendable as error:
            raise Refused(400, f"the request cannot be passed on: {error}.") from None

    async def _ask_engines(self, call: "_Call", blocks: Sequence[bytes], reasons: list[str]) -> Response:
        """Ask one engine after another, until one answers; add what has become of each to `reasons`."""
        deaths = refusals = 0
        tried: set[KnownEngine] = set()
        while True:
            engine = await self._pick(blocks, tried)
            reasons.append("an engine has the request and has not answered")
            try:
                found = await self._try(engine, call)
                if found.status_code not in (429, 503):
                    return found
                reasons.append("the engines are busy or about to end")
                tried.add(engine)
                if not any(other.takes_requests for other in self._engines.values() if other not in tried):
                    refusals += 1  # it may be ending, and another one about to come
                    if found.status_code == 429 or refusals == _MOST_REFUSALS:
                        return found
                    await asyncio.sleep(BEAT_SECONDS)
            except EngineGone as error:
                tried.add(engine)
                self._doubt(engine, str(error))
                reasons.append("the last engine that was asked has ended or cannot be reached")
                deaths += not isinstance(error, Unreachable)
                if deaths == _MOST_DEATHS:
                    raise Refused(502, f"{deaths} engines ended before they answered this request.") from None
            self._retried += 1

    async def _try(self, engine: KnownEngine, call: "_Call") -> Response:
        """Ask one engine, which counts the request until it is answered.

        Raises:
          EngineGone: the engine has ended.
        """
        engine.requests += 1
        with contextlib.ExitStack() as ends:
            ends.callback(self._release, engine)
            found = await unless(self._ask(engine, call), engine.until_lost())
            if isinstance(found, Relay):
                found.on_close.push(ends.pop_all())
            return found

    def _release(self, engine: KnownEngine) -> None:
        engine.requests -= 1

    async def _pick(self, blocks: Sequence[bytes], tried: set[KnownEngine]) -> KnownEngine:
        """Choose an engine, one that was not tried if possible; wait until there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(e.takes_requests for e in self._engines.values()))
        working = [engine for engine in self._engines.values() if engine.takes_requests]
        engines = [engine for engine in working if engine not in tried] or working
        known = [engine.seen.count_known(blocks) for engine in engines]
        chosen = engines[choose([engine.requests for engine in engines], known)]
        chosen.seen.add(blocks)
        return chosen

    async def _ask(self, engine: KnownEngine, call: "_Call") -> Response:
        answer = await send(engine.address, *call)
        try:
            if not answer.is_stream:
                async with answer:
                    return Response(await answer.read(), answer.status, answer.text_headers)
            events = whole_events(answer.chunks())
            first = await anext(events, b"")
        except BaseException:
            answer.close()
            raise
        return Relay(answer, self._relay(engine, call, first, events))

    async def _relay(
        self, engine: KnownEngine, call: "_Call", first: bytes, events: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; end it with an error event if its engine dies."""
        yield first
        number = count_events(first)
        try:
            while (part := await unless(_next(events), engine.until_lost())) is not None:
                yield part
                number += count_events(part)
        except EngineGone as error:
            self._doubt(engine, str(error))
            path = call.target.partition(b"?")[0].decode("latin-1")
            yield error_event(path, "the engine that answered this request has ended; ask again.", number)


class _Call(NamedTuple):
    """A request as it is sent to engines."""

    method: str
    target: bytes
    headers: Headers
    body: bytes


def _target(request: Request) -> bytes:
    """Return path and query of a request as the client has written them."""
    query = request.scope["query_string"]
    return request.scope["raw_path"] + (b"?" + query if query else b"")


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)
