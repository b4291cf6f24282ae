"""Who may ask the HTTP server: those with the API key, and on a machine's own address those who name it as host."""

import ipaddress
import re
import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxstack.serve.answers import Refused
from jaxstack.serve.protocol import error_body


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
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    if wanted is not None and not is_key(key, wanted):
        raise Refused(401, "send the server's API key as `Authorization: Bearer KEY`.", "invalid_api_key")
