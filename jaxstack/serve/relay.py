"""Event streams of engines, passed on to clients event by event."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxstack.serve.messages import messages_error
from jaxstack.serve.protocol import error_body
from jaxstack.serve.upstream import Answer

_EVENT_END = b"\n\n"


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


def error_event(path: str, message: str, number: int) -> bytes:
    """Return the event that ends a stream with an error of status 502, in the format of the API of a route.

    Args:
      path: the route.
      message: the error.
      number: number of events before it, by which the responses API numbers its events.
    """
    body: dict[str, Any] = error_body(message, 502)
    if path.startswith("/v1/messages"):
        body = messages_error(body, 502)
    elif path.startswith("/v1/responses"):
        body = {
            "type": "error",
            "code": "server_error",
            "message": message,
            "param": None,
            "sequence_number": number,
        }
    else:
        return f"data: {json.dumps(body)}\n\n".encode()
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()
