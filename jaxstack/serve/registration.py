"""An engine's registration with the router: once a second it tells that it lives, and whether it takes requests."""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Callable
from typing import NamedTuple

from jaxstack.errors import ConfigError
from jaxstack.serve.upstream import Address, EngineGone, Headers, send

ENGINE_KEY = "JAXSTACK_ENGINE_KEY"
"""Environment variable with the key with which engines register; clients do not know it."""
BEAT_SECONDS = 1.0
ROUTE = "/router/engines"
_ANSWER_SECONDS = 5.0
_URL = re.compile(r"http://(?:\[([0-9A-Fa-f:.]+)\]|([^/:\[\]]+)):(\d{1,5})/?")


class RouterLogin(NamedTuple):
    """How an engine reaches its router."""

    address: Address
    key: str
    """Key with which it registers."""


def parse_url(url: str) -> Address:
    """Return host and port of an address `http://HOST:PORT`.

    Raises:
      ConfigError: it has another form.
    """
    match = _URL.fullmatch(url)
    if match is None or int(match[3]) >= 2**16:
        raise ConfigError(f"--router is the address of a router, http://HOST:PORT; found {url!r}.")
    return Address(match[1] or match[2], int(match[3]))


def key_header(key: str | None) -> Headers:
    """Return the header with a key, as a list; [] without a key."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.strip().encode("utf-8", "surrogateescape"))]


class Registration:
    """Tells a router about the engine of this process.

    Args:
      router: address and key of the router.
      port: port on which this process serves.
      name: name of the model.
      failure: returns what is wrong with the engine, or None.
      report: prints a message.
    """

    def __init__(
        self,
        router: RouterLogin,
        port: int,
        name: str,
        failure: Callable[[], str | None],
        *,
        report: Callable[[str], None],
    ):
        self._router = router.address
        self._about = {"id": secrets.token_hex(8), "port": port, "model": name}
        self._failure = failure
        self._key = key_header(router.key)
        self._report = report
        self._told = ""
        self._draining = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Tell the router once a second, for ever."""
        while True:
            told = await self._tell()
            if told != self._told and not self._draining:
                self._report(told)
                self._told = told
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), BEAT_SECONDS)
            self._wake.clear()

    def drain(self) -> None:
        """Tell the router at once that this engine takes no more requests; to be called in the event loop."""
        self._draining = True
        self._wake.set()

    async def _tell(self) -> str:
        """Tell the router about this engine; return the result as a message."""
        body = json.dumps({**self._about, "failure": self._failure(), "draining": self._draining}).encode()
        headers = [(b"content-type", b"application/json"), *self._key]
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                async with await send(self._router, "POST", ROUTE, headers, body) as answer:
                    content = await answer.read()
        except (EngineGone, TimeoutError) as error:
            return f"the router at {self._router} does not answer ({str(error) or 'no answer in time'}); trying again"
        if answer.status != 200:
            return f"the router at {self._router} refuses this engine: {content.decode(errors='replace')[:300]}"
        return f"registered with the router at {self._router}"
