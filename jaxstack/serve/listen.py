"""Runs the HTTP server on a socket until SIGTERM or Ctrl-C."""

import asyncio
import dataclasses
import ipaddress
import json
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.engine import Engine
from jaxstack.distributed.cluster import local_address
from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.http import Server
from jaxstack.serve.pair_scores import Classifier
from jaxstack.serve.refusals import error_body
from jaxstack.serve.registration import ENGINE_KEY, Registration, RouterLogin
from jaxstack.serve.upstream import Address

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


class Application(Protocol):
    """ASGI application with limits that `run_server` serves, which can refuse the requests that are left."""

    app: Starlette
    config: ServerConfig

    def end(self) -> None:
        """Refuse all requests from now on."""
        ...


def _protocol(config: ServerConfig) -> type[H11Protocol]:
    """Return the class of connections with the limits on time of a configuration."""

    class Protocol(H11Protocol):
        """HTTP over one connection, closed unless the head of a request arrives, and the client reads answers, in time.

        Uvicorn waits for both forever, so that clients that send half of a request, or read half of an answer, would
        use up all file descriptors.
        """

        _timer: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading = self.loop.call_later(config.timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._await_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_request()

        def send_400_response(self, msg: str) -> None:
            """Refuse what is no HTTP, unless the request whose body it should be has its answer; it gets no other."""
            if self.cycle is not None:
                self.cycle.disconnected = True
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_waiting()
            if self._reading is not None:
                self._reading.cancel()

        def _await_request(self) -> None:
            """Start the timer where it does not run; stop it while a request is answered."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._timer is None:
                self._timer = self.loop.call_later(config.receive_timeout, self._give_up)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            part_of_a_head, _ = self.conn.trailing_data
            if part_of_a_head and not self.transport.is_closing():
                message = f"the head did not arrive within {config.receive_timeout:g} s (server.receive_timeout)."
                body = json.dumps(error_body(message, 408)).encode()
                head = "HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\n"
                self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            if self.transport.get_write_buffer_size():
                self.transport.abort()  # to close would wait until the client reads the rest of an answer
            self.transport.close()

    return Protocol


def uvicorn_settings(server: Application) -> uvicorn.Config:
    """Return the settings with which uvicorn serves an application, among them its limits on time."""
    return uvicorn.Config(
        server.app,
        http=_protocol(server.config),
        log_level="error",  # warnings are about what clients send, such as a line for each request that is no HTTP
        access_log=False,
        proxy_headers=False,  # otherwise any process of this machine could say where its requests come from
        lifespan="off",
        timeout_graceful_shutdown=round(server.config.drain) + _REFUSAL_SECONDS,
    )


def serve(
    engine: Engine | EngineGroup,
    tokenizer: Tokenizer,
    name: str,
    config: ServerConfig,
    bound: socket.socket,
    *,
    api_key: str | None = None,
    read_adapter: Callable[[Path], AdapterMatrices] | None = None,
    classifier: Classifier | None = None,
    router: RouterLogin | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve HTTP requests until SIGTERM or Ctrl-C; then refuse new requests and wait for the running ones to end.

    Args:
      engine, tokenizer, name, config, api_key, read_adapter, classifier: as in `jaxstack.serve.http.Server`.
      bound: the socket, from `bind`.
      router: the router that distributes requests, from `check_router`; None: clients connect to this server.
      report: called with a line of text when the server is ready and when it ends.
    """
    server = Server(
        engine,
        tokenizer,
        name,
        config,
        api_key=api_key,
        loopback=is_loopback(bound),
        read_adapter=read_adapter,
        classifier=classifier,
    )
    # By default Python switches threads every 5 ms, so a busy thread would delay the engine by several steps.
    sys.setswitchinterval(0.0005)
    if router is None:
        running = Running(lambda: engine.state.running + engine.state.waiting, f"serving {name} at {{}} (Ctrl-C ends)")
    else:
        port = bound.getsockname()[1]
        told = Registration(router, port, name, lambda: engine.failure, report=report)
        running = Running(lambda: engine.state.running + engine.state.waiting, background=told.run, on_stop=told.drain)
    run_server(server, bound, running, report)


def is_loopback(bound: socket.socket) -> bool:
    """Return True if only this machine can connect to a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def own_address(router: Address) -> str:
    """Return this host's address at which a router sees it.

    Raises:
      ConfigError: the router's host cannot be found.
    """
    try:
        return local_address(str(router))
    except OSError as error:
        raise ConfigError(f"the host of the router at {router} cannot be found: {error}.") from None


def check_router(router: Address, bound: socket.socket, engine_key: str | None) -> RouterLogin:
    """Check that an engine that listens at a socket can register with a router, and return how.

    Raises:
      ConfigError: there is no key, or the router could not connect to the engine: it does so at the address that the
        engine's notices come from.
    """
    if not engine_key:
        raise ConfigError(
            f"an engine registers with the router's key: set the environment variable {ENGINE_KEY} to the same secret "
            "for --replicas and for --router."
        )
    found = ipaddress.ip_address(own_address(router).partition("%")[0])
    own = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0])
    if own != found and not (own.is_unspecified and own.version >= found.version):
        raise ConfigError(
            f"the router at {router} could not connect to an engine at --host {own}; use --host {found}, the address "
            "at which it sees this machine."
        )
    return RouterLogin(router, engine_key)


@dataclasses.dataclass(frozen=True)
class Running:
    """Work of a server apart from its answers: messages, a task, and the beginning of its end."""

    unfinished: Callable[[], int]
    """Returns the number of requests that are not answered yet."""
    greeting: str | None = None
    """Message when the server is ready, with {} for its address."""
    background: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs beside the server and is cancelled when all requests are answered; if it fails, the server ends."""
    on_stop: Callable[[], None] = lambda: None
    """Called in the event loop when the server is told to end."""


def run_server(server: Application, bound: socket.socket, running: Running, report: Callable[[str], None]) -> None:
    """Serve an application until SIGTERM or Ctrl-C, then until its requests are answered or `server.drain` is over.

    Raises:
      Exception: what the background task has raised.
    """
    tasks: list[asyncio.Task] = []

    class ReportingServer(uvicorn.Server):
        """A uvicorn server that reports when it is ready and when it shuts down."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if running.background is not None:
                tasks.append(asyncio.ensure_future(running.background()))
                tasks[0].add_done_callback(lambda _: setattr(self, "should_exit", True))
            host, port = bound.getsockname()[:2]
            if running.greeting is not None:
                report(running.greeting.format(f"http://{f'[{host}]' if ':' in host else host}:{port}"))

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.get_running_loop().call_later(server.config.drain, server.end)
            running.on_stop()
            await super().shutdown(sockets)
            ending.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        def handle_exit(self, sig: int, frame: object) -> None:
            if not self.should_exit:
                report(f"{signal.Signals(sig).name}: finishing {running.unfinished()} request(s)")
            super().handle_exit(sig, None)

    for stop in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again after shutting down
        signal.signal(stop, lambda *_: None)
    ReportingServer(uvicorn_settings(server)).run(sockets=[bound])
    for task in tasks:
        if not task.cancelled():
            task.result()
