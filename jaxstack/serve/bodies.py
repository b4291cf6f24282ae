"""Bodies of HTTP requests: read within limits of size and time, and parsed as JSON of a known form."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.errors import ConfigError
from jaxstack.serve.answers import Refused
from jaxstack.serve.config import ServerConfig

GONE = 499
"""Status for the log where the client has closed the connection, as nginx has it."""
_DISCARD_SECONDS = 5.0
"""Time limit for reading the rest of a body that is too large."""

R = TypeVar("R", bound=Component)
T = TypeVar("T")


async def read_json(request: Request, kind: type[R], config: ServerConfig) -> R:
    """Parse the JSON body of an HTTP request and validate it as a request of type `kind`, within the server's limits.

    Raises:
      Refused: the body is too large, is not JSON, or does not describe a request of this kind.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON, with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise Refused(415, "send the body as it is, without a Content-Encoding.")
    content = await read_body(request, config)
    # In a thread, as everything whose duration depends on the request: the event loop serves the other clients.
    return await asyncio.to_thread(_parse, content, kind)


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Read the body of an HTTP request, up to the server's size limit.

    Raises:
      Refused: it is too large, does not arrive in time, or the client is gone.
    """
    limit = config.max_body_bytes
    timeout = min(config.receive_timeout, config.timeout)
    size = 0
    parts = list[bytes]()
    too_large = Refused(413, f"the body exceeds {limit} bytes (server.max_body_bytes).")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        await _discard(request, config)
        raise too_large
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {timeout:g} s (server.receive_timeout).") from None
    except ClientDisconnect:
        raise Refused(GONE, "the client is gone.") from None
    if size > limit:
        await _discard(request, config)
        raise too_large
    return b"".join(parts)


async def _discard(request: Request, config: ServerConfig) -> None:
    """Read the rest of a body that is too large, up to a limit.

    Closing the connection earlier would reset it, and a client that sends the body in one piece would not see the
    answer.
    """
    if "expect" in request.headers:  # the client waits for an answer before it sends the body
        return
    size = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(min(config.timeout, _DISCARD_SECONDS)):
            while size < 16 * config.max_body_bytes:
                message = await request.receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _parse(content: bytes, kind: type[R]) -> R:
    """Parse a JSON body and validate it as a request of type `kind`.

    Raises:
      Refused: it is not JSON, or does not describe a request of this kind.
    """
    try:
        tree = json.loads(content)
        if b"\\u" in content or b"\xed" in content:
            json.dumps(tree, ensure_ascii=False).encode()  # refuses lone surrogates, which no answer could repeat
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("; use sys.")[0]  # advice for programs about numbers with many digits
        raise Refused(400, f"the body is not valid JSON: {reason}.") from None
    if not isinstance(tree, dict):
        raise Refused(400, f"the body must be a JSON object; found {type(tree).__name__}.")
    return refuse_on_error(lambda: build_component(kind, tree, "the request"))


def refuse_on_error(make: Callable[[], T]) -> T:
    """Return the result of `make()`; turn a ConfigError or ValueError into an HTTP error response of status 400."""
    try:
        return make()
    except (ConfigError, ValueError) as error:
        raise Refused(400, str(error)) from None
