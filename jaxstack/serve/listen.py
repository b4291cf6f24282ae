"""Runs the HTTP server on a socket until SIGTERM or Ctrl-C."""

import asyncio
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.engine import Engine
from jaxstack.errors import ConfigError
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.http import Server

_REFUSAL_SECONDS = 5
"""Seconds in which requests that outlast `server.drain` receive their error."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host and port; connections wait until `serve` accepts them.

    A socket that is only bound would leave the port to another server, which fails when it begins to listen.

    Raises:
      ConfigError: the address is in use or does not belong to this machine.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port must be from 0 to 65535; found {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port.") from None
    return bound


def serve(
    engine: Engine | EngineGroup,
    tokenizer: Tokenizer,
    name: str,
    config: ServerConfig,
    bound: socket.socket,
    *,
    api_key: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve HTTP requests until SIGTERM or Ctrl-C; then refuse new requests and wait for the running ones to end.

    Args:
      engine, tokenizer, name, config, api_key: as of `jaxstack.serve.http.Server`.
      bound: the socket, from `bind`.
      report: called with a line of text when the server is ready and when it ends.
    """
    loopback = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback
    server = Server(engine, tokenizer, name, config, api_key=api_key, loopback=loopback)
    timeout = round(config.drain) + _REFUSAL_SECONDS
    settings = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=timeout,
    )

    class ReportingServer(uvicorn.Server):
        """A uvicorn server that reports when it is ready and when it shuts down."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = bound.getsockname()[:2]
            report(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends)")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.get_running_loop().call_later(config.drain, server.end)
            await super().shutdown(sockets)
            ending.cancel()

        def handle_exit(self, sig: int, frame: object) -> None:
            if not self.should_exit:
                report(
                    f"{signal.Signals(sig).name}: finishing {engine.state.running + engine.state.waiting} request(s)"
                )
            super().handle_exit(sig, None)

    for stop in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again after shutting down
        signal.signal(stop, lambda *_: None)
    # By default Python switches threads every 5 ms, so a busy thread would delay the engine by several steps.
    sys.setswitchinterval(0.0005)
    ReportingServer(settings).run(sockets=[bound])
