"""The router in front of engines that fail: servers on this machine's own address that answer as the tests say."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest

pytest.importorskip("uvicorn")
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError
from jaxstack.serve.__main__ import make_parser
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.listen import bind, check_router, uvicorn_settings
from jaxstack.serve.metrics import is_metrics
from jaxstack.serve.registration import ENGINE_KEY, ROUTE, key_header
from jaxstack.serve.replicas import engine_arguments
from jaxstack.serve.router import Router
from jaxstack.serve.tasks import run_all, unless
from jaxstack.serve.upstream import Address, EngineGone, Headers, Unsendable, forwarded, send, whole_events

JSON: Headers = [(b"content-type", b"application/json")]
KEY = "the engines' own key"


class Engine:
    """A server that answers as an engine does, and keeps what it was asked."""

    def __init__(self, number: int = 0):
        self.id = f"engine{number}"
        self.adapters: dict[str, str] = {}
        self.refuses: set[str] = set()
        self.asked: list[bytes] = []
        self.metrics = 'vllm:generation_tokens_total{m="x"} 1\n'
        posted = {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posted.items()]
        routes += [Route("/metrics", lambda _: PlainTextResponse(self.metrics))]
        self.app = Starlette(routes=[*routes, Route("/{path:path}", self.tell, methods=["GET", "POST"])])
        self.app.router.redirect_slashes = False
        self.port = 0

    async def load(self, request: Request) -> Response:
        fields = await request.json()
        if fields["lora_name"] in {*self.refuses, *self.adapters}:
            return JSONResponse({"error": {"message": "refused"}}, 400)
        self.adapters[fields["lora_name"]] = fields["lora_path"]
        return JSONResponse({"status": "loaded"})

    async def unload(self, request: Request) -> Response:
        found = self.adapters.pop((await request.json())["lora_name"], None)
        return JSONResponse({}, 404 if found is None else 200)

    async def tell(self, request: Request) -> Response:
        self.asked.append(request.scope["raw_path"])
        await asyncio.sleep(9 if request.url.path == "/slow" else 0)
        return JSONResponse({"engine": self.id, "headers": dict(request.headers)}, headers={"x-engine": self.id})


@contextlib.asynccontextmanager
async def serving(settings: uvicorn.Config) -> AsyncIterator[int]:
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(settings)
    task = asyncio.ensure_future(server.serve([bound]))
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    async with serving(uvicorn.Config(engine.app, lifespan="off", log_level="error")) as port:
        engine.port = port
        yield engine


class Asked:
    """A router that runs, and requests to it."""

    def __init__(self, port: int, said: list[str]):
        self.address = Address("127.0.0.1", port)
        self.said = said

    async def ask(self, method: str, path: str, body: Any = None, headers: Headers = JSON) -> tuple[int, str]:
        content = b"" if body is None else json.dumps(body).encode()
        async with await send(self.address, method, path, headers, content) as answer:
            return answer.status, (await answer.read()).decode()

    async def register(self, engine: Engine, *, key: str = KEY, **fields: Any) -> int:
        notice = {"id": engine.id, "port": engine.port, "model": "m", **fields}
        return (await self.ask("POST", ROUTE, notice, [*JSON, *key_header(key)]))[0]

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(10):
            while json.loads((await self.ask("GET", "/health"))[1])["engines"] != count:
                await asyncio.sleep(0.02)

    async def change(self, kind: str, name: str) -> int:
        fields = {"lora_name": name} | ({"lora_path": name} if kind == "load" else {})
        return (await self.ask("POST", f"/v1/{kind}_lora_adapter", fields))[0]


@contextlib.asynccontextmanager
async def routing(api_key: str | None = None, **limits: Any) -> AsyncIterator[Asked]:
    said: list[str] = []
    router = Router(ServerConfig(**limits), loopback=True, api_key=api_key, engine_key=KEY, report=said.append)
    async with serving(uvicorn_settings(router)) as port:
        watching = asyncio.ensure_future(router.watch())
        try:
            yield Asked(port, said)
        finally:
            watching.cancel()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def closed_port() -> int:
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def test_an_engine_that_cannot_be_reached_gets_no_requests():
    async def scenario() -> None:
        async with routing(timeout=0.6) as router:
            engine = Engine()
            engine.port = closed_port()
            for _ in range(3):
                assert await router.register(engine) == 200
                await asyncio.sleep(0.1)
            status, answer = await router.ask("POST", "/v1/completions", {"prompt": "a"})
            assert status == 504 and "no engine takes requests" in answer, answer
            assert any("cannot connect" in line for line in router.said), router.said
            async with running(Engine(1)) as other:
                await router.register(other)
                await router.wait_for(1)
                assert (await router.ask("GET", "/v1/models"))[0] == 200

    run(scenario)


def test_one_deadline_for_engines_that_take_a_connection_and_no_request():
    async def scenario() -> None:
        engine = Engine()
        async with routing(timeout=0.8) as router, running(engine):
            await router.register(engine)
            await router.wait_for(1)
            began = asyncio.get_running_loop().time()
            status, answer = await router.ask("POST", "/slow", {})
            assert status == 504 and "has not answered" in answer, answer
            assert asyncio.get_running_loop().time() - began < 3

    run(scenario)


def test_only_the_engine_key_registers_and_clients_keys_are_checked_before_bodies():
    async def scenario() -> None:
        engine = Engine()
        async with routing(api_key="clients") as router, running(engine):
            assert await router.register(engine, key="clients") == 401
            forged = [*JSON, *key_header("clients"), (b"x-forwarded-for", b"203.0.113.9")]
            assert (await router.ask("POST", ROUTE, {}, forged))[0] == 401
            assert await router.register(engine) == 200
            assert await router.register(Engine(1), model="another", port=1) == 409
            await router.wait_for(1)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
            reader, writer = await asyncio.open_connection(*router.address)
            writer.write(head)  # and no body
            assert b" 401 " in await reader.readline()
            writer.close()
            assert (await router.ask("POST", "/v1/completions", {}, [*JSON, *key_header("clients")]))[0] == 200

    run(scenario)


@pytest.mark.longer
def test_adapters_are_those_of_the_newest_requests_in_all_engines():
    async def scenario() -> None:
        first, second = Engine(1), Engine(2)
        async with routing() as router, running(first), running(second):
            assert await router.change("load", "a") == 503
            await router.register(first)
            await router.wait_for(1)
            assert await router.change("load", "a") == await router.change("load", "b") == 200
            second.refuses.add("a")
            await router.register(second)
            await asyncio.sleep(0.3)
            assert any("cannot load the adapter 'a'" in line for line in router.said), router.said
            assert json.loads((await router.ask("GET", "/health"))[1])["engines"] == 1
            assert await router.change("unload", "a") == 200
            await router.wait_for(2)
            assert first.adapters == second.adapters == {"b": "b"}
            second.refuses.add("c")
            assert await router.change("load", "c") == 400  # one of two
            assert json.loads((await router.ask("GET", "/health"))[1])["engines"] == 2
            assert first.adapters == second.adapters == {"b": "b"}
            assert await router.change("load", "b") == 400  # the name is taken
            assert first.adapters == second.adapters == {"b": "b"}

    run(scenario)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/v1/completions", {"error": {"type": "server_error"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
        ("/v1/responses", {"type": "error", "code": "server_error", "sequence_number": 2}),
    ],
)
def test_a_broken_stream_ends_with_an_error_of_its_api(path, wanted):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            body = b"data: 1\n\ndata: 2\n\ndata: {cut"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = Engine()
        engine.port = server.sockets[0].getsockname()[1]
        async with server, routing() as router:
            await router.register(engine)
            await router.wait_for(1)
            status, text = await router.ask("POST", path, {"stream": True})
            events = text.removesuffix("\n\n").split("\n\n")
            assert status == 200 and events[:2] == ["data: 1", "data: 2"] and len(events) == 3, text
            *kind, data = events[2].splitlines()
            assert kind == ([] if path == "/v1/completions" else ["event: error"])
            found = json.loads(data.removeprefix("data: "))
            assert "has ended; ask again" in data
            assert {**found, **wanted, "error": {**found.get("error", {}), **wanted.get("error", {})}} == {
                "error": {},
                **found,
            }

    run(scenario)


def test_paths_and_headers_pass_as_they_are_and_engines_stay_unseen():
    async def scenario() -> None:
        engine = Engine()
        async with routing() as router, running(engine):
            await router.register(engine)
            await router.wait_for(1)
            engine.asked.clear()
            for path in ("/v1/models/my%20model", "/v1/models/%C3%A9?x=%20", "/v1/load_lora_adapter/"):
                assert (await router.ask("POST", path, {}))[0] == 200
            assert engine.asked == [b"/v1/models/my%20model", b"/v1/models/%C3%A9", b"/v1/load_lora_adapter/"]
            sent = [(b"x-forwarded-for", b"1"), (b"forwarded", b"for=1"), (b"x-mine", b"1"), (b"x-kept", b"1")]
            headers = dict(json.loads((await router.ask("GET", "/", headers=sent))[1])["headers"])
            assert headers["x-kept"] == "1" and not {"x-forwarded-for", "forwarded"} & set(headers)
            async with await send(router.address, "GET", "/", [], b"") as answer:
                names = [name for name, _ in forwarded(answer.headers)]
            assert b"x-engine" in names and b"date" not in names

    run(scenario)


def test_headers_that_connection_names_are_not_forwarded():
    sent = [(b"Connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"X-Forwarded-For", b"1"), (b"x-kept", b"1")]
    assert forwarded(sent) == [(b"x-kept", b"1")]


def test_metrics_that_cannot_be_read_are_those_told_before():
    async def scenario() -> None:
        engine = Engine()
        async with routing() as router, running(engine):
            await router.register(engine)
            await router.wait_for(1)
            engine.metrics = "# TYPE a counter\na_total 3\n"
            assert "a_total 3.0" in (await router.ask("GET", "/metrics"))[1]
            engine.metrics = "a_total{ three\n"
            assert not is_metrics(engine.metrics)
            assert "a_total 3.0" in (await router.ask("GET", "/metrics"))[1]

    run(scenario)


def test_a_result_that_comes_too_late_is_closed():
    class Result:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def scenario() -> None:
        result = Result()

        async def work() -> Result:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(9)
            return result

        async def until(seconds: float) -> NoReturn:
            await asyncio.sleep(seconds)
            raise EngineGone(f"{seconds:g}")

        with pytest.raises(EngineGone, match=r"0\.01"):
            await unless(work(), until(9), until(0.01))
        await asyncio.sleep(0.01)
        assert result.closed
        assert await unless(asyncio.sleep(0, "done"), until(9)) == "done"

    run(scenario)


def test_events_are_passed_on_whole():
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"data: 1\n", b"\ndata: 2\n\nda", b"ta: 3\n\n", b"data: cut"):
            yield chunk

    async def scenario() -> None:
        found = [event async for event in whole_events(chunks())]
        assert found == [b"data: 1\n\ndata: 2\n\n", b"data: 3\n\n", b"data: cut"]

    run(scenario)


def test_a_request_that_is_no_http_is_not_sent():
    async def scenario() -> None:
        with pytest.raises(Unsendable):
            await send(Address("127.0.0.1", closed_port()), "GET", "/a b", [], b"")

    run(scenario)


def test_all_engines_load_the_checkpoint_that_is_newest_at_the_start(tmp_path):
    def arguments(*more: str) -> list[str]:
        args = make_parser().parse_args(["--run", str(tmp_path), "--replicas", "2", *more])
        return engine_arguments(args, Address("127.0.0.1", 8000), "127.0.0.1", print)

    assert "--step" not in arguments()  # no run
    (tmp_path / "config.yaml").write_text("{}")
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        for step in (1, 2):
            manager.save(step, {"x": np.zeros(1)}, wait=True)
    assert arguments()[-2:] == ["--step", "2"]
    assert arguments("--step", "1")[-2:] == ["--step", "1"]


def test_the_error_of_one_task_ends_both():
    ended = []

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ConfigError("wrong")

    async def waits() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            ended.append(True)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="wrong"):
            await run_all(waits, fails)
        assert ended == [True]

    run(scenario)


def test_tasks_that_are_cancelled_finish_what_they_do_at_their_end():
    ended = []

    async def waits(seconds: float) -> None:
        try:
            await asyncio.sleep(9)
        finally:
            await asyncio.sleep(seconds)
            ended.append(seconds)

    async def scenario() -> None:
        task = asyncio.ensure_future(run_all(partial(waits, 0), partial(run_all, partial(waits, 0.05))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [0, 0.05]

    run(scenario)


def test_a_key_has_the_bytes_of_the_environment():
    assert key_header("\udcff") == [(b"authorization", b"Bearer \xff")]


@pytest.mark.parametrize(
    ("host", "router", "key", "message"),
    [
        ("127.0.0.1", "127.0.0.1", None, ENGINE_KEY),
        ("127.0.0.1", "203.0.113.7", "k", "could not connect to an engine at --host 127.0.0.1"),
        ("127.0.0.1", "nowhere.invalid", "k", "cannot be found"),
        ("127.0.0.1", "127.0.0.1", "k", None),
        ("0.0.0.0", "127.0.0.1", "k", None),
    ],
)
def test_an_engine_needs_the_key_and_an_address_that_the_router_reaches(host, router, key, message):
    if router == "203.0.113.7":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex((router, 1)):
                pytest.skip("this machine has no network")
    with contextlib.closing(bind(host, 0)) as bound:
        if message is None:
            assert check_router(Address(router, 8000), bound, key) == (Address(router, 8000), key)
        else:
            with pytest.raises(ConfigError, match=message):
                check_router(Address(router, 8000), bound, key)
