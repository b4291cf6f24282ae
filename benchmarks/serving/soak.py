"""A server under load for minutes: mixed requests, cancellations, malformed bodies and slow readers; looks for leaks.

    python benchmarks/serving/soak.py --run models/qwen2.5-0.5b  # ten minutes
    python benchmarks/serving/soak.py --run runs/served --seconds 120 --clients 16 engine.slots=8

The server is a process of its own on this machine (`python -m jaxstack.serve`). Clients send one request after another
until the time is over, or until there were --requests: completions of mixed lengths, whole and as streams, with
log-probabilities, penalties, several samples and structured output; embeddings; streams that are closed after a few
events; readers that stop reading for a while; bodies that are no JSON, too large, cut off, or ask for what is not
there. A full queue (status 429) is waited for as its Retry-After says.

It fails (exit code 1) if an answer has another status than it should, or is incomplete; if after the last one a request
still runs or waits, or a page of the cache is in use; if the memory of the process has grown by more than --growth MiB
after the first quarter of the time; or if the server does not end by itself with code 0 after SIGTERM. A row with the
counts, memory and latencies is appended to benchmarks/results/soak.jsonl.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.rows import append_rows, print_table

_READY = re.compile(r"serving (\S+) at http://127\.0\.0\.1:(\d+)")
_IDLE_SECONDS = 30.0
_PATIENCE = 180.0
"""Seconds after which a request counts as lost."""
COLUMNS = ("seconds", "requests", "failures", "memory_start_mib", "memory_end_mib", "first_token_p99", "gap_p99")


class Unexpected(Exception):
    """Raised when the server answers otherwise than it should."""


class Soak:
    """Clients of a server, and what they saw.

    Args:
      port: the server's port on this machine.
      vocabulary: number of token ids.
      context: token limit of a request.
      seed: seed of all choices.

    Attributes:
      counts: number of requests of each kind, and of answers of each status.
      failures: what went wrong.
      first_tokens, gaps: seconds to the first event of streams, and between their events.
    """

    def __init__(self, port: int, vocabulary: int, context: int, seed: int = 0):
        self.port = port
        self._vocabulary = vocabulary
        self._context = context
        self._random = random.Random(seed)
        self.counts = collections.Counter[str]()
        self.failures: list[str] = []
        self.first_tokens: list[float] = []
        self.gaps: list[float] = []
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "whole": (30, self._whole),
            "stream": (25, self._stream),
            "cancelled": (15, self._cancelled),
            "slow": (5, self._slow),
            "malformed": (15, self._malformed),
            "cut_off": (5, self._cut_off),
            "embeddings": (5, self._embeddings),
        }

    async def run(self, clients: int, seconds: float, requests: int | None = None) -> None:
        """Send requests from so many clients until the time is over, or there were enough of them."""
        until = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until and (requests is None or self.counts["requests"] < requests):
                await self._one()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _one(self) -> None:
        weights = [weight for weight, _ in self._kinds.values()]
        (name,) = self._random.choices([*self._kinds], weights)
        self.counts["requests"] += 1
        self.counts[name] += 1
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._kinds[name][1]()
        except (Unexpected, OSError, TimeoutError, ValueError, EOFError) as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}"[:500])

    def _body(self) -> dict[str, Any]:
        """Return a request for a completion of a random length, with some of the fields that there are."""
        choose = self._random
        longest = self._context // 2 if choose.random() < 0.1 else self._context // 8
        prompt = [choose.randrange(1, self._vocabulary) for _ in range(choose.randint(1, max(1, longest)))]
        if choose.random() < 0.3:  # a common beginning, for the prefix cache
            prompt = [*range(1, 1 + min(self._context // 4, self._vocabulary - 1)), *prompt][: self._context // 2]
        most = choose.randint(1, max(1, min(64, self._context - len(prompt))))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": most, "seed": choose.randrange(2**31)}
        further: Sequence[dict[str, Any]] = (
            {}, {}, {}, {"temperature": 0}, {"top_p": 0.9, "top_k": 5}, {"logprobs": 3}, {"frequency_penalty": 0.5},
            {"n": 2}, {"guided_regex": "[a-z]{1,8}"},
            {"ignore_eos": True}, {"priority": choose.randint(-1, 1)}, {"logit_bias": {"1": 5}},
        )  # fmt: skip
        return body | choose.choice(further)

    async def _whole(self) -> None:
        body = self._body() | ({"prompt_logprobs": 1} if self._random.random() < 0.1 else {})
        answer = await self._ask("/v1/completions", body)
        if answer is None:
            return
        if len(answer["choices"]) != body.get("n", 1):
            raise Unexpected(f"{len(answer['choices'])} answers of {body.get('n', 1)}")
        tokens = answer["usage"]["completion_tokens"]
        if not 0 <= tokens <= body["max_tokens"] * body.get("n", 1):
            raise Unexpected(f"{tokens} tokens where {body['max_tokens']} were asked for")

    async def _embeddings(self) -> None:
        answer = await self._ask("/v1/embeddings", {"input": self._body()["prompt"]})
        if answer is not None and not abs(np.linalg.norm(answer["data"][0]["embedding"]) - 1) < 1e-2:
            raise Unexpected("an embedding is not of length 1")

    async def _stream(self) -> None:
        began = newest = time.perf_counter()
        last = ""
        async for event in self._events():
            now = time.perf_counter()
            (self.gaps if last else self.first_tokens).append(now - newest)
            newest, last = now, event
        if last and last != "[DONE]":
            raise Unexpected(f"a stream of {newest - began:.1f} s ended with {last[:200]}")

    async def _cancelled(self) -> None:
        left = self._random.randint(0, 5)
        async for _ in self._events():
            left -= 1
            if left <= 0:
                return  # closes the connection

    async def _slow(self) -> None:
        last = "[DONE]"
        async for event in self._events(slow=True):
            last = event
            if self._random.random() < 0.1:
                await asyncio.sleep(self._random.random())
        if last != "[DONE]":
            raise Unexpected(f"a stream ended with {last[:200]}")

    async def _malformed(self) -> None:
        prompt = [1]
        cases: Sequence[tuple[int, str, bytes | dict[str, Any]]] = (
            (400, "/v1/completions", b"{"),
            (400, "/v1/completions", b"\xff\xfe\x00"),
            (400, "/v1/completions", b"[" * 1000),
            (400, "/v1/completions", {}),
            (400, "/v1/completions", {"prompt": prompt, "max_tokens": -1}),
            (400, "/v1/completions", {"prompt": [self._vocabulary + 5]}),
            (400, "/v1/completions", {"prompt": [1] * (self._context + 1)}),
            (400, "/v1/completions", {"prompt": prompt, "temperature": "hot"}),
            (400, "/v1/completions", {"prompt": prompt, "guided_regex": "("}),
            (400, "/v1/chat/completions", {"messages": []}),
            (400, "/v1/responses", {"input": 5}),
            (400, "/v1/messages", {"messages": [], "max_tokens": 1}),
            (400, "/v1/score", {"text_1": "a"}),
            (404, "/v1/completions", {"prompt": prompt, "model": "another"}),
            (404, "/v1/nothing", {}),
            (413, "/v1/completions", b'{"prompt": "' + b"a" * 5_000_000 + b'"}'),
        )
        wanted, path, body = self._random.choice(cases)
        status, _, answer = await self._request(path, body)
        if status != wanted or b"Traceback" in answer:
            raise Unexpected(f"status {status} in place of {wanted} for {path} {str(body)[:80]}: {answer[:200]!r}")

    async def _cut_off(self) -> None:
        """Close the connection in the middle of a head or of a body."""
        content = json.dumps(self._body()).encode()
        head = self._head("/v1/completions", len(content))
        sent = head[: len(head) // 2] if self._random.random() < 0.5 else head + content[: len(content) // 2]
        _, writer = await self._connect()
        with contextlib.closing(writer):
            writer.write(sent)
            await writer.drain()

    async def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None if the queue was full."""
        status, headers, content = await self._request(path, body)
        if status == 429:
            await self._wait(headers)
            return None
        if status != 200:
            raise Unexpected(f"status {status} for {path} {str(body)[:200]}: {content[:300]!r}")
        return json.loads(content)

    async def _wait(self, headers: Mapping[str, str]) -> None:
        if "retry-after" not in headers:
            raise Unexpected("status 429 without Retry-After")
        await asyncio.sleep(float(headers["retry-after"]) * self._random.random())

    async def _events(self, *, slow: bool = False) -> AsyncIterator[str]:
        """Yield the data of each event of a streamed completion; none if the queue was full.

        Args:
          slow: little is received before it is read, so that the server has to wait.
        """
        content = json.dumps(self._body() | {"stream": True}).encode()
        reader, writer = await self._connect(2**14 if slow else 2**16)
        with contextlib.closing(writer):
            writer.write(self._head("/v1/completions", len(content)) + content)
            status, headers = await self._read_head(reader)
            if status == 429:
                await self._wait(headers)
                return
            if status != 200:
                raise Unexpected(f"status {status} for a stream: {await reader.read(300)!r}")
            async for line in reader:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").decode().strip()

    async def _request(self, path: str, body: bytes | Mapping[str, Any] | None) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, headers and content of the answer to a request; without a body it is a GET."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self._connect()
        with contextlib.closing(writer):
            writer.write(self._head(path, len(content), "GET" if body is None else "POST") + content)
            status, headers = await self._read_head(reader)
            return status, headers, await reader.read()

    async def _connect(self, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=connection, limit=limit)

    def _head(self, path: str, size: int, method: str = "POST") -> bytes:
        lines = (f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close")
        return "\r\n".join((*lines, f"Content-Length: {size}", "", "")).encode()

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        self.counts[f"status_{status}"] += 1
        return status, {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}

    async def gauges(self) -> dict[str, float]:
        """Return the numbers of running and waiting requests, and the share of the cache's pages that is in use."""
        _, _, content = await self._request("/metrics", None)
        names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
        found = {k: float(v) for k, v in re.findall(rf"^vllm:({names}){{.*}} (\S+)$", content.decode(), re.M)}
        if len(found) != 3:
            raise Unexpected(f"gauges are missing in /metrics; found {[*found]}")
        return found

    async def until_idle(self) -> None:
        """Wait until nothing runs, waits or has pages; note a failure if that does not come."""
        until = time.monotonic() + _IDLE_SECONDS
        while any((found := await self.gauges()).values()):
            if time.monotonic() > until:
                self.failures.append(f"{found} {_IDLE_SECONDS:g} s after the last request")
                return
            await asyncio.sleep(0.2)


def resident_mib(process: int) -> float:
    """Return the memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


@contextlib.contextmanager
def start_server(run: str, settings: Sequence[str]):
    """Start a server; yield its process and its port. It ends with the block, if it has not before."""
    words = [sys.executable, "-m", "jaxstack.serve", "--run", run, "--port", "0", *settings]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := _READY.match(line):
                yield process, int(found[2])
                return
        raise SystemExit("the server did not start.")
    finally:
        process.kill()
        process.wait()


def soak(
    run: str,
    seconds: float,
    clients: int,
    growth: float,
    *,
    requests: int | None = None,
    settings: Sequence[str] = (),
    seed: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Run a server under load; return the fields of a row, and what went wrong.

    Args:
      run: run directory or checkpoint.
      seconds: duration of the load.
      clients: number of clients at a time.
      growth: MiB by which the memory of the process may grow after the first quarter of the time.
      requests: number of requests after which it ends earlier; None: there is none.
      settings: settings of the server.
      seed: seed of the requests.
    """
    with start_server(run, settings) as (process, port):
        return asyncio.run(_soak(process, port, seconds, clients, growth, requests, seed))


async def _soak(
    process: "subprocess.Popen[str]",
    port: int,
    seconds: float,
    clients: int,
    growth: float,
    requests: int | None,
    seed: int,
) -> tuple[dict[str, Any], list[str]]:
    load = Soak(port, 2, 64, seed)
    models = json.loads((await load._request("/v1/models", None))[2])
    load._context = models["data"][0]["max_model_len"]
    load._vocabulary = await _find_vocabulary(load)
    load.counts.clear()
    began = time.monotonic()
    first = None if requests is None else requests // 4
    await load.run(clients, seconds / 4, first)
    memory = resident_mib(process.pid)
    await load.run(clients, seconds * 3 / 4, requests)
    await load.until_idle()
    took = time.monotonic() - began
    after = resident_mib(process.pid)
    if after - memory > growth:
        load.failures.append(f"the server's memory grew from {memory:.0f} to {after:.0f} MiB")
    process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(process.wait, 60)
    if code != 0:
        load.failures.append(f"the server ended with code {code}")
    row = {
        "work": "soak",
        "implementation": "jaxstack",
        "seconds": took,
        "clients": clients,
        **load.counts,
        "failures": len(load.failures),
        "memory_start_mib": memory,
        "memory_end_mib": after,
        "first_token_p99": _percentile(load.first_tokens, 99),
        "gap_p50": _percentile(load.gaps, 50),
        "gap_p99": _percentile(load.gaps, 99),
    }
    return row, load.failures


async def _find_vocabulary(load: Soak) -> int:
    """Return the number of token ids, by asking which are taken."""
    low, high = 1, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        status, _, _ = await load._request("/v1/completions", {"prompt": [middle], "max_tokens": 1})
        low, high = (middle, high) if status == 200 else (low, middle)
    return high


def _percentile(values: Sequence[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of the load (default 600)")
    parser.add_argument("--requests", type=int, help="end after so many requests, such as 10000")
    parser.add_argument("--clients", type=int, default=32, help="clients at a time (default 32)")
    parser.add_argument("--growth", type=float, default=200.0, help="MiB that the memory may grow (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings of the server")
    args = parser.parse_intermixed_args()
    row, failures = soak(
        args.run,
        args.seconds,
        args.clients,
        args.growth,
        requests=args.requests,
        settings=args.settings,
        seed=args.seed,
    )
    row["device"] = jax.devices()[0].device_kind  # that of the server, which has ended
    print_table([row], COLUMNS)
    for kind, count in collections.Counter(failures).most_common(20):
        print(f"{count} x {kind}")
    append_rows("soak", [row])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
