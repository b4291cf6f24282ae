"""HTTP client of the router: sends a request to an engine, and reads or passes on the answer as it arrives.

A connection is used once. So none can have been closed by an engine that ended in between, and an error always means
that the engine did not answer this request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

import h11
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_CONNECT_SECONDS = 5.0
_CHUNK_BYTES = 2**16
_EVENT_END = b"\n\n"
_NOT_FORWARDED = frozenset(
    [b"host", b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"content-length", b"te"]
    + [b"trailer", b"upgrade", b"expect", b"forwarded", b"date", b"server"]
)
"""Headers that belong to one connection, or that each server writes itself."""
_PROXY = b"x-forwarded-"
"""Beginning of headers in which proxies tell of clients; nobody has checked those that come here."""

Headers = list[tuple[bytes, bytes]]


class Address(NamedTuple):
    """Host and port of an HTTP server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EngineGone(Exception):
    """Raised if a server cannot be reached, or closes the connection before its answer is complete."""


class Unreachable(EngineGone):
    """Raised if a server takes no connection, so that it has not seen the request."""


class Unsendable(ValueError):
    """Raised if a request cannot be written as HTTP."""


class Answer:
    """The answer to a request: status, headers, and the body, which is read while it arrives.

    As an asynchronous context manager it closes the connection at the end.
    """

    def __init__(self, connection: "_Connection", head: h11.Response):
        self.status = head.status_code
        self.headers: Headers = forwarded(head.headers)
        self._connection = connection

    @property
    def text_headers(self) -> dict[str, str]:
        """The headers as texts."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}

    @property
    def is_stream(self) -> bool:
        """True if the body is a stream of server-sent events."""
        return self.text_headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body.

        Raises:
          EngineGone: the server ended before the body was complete.
        """
        while not isinstance(event := await self._connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def read(self) -> bytes:
        """Return the whole body, as `chunks` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """Close the connection; the server then cancels what it still computes for the request."""
        self._connection.close()


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that a proxy passes on."""
    pairs = [(name.lower(), name, value) for name, value in headers]
    named = {word.strip().lower() for low, _, value in pairs if low == b"connection" for word in value.split(b",")}
    dropped = _NOT_FORWARDED | named
    return [(name, value) for low, name, value in pairs if low not in dropped and not low.startswith(_PROXY)]


async def send(address: Address, method: str, target: str | bytes, headers: Headers, body: bytes) -> Answer:
    """Send a request and return the answer, of which only the head has been read.

    Args:
      address: of the server.
      method: HTTP method.
      target: path and query, percent-encoded.
      headers: from `forwarded`.
      body: the body.

    Raises:
      Unreachable: the server takes no connection.
      EngineGone: it ended before it answered.
      Unsendable: method, target or headers are no HTTP.
    """
    own = [(b"host", str(address).encode()), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    try:
        request = h11.Request(method=method, target=target, headers=[*own, *headers])
    except h11.LocalProtocolError as error:
        raise Unsendable(str(error)) from None
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"{address}: {getattr(error, 'strerror', None) or error!r}") from None
    connection = _Connection(address, reader, writer)
    try:
        await connection.write(request, h11.Data(data=body), h11.EndOfMessage())
        while not isinstance(event := await connection.next_event(), h11.Response):
            pass  # information such as `100 Continue`
        return Answer(connection, event)
    except BaseException:
        connection.close()
        raise


class _Connection:
    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._address = address
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT)

    async def write(self, *events: h11.Event) -> None:
        content = b"".join(self._state.send(event) or b"" for event in events)
        try:
            self._writer.write(content)
            await self._writer.drain()
        except OSError as error:
            raise EngineGone(f"{self._address}: {error!r}") from None

    async def next_event(self) -> h11.Event:
        try:
            while (event := self._state.next_event()) is h11.NEED_DATA:
                self._state.receive_data(await self._reader.read(_CHUNK_BYTES))
        except (OSError, h11.RemoteProtocolError) as error:
            raise EngineGone(f"{self._address}: {error}") from None
        if isinstance(event, h11.ConnectionClosed) or not isinstance(event, h11.Event):
            raise EngineGone(f"{self._address}: the connection was closed")
        return event

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.transport.abort()


class Relay(StreamingResponse):
    """Response that passes on a stream, and closes the connection to the engine when the client is gone.

    Attributes:
      on_close: what is done once when the stream has ended or is given up.
    """

    def __init__(self, answer: Answer, events: AsyncIterator[bytes]):
        super().__init__(events, answer.status, answer.text_headers)
        self.on_close = contextlib.ExitStack()
        self.on_close.callback(answer.close)

    def close(self) -> None:
        """Close the connection to the engine."""
        self.on_close.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.on_close:
            await super().__call__(scope, receive, send)


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a stream, cut where events end: of an engine that ends within an event, none is cut in two."""
    rest = b""
    async for chunk in chunks:
        whole, end, rest = (rest + chunk).rpartition(_EVENT_END)
        if end:
            yield whole + end
    if rest:
        yield rest


def count_events(part: bytes) -> int:
    """Return the number of events in a part of a stream."""
    return part.count(_EVENT_END)
