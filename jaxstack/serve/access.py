"""Checks of each HTTP request before it is handled: the host that it names, its API key, and its body.

A body is read within limits of size and time, and parsed as JSON of a known form.
"""

import asyncio
import contextlib
import ipaddress
import json
import re
import secrets
from collections.abc import Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.refusals import Refused, client_gone, error_body, refuse_on_error

_DISCARD_SECONDS = 5.0
"""Time limit for reading the rest of a body that is too large."""

R = TypeVar("R", bound=Component)


class KnownHosts:
    """ASGI middleware that refuses requests whose header Host names none of the known hosts.

    Starlette's `TrustedHostMiddleware` takes the text before the first colon for the host and so refuses IPv6
    addresses.
    """

    def __init__(self, app: ASGIApp, known: Sequence[str]):
        self._app = app
        self._known = {name.lower() for name in known}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":\d*$", "", host)
        if not name or name in self._known or _is_address(name):
            return await self._app(scope, receive, send)
        message = f"requests for the host {name!r} are not served; add it to server.allowed_hosts."
        await JSONResponse(error_body(message, 403), 403)(scope, receive, send)


def _is_address(host: str) -> bool:
    """Return True if a host is an IP address: only names can be resolved to another machine than their owner's."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def check_hosts(app: Starlette, config: ServerConfig, *, loopback: bool) -> None:
    """Let an application that only this machine can reach refuse requests that name another host than it is known by.

    Args:
      app: the application.
      config: names further hosts, or "*" for any.
      loopback: True if only this machine can connect.
    """
    if loopback and "*" not in config.allowed_hosts:
        app.add_middleware(KnownHosts, ["localhost", *config.allowed_hosts])


def sent_key(request: Request) -> str:
    """Return the key that a request sends as `Authorization: Bearer KEY`; "" without one."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else ""


def is_key(sent: str, wanted: str) -> bool:
    """Return True if a header, which is decoded as Latin-1, has the bytes of the key in UTF-8 or in Latin-1."""
    given = sent.strip(" \t").encode("latin-1")
    keys = [wanted.strip().encode("utf-8", "surrogateescape"), wanted.strip().encode("latin-1", "replace")]
    return any([secrets.compare_digest(given, key) for key in keys])


def check_key(request: Request, wanted: str | None) -> None:
    """Check that a client has sent the API key: as `Authorization: Bearer KEY` or in the header x-api-key.

    Args:
      request: the client's request.
      wanted: the key; None: none is needed.

    Raises:
      Refused: it has not.
    """
    key = sent_key(request) or request.headers.get("x-api-key", "")
    if wanted is not None and not is_key(key, wanted):
        raise Refused(401, "send the server's API key as `Authorization: Bearer KEY`.", "invalid_api_key")


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
        raise client_gone() from None
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
