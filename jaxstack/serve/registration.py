"""An engine's registration with the router: once a second it tells that it lives, and whether it takes requests."""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable
from typing import NamedTuple

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.errors import ConfigError
from jaxstack.serve.upstream import Address, EngineGone, Headers, send

ENGINE_KEY = "JAXSTACK_ENGINE_KEY"
"""Environment variable with the key with which engines register; clients do not know it."""
BEAT_SECONDS = 1.0
ROUTE = "/router/engines"
_ANSWER_SECONDS = 5.0
_URL = re.compile(r"http://(?:\[([0-9A-Fa-f:.]+)\]|([^/:\[\]]+)):(\d{1,5})/?")


class EngineNotice(Component):
    """JSON body of the notice that an engine sends to the router once a second."""

    id: str = Field(min_length=1, max_length=64)
    """Random name of the engine's process."""
    port: int = Field(ge=1, lt=2**16)
    """Port at which the engine serves. Its host is the address that the notice comes from."""
    model: str = Field(max_length=1024)
    """Name of the engine's model."""
    failure: str | None = None
    """Error message of an engine that has failed and gets no requests; None if it works."""
    draining: bool = False
    """True if the engine is shutting down and takes no more requests."""


class RouterLogin(NamedTuple):
    """Address of a router, and the key with which engines register with it."""

    address: Address
    key: str


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
        self._notice = build_component(
            EngineNotice, {"id": secrets.token_hex(8), "port": port, "model": name}, "the notice to the router"
        )
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
        news = {"failure": self._failure(), "draining": self._draining}
        body = self._notice.model_copy(update=news).model_dump_json().encode()
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
