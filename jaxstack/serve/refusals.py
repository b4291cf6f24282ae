"""Requests that get an error: the exception `Refused`, its reasons, and the response in the format of each API."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxstack.errors import ConfigError

_GONE = 499
"""Status of a request whose client has closed the connection, as in nginx. Nobody receives it."""
_MOST_CHARACTERS = 2000
"""Largest length of an error message."""

T = TypeVar("T")


class Refused(Exception):
    """Raised when a request is rejected; the client receives it as an HTTP error response.

    Args:
      status: HTTP status.
      message: what is wrong and what helps.
      code: OpenAI's code of the error, if it has one.
    """

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code


def client_gone() -> Refused:
    """Return the exception for a request whose client has closed the connection."""
    return Refused(_GONE, "the client is gone.")


def shutting_down() -> Refused:
    """Return the exception for a request that is not answered because the server ends."""
    return Refused(503, "the server is shutting down.")


def refuse_on_error(make: Callable[[], T]) -> T:
    """Return the result of `make()`.

    Raises:
      Refused: `make` raised a ConfigError or a ValueError; status 400 with its message.
    """
    try:
        return make()
    except (ConfigError, ValueError) as error:
        raise Refused(400, str(error)) from None


async def until_gone(request: Request) -> NoReturn:
    """Wait until the client of a request, whose body has been read, closes the connection; then raise `Refused`."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise client_gone()


async def until_ending(ending: asyncio.Event) -> NoReturn:
    """Wait until the server's event `ending` is set; then raise `Refused`."""
    await ending.wait()
    raise shutting_down()


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return an error as JSON in OpenAI's format."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > _MOST_CHARACTERS:  # it may repeat what the client sent
        message = message[:_MOST_CHARACTERS] + "..."
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def messages_error(message: str, status: int) -> dict[str, Any]:
    """Return an error as JSON in Anthropic's format, that of /v1/messages."""
    kinds = {
        413: "request_too_large",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    error = error_body(message, status)["error"]
    return {"type": "error", "error": {"type": kinds.get(status, error["type"]), "message": error["message"]}}


def error_event(path: str, message: str, number: int) -> bytes:
    """Return the server-sent event that ends a stream with an error of status 502, in the format of a route's API.

    Args:
      path: the route.
      message: the error.
      number: number of events before it, by which the responses API numbers its events.
    """
    if path.startswith("/v1/messages"):
        body = messages_error(message, 502)
    elif path.startswith("/v1/responses"):
        body = {
            "type": "error",
            "code": "server_error",
            "message": message,
            "param": None,
            "sequence_number": number,
        }
    else:
        return f"data: {json.dumps(error_body(message, 502))}\n\n".encode()
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


async def _respond_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
    return _response(request, str(error), error.status, error.code, headers.get(error.status))


async def _respond_unknown(request: Request, error: Exception) -> Response:
    """Return the response to a request for an unknown route, or with a wrong method."""
    assert isinstance(error, HTTPException)
    known = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    messages = {404: f"there is nothing at {request.url.path}; known: {known}."}
    message = messages.get(error.status_code, f"{error.detail}: {request.method} {request.url.path}.")
    return _response(request, message, error.status_code, headers=error.headers)


async def _respond_failed(request: Request, error: Exception) -> Response:
    return _response(request, f"the server failed: {type(error).__name__}.", 500)


HANDLERS: Mapping[Any, Any] = {
    Refused: _respond_refused,
    HTTPException: _respond_unknown,
    Exception: _respond_failed,
}
"""Exception -> function that makes its response: the `exception_handlers` of a Starlette application."""


def _response(
    request: Request, message: str, status: int, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error in the format of the route's API."""
    if request.url.path.startswith("/v1/messages"):
        return JSONResponse(messages_error(message, status), status, headers)
    return JSONResponse(error_body(message, status, code), status, headers)
