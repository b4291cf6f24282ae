"""Ids of HTTP requests, as clients and proxies send them in the header X-Request-Id, and find them in each response."""

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "X-Request-Id"


class RequestIds:
    """ASGI middleware that gives each request an id: that of its header, or else a random one.

    The response has it in the same header, unless the application has set that, as a router does from its engine's.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = Headers(scope=scope).get(_HEADER) or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(_HEADER, state["request_id"])
            await send(message)

        await self._app(scope, receive, send_with_id)


def id_of(request: Request) -> str:
    """Return the id of a request."""
    return request.state.request_id


def name_request(request: Request, request_id: str | None) -> None:
    """Give a request the id that its body names, if any; that of its header goes before."""
    if request_id is not None and not request.headers.get(_HEADER):
        request.state.request_id = request_id
