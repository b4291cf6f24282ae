"""Adapters that requests load and unload: of one engine, and of all engines of a router."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.decoding.engine import Engine
from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.engine_choice import KnownEngine
from jaxstack.serve.registration import key_header
from jaxstack.serve.tasks import unless
from jaxstack.serve.upstream import EngineGone, Headers, send

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
_SECONDS = 600.0
_NOT_THERE = 404


class LoadAdapterRequest(Component):
    """JSON body of a request to /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str = Field(min_length=1)
    """Name by which requests ask for the adapter."""
    lora_path: str = Field(min_length=1)
    """Its directory, below `server.adapter_folder`."""


class UnloadAdapterRequest(Component):
    """JSON body of a request to /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: str = Field(min_length=1)
    """Name of the adapter."""


class AdapterLoader:
    """Loads adapters from directories into an engine.

    Args:
      engine: the engine.
      read: reads the matrices in a directory.
      folder: only directories below it may be loaded by requests; None: none.
    """

    def __init__(
        self, engine: Engine | EngineGroup, read: Callable[[Path], AdapterMatrices] | None, folder: str | None
    ):
        self._engine = engine
        self._read = read
        self._folder = None if folder is None else Path(folder).resolve()

    def load(self, name: str, directory: str) -> None:
        """Load the adapter in a directory that a request names, relative to the folder or absolute.

        Raises:
          ConfigError: it is not allowed, is no adapter of the model, or there is no room for it.
        """
        if self._folder is None or self._read is None:
            raise ConfigError(
                "this server loads no adapters for requests; start it with server.adapter_folder=DIR and "
                "engine.adapters=N."
            )
        wrong = ConfigError(f"lora_path must be a directory below server.adapter_folder; found {directory[:200]!r}.")
        try:
            path = (self._folder / directory).resolve()
            below = path.is_relative_to(self._folder) and path.is_dir()
        except (OSError, ValueError):  # too long, with a null character, or not to be searched
            raise wrong from None
        if not below:
            raise wrong
        self._engine.load_adapter(name, self._read(path))


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole answer of an engine."""

    status: int
    headers: dict[str, str]
    content: bytes


class SharedAdapters:
    """The newest change of each adapter that requests have loaded or unloaded.

    Args:
      api_key: key that the engines ask of clients; None: they ask for none.

    Attributes:
      lock: held while adapters are changed, by `change` and by those that call `reconcile`.
    """

    def __init__(self, api_key: str | None):
        self.lock = asyncio.Lock()
        self._headers: Headers = [(b"content-type", b"application/json"), *key_header(api_key)]
        self._wanted: dict[str, bytes | None] = {}
        """Name of each adapter -> body of the request that has loaded it; None if one has unloaded it."""

    async def change(self, engines: Sequence[KnownEngine], path: str, body: bytes, headers: Headers) -> Whole | None:
        """Load or unload an adapter in all engines, or in none; `lock` is held.

        Engines that end meanwhile do not count. `reconcile` then changes those that are not `is_current`: they have
        missed the change, or have made one that others have refused.

        Returns:
          The answer to the request; None if no engine has answered.
        """
        name = _adapter_name(body)
        wanted = body if path == LOAD else None
        found = await asyncio.gather(*(_post(engine, path, body, headers) for engine in engines))
        for engine, answer in zip(engines, found, strict=True):
            if answer is None:
                engine.adapters.pop(name, None)  # it may have made the change
            elif answer.status == 200:
                engine.adapters[name] = wanted
        answers = [answer for answer in found if answer is not None]
        done = [answer for answer in answers if answer.status == 200]
        failed = [answer for answer in answers if answer.status != 200]
        if path == UNLOAD and not answers and self._wanted.get(name) is not None:
            done = [Whole(200, {"content-type": "application/json"}, _unloaded(name))]
        if done and (path == UNLOAD or not failed) and all(answer.status == _NOT_THERE for answer in failed):
            self._wanted[name] = wanted
            return done[0]
        if name not in self._wanted and len(failed) < len(found):  # some have made it, or may have
            self._wanted[name] = None
            for engine, answer in zip(engines, found, strict=True):
                if answer in failed:
                    engine.adapters[name] = None
        return next(iter([*failed, *answers]), None)

    def is_current(self, engine: KnownEngine) -> bool:
        """Return True if an engine has made the newest changes."""
        return not self._missing(engine)

    def _missing(self, engine: KnownEngine) -> list[str]:
        return [name for name, body in self._wanted.items() if engine.adapters.get(name, b"") != body]

    async def reconcile(self, engine: KnownEngine) -> str | None:
        """Make the newest changes in an engine that has missed them; `lock` is held.

        Returns:
          Reason why it could not; None if it has made all.

        Raises:
          EngineGone: it does not answer.
        """
        for name in self._missing(engine):
            body = self._wanted[name]
            # It may have the adapter: of a change that it has not answered, or of an earlier load.
            steps: list[tuple[str, bytes, tuple[int, ...]]] = [
                (UNLOAD, json.dumps({"lora_name": name}).encode(), (200, 400, _NOT_THERE))
            ]
            if body is not None:
                steps.append((LOAD, body, (200,)))
            for path, content, expected in steps:
                answer = await _post(engine, path, content, self._headers)
                if answer is None:
                    raise EngineGone(f"{engine.address}: no answer to {path}")
                if answer.status not in expected:
                    told = answer.content.decode(errors="replace")[:300]
                    return f"it cannot {'load' if path == LOAD else 'unload'} the adapter {name!r}: {told}"
            engine.adapters[name] = body
        return None


async def _post(engine: KnownEngine, path: str, body: bytes, headers: Headers) -> Whole | None:
    """Send a request for an adapter to an engine; return its answer, or None if there is none."""

    async def ask() -> Whole:
        async with await send(engine.address, "POST", path, headers, body) as answer:
            return Whole(answer.status, answer.text_headers, await answer.read())

    try:
        async with asyncio.timeout(_SECONDS):
            return await unless(ask(), engine.until_lost())
    except (EngineGone, TimeoutError):
        return None


def _unloaded(name: str) -> bytes:
    return json.dumps({"status": "unloaded", "lora_name": name}).encode()


def _adapter_name(body: bytes) -> str:
    try:
        return str(json.loads(body)["lora_name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
