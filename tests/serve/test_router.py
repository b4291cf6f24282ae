"""The router in front of several engines: its choice, its sums, and real engines that die under load."""

import gc
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from jaxstack.errors import ConfigError
from jaxstack.launch.child import descendants
from jaxstack.serve import replicas
from jaxstack.serve.__main__ import API_KEY, main
from jaxstack.serve.engine_choice import SeenPrefixes, choose, prefix_blocks
from jaxstack.serve.metrics import add_up
from jaxstack.serve.registration import ENGINE_KEY, parse_url
from tests.word_models import make_word_model

ROOT = Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}
NODES = {"JAXSTACK_NODES": "2", "JAXSTACK_NODE_RANK": "0", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("loads", "known", "chosen"),
    [
        ([3, 1, 2], [0, 0, 0], 1),
        ([3, 1, 2], [4, 0, 2], 0),
        ([5, 5, 1], [4, 4, 0], 0),
        ([9, 1, 2], [4, 0, 2], 1),
        ([5, 4, 0], [2, 2, 0], 1),
        ([0], [0], 0),
    ],
)
def test_the_engine_that_knows_most_of_a_prompt_is_chosen_unless_it_is_busier(loads, known, chosen):
    assert choose(loads, known) == chosen


def test_beginnings_of_prompts_are_compared_block_by_block():
    system = {"role": "system", "content": "s" * 600}
    first = prefix_blocks(json.dumps({"messages": [system, {"role": "user", "content": "a" * 400}]}).encode())
    other = prefix_blocks(json.dumps({"messages": [system, {"role": "user", "content": "b" * 400}]}).encode())
    assert len(first) == len(other) == 4 and first[:2] == other[:2] and first[2] != other[2]
    seen = SeenPrefixes()
    assert seen.count_known(first) == 0
    seen.add(first)
    assert seen.count_known(first) == 4 and seen.count_known(other) == 2
    text = prefix_blocks(json.dumps({"prompt": "x" * 512}).encode())
    assert len(text) == 2 and text != prefix_blocks(json.dumps({"prompt": "x" * 512, "model": "adapter"}).encode())
    assert prefix_blocks(b"no json") == prefix_blocks(b"[1]") == prefix_blocks(b'{"prompt": "short"}') == []


def test_metrics_of_engines_are_added_and_those_of_ended_ones_counted_on():
    def told(tokens: int, running: int, usage: float) -> str:
        return (
            f"# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{{m=\"x\"}} {tokens}\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{m=\"x\"}} {running}\n"
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{m=\"x\"}} {usage}\n"
            f"# TYPE t histogram\nt_bucket{{le=\"1\"}} {tokens}\nt_bucket{{le=\"+Inf\"}} {tokens}\n"
            f"t_count {tokens}\nt_sum 1\n"
        )  # fmt: skip

    ended = add_up([], ["", told(100, 7, 0.9)])
    assert "running" not in ended
    text = add_up([told(1, 2, 0.25), told(10, 3, 0.75)], [ended])
    for line in (
        'vllm:generation_tokens_total{m="x"} 111.0', 'vllm:num_requests_running{m="x"} 5.0',
        'vllm:kv_cache_usage_perc{m="x"} 0.5', 't_bucket{le="1"} 111.0', "t_sum 3.0",
    ):  # fmt: skip
        assert line in text.splitlines(), text


@pytest.mark.parametrize("url", ["host:80", "https://host:80", "http://host", "http://host:99999", "http://[::1:80"])
def test_a_router_is_an_address_of_http(url):
    assert parse_url("http://node-0.cluster:8000/") == ("node-0.cluster", 8000)
    assert parse_url("http://[::1]:8000") == ("::1", 8000)
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        parse_url(url)


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (["--replicas", "0"], {}, "--replicas must be at least 1"),
        (["--replicas", "2", "--router", "http://h:1"], {}, "without --router"),
        (["--replicas", "2"], {**NODES, API_KEY: "k"}, f"variable {ENGINE_KEY}"),
        (["--router", "http://127.0.0.1:1", "--port", "0"], {}, ENGINE_KEY),
        (["--router", "http://127.0.0.1:1", "--port", "0"], {ENGINE_KEY: " "}, "is empty"),
        (
            ["--replicas", "2", "--port", "0"],
            {**NODES, ENGINE_KEY: "k"},
            "need a --host that the others can reach",
        ),
        (
            ["--replicas", "2", "--port", "0"],
            {**NODES, "JAXSTACK_NODE_RANK": "1", ENGINE_KEY: "k"},
            "need a --port that is not 0",
        ),
    ],
)
def test_what_cannot_be_routed_is_one_message(options, variables, message, monkeypatch, tmp_path, capsys):
    for name in (API_KEY, ENGINE_KEY):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--run", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_process_of_a_router_collects_garbage(monkeypatch, tmp_path):
    collects = list[bool]()
    monkeypatch.setattr(replicas, "serve_replicas", lambda *_: collects.append(gc.isenabled()))
    assert main(["--run", str(tmp_path), "--replicas", "2"]) == 0
    assert collects == [True]


class Served:
    """A router and its engines in processes, and requests to it."""

    def __init__(self, model: Path, *arguments: str, **variables: str):
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(model.parent / "cache"), **variables,
        }  # fmt: skip
        command = [sys.executable, "-m", "jaxstack.serve", "--run", str(model), *arguments]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.port = 0

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.said.append(line)

    def wait_for(self, pattern: str, count: int = 1, seconds: float = 240) -> list[str]:
        """The groups of a pattern in what was said, once it is there so often."""
        deadline = time.monotonic() + seconds
        while len(found := re.findall(pattern, "".join(self.said))) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.1)
        return found

    def wait_for_engines(self, count: int) -> None:
        """Until so many engines take requests."""
        if not self.port:
            self.port = int(self.wait_for(r"router of .* at http://127\.0\.0\.1:(\d+)")[0])
        deadline = time.monotonic() + 240
        while json.loads(self.get("/health")[1])["engines"] != count:
            assert time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.2)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def post(self, body: dict, headers: dict = JSON) -> tuple[int, str]:
        """Status and body; a stream is read to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=200)
        connection.request("POST", "/v1/completions", json.dumps(body), {**JSON, **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        found = []
        for pid in descendants(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--router" in words:
                found.append(pid)
        return found


SMALL = ("engine.slots=4", "engine.chunk=16", "engine.decode_steps=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_word_model("llama", tmp_path_factory.mktemp("routed") / "llama")


@pytest.fixture(scope="module")
def served(model):
    running = Served(model, "--replicas", "3", "--port", "0", *SMALL)
    try:
        running.wait_for_engines(3)
        yield running
    finally:
        running.process.kill()


def ask(served: Served, number: int) -> tuple[int, str]:
    body = {"prompt": [3, 4, 5 + number % 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return served.post({**body, "stream": number % 3 == 0})


def text_of(answer: str) -> tuple[str, bool]:
    """The text of an answer or a stream, and whether it is whole."""
    if not answer.startswith("data: "):
        return json.loads(answer)["choices"][0]["text"], True
    events = [event.removeprefix("data: ") for event in answer.split("\n\n") if event]
    whole = events[-1] == "[DONE]"
    assert whole or json.loads(events[-1])["error"]["message"].startswith("the engine that answered")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]), whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda fault: fault.name)
def test_no_request_is_lost_when_an_engine_ends_under_load(served, fault):
    """Of three engines one is killed, suspended or told to end while 24 clients ask.

    Whole answers are all there; streams that had begun on the lost engine end with an error event. Then three engines
    take requests again.
    """
    served.wait_for_engines(3)
    wanted = [text_of(ask(served, number)[1]) for number in range(7)]
    stop = threading.Event()

    def client(start: int) -> list[tuple[int, int, str]]:
        found = []
        number = start
        while not stop.is_set():
            found.append((number, *ask(served, number)))
            number += 24
        return found

    with ThreadPoolExecutor(24) as pool:
        clients = [pool.submit(client, start) for start in range(24)]
        time.sleep(2)
        victim = served.engines()[1]
        os.kill(victim, fault)
        time.sleep(14 if fault == signal.SIGSTOP else 4)
        stop.set()
        answers = [answer for future in clients for answer in future.result()]
    if fault == signal.SIGSTOP:
        os.kill(victim, signal.SIGKILL)
    assert len(answers) > 48 and {status for _, status, _ in answers} == {200}, answers
    cut = 0
    for number, _, answer in answers:
        text, whole = text_of(answer)
        cut += not whole
        assert (text == wanted[number % 7][0]) if whole else wanted[number % 7][0].startswith(text)
        assert whole or number % 3 == 0
    assert cut <= 4 if fault != signal.SIGTERM else cut == 0
    served.wait_for_engines(3)
    _, metrics = served.get("/metrics")
    assert "jaxstack:router_engines 3.0" in metrics


@pytest.mark.exhaustive
def test_every_route_passes_through(served):
    assert json.loads(served.get("/v1/models")[1])["data"][0]["id"] == "llama"
    assert served.get("/")[1].startswith("<!")
    status, answer = served.get("/nothing")
    assert status == 404 and "there is nothing at /nothing" in json.loads(answer)["error"]["message"]
    status, answer = served.post({"prompt": [3], "max_tokens": 10**9})
    assert status == 400 and "max_tokens" in json.loads(answer)["error"]["message"]
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    for path in ("/v1/models", "/health"):  # an engine's and the router's own
        connection.request("GET", path, headers={"X-Request-Id": "mine"})
        response = connection.getresponse()
        assert response.read() and response.headers.get_all("X-Request-Id") == ["mine"]
    connection.request("GET", "/health", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 403


@pytest.mark.exhaustive
def test_requests_are_answered_before_the_end_and_nothing_is_left(served):
    """SIGTERM to the router while a stream and a whole answer are under way."""
    served.wait_for_engines(3)
    pids = served.engines()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, served, number) for number in range(12)]
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        found = [future.result() for future in answers]
    assert all(status == 200 and text_of(answer)[1] for status, answer in found), found
    assert served.process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.exhaustive
def test_engines_of_two_nodes_register_with_the_key(model):
    """One command on two nodes, here two processes: the first has the router, and both an engine."""
    from jaxstack.launch.supervisor import free_port

    port = free_port()
    variables = {**NODES, API_KEY: "secret", ENGINE_KEY: "the engines' secret"}
    options = ("--replicas", "1", "--host", "0.0.0.0", "--port", str(port), *SMALL)
    first = Served(model, *options, **variables)
    second = Served(model, *options, **{**variables, "JAXSTACK_NODE_RANK": "1"})
    try:
        first.port = port
        first.wait_for("router of 1 engine\\(s\\) on 2 node\\(s\\)")
        first.wait_for_engines(2)
        body = {"prompt": [3, 4], "max_tokens": 4}
        assert first.post(body)[0] == 401
        assert first.post(body, {"Authorization": "Bearer secret"})[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", port)
        notice = json.dumps({"id": "x", "port": 1, "model": "m"})
        connection.request("POST", "/router/engines", notice, {**JSON, "Authorization": "Bearer secret"})
        assert connection.getresponse().status == 401
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(60) == 0
        first.wait_for_engines(1)
        assert first.post(body, {"Authorization": "Bearer secret"})[0] == 200
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0
    finally:
        first.process.kill()
        second.process.kill()


@pytest.mark.exhaustive
def test_a_wrong_configuration_ends_the_router_with_its_code(tmp_path):
    running = Served(tmp_path / "nothing", "--replicas", "2", "--port", "0")
    assert running.process.wait(120) == 2
    time.sleep(0.5)
    said = "".join(running.said)
    assert "ended with exit code 2; its message is above" in said and "Traceback" not in said, said
