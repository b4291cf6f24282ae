"""The router's records of its engines, and its choice among them: the one that has seen most of a prompt's beginning.

An engine keeps the keys and values of prompts for later ones with the same beginning (its prefix cache), so that a
chat, or many requests with one system prompt, are answered faster by the engine that had them before. The router does
not tokenize: it compares hashes of the text, block by block, with those of the requests that each engine has had.
"""

import asyncio
import collections
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxstack.serve.registration import EngineNotice
from jaxstack.serve.upstream import Address, EngineGone

_BLOCK_CHARACTERS = 256
_MOST_BLOCKS = 128
"""Blocks of a prompt that are compared; two prompts that are alike so far are alike for this purpose."""
_REMEMBERED = 2**15
"""Number of blocks that are remembered of each engine; the least recently used ones are forgotten."""
_SLACK = 4
"""Number of requests by which an engine with the beginning of a prompt may be busier than the least busy one."""


class SeenPrefixes:
    """Hashes of the beginnings of prompts that an engine has had."""

    def __init__(self) -> None:
        self._seen: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def count_known(self, blocks: Sequence[bytes]) -> int:
        """Return how many blocks from the first on the engine has had."""
        return next((number for number, block in enumerate(blocks) if block not in self._seen), len(blocks))

    def add(self, blocks: Sequence[bytes]) -> None:
        """Note that the engine is given a prompt with these blocks."""
        for block in blocks:
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)


@dataclasses.dataclass(eq=False)
class KnownEngine:
    """The router's record of an engine that has registered."""

    address: Address
    """Address at which the router connects to the engine."""
    notice: EngineNotice
    """The newest notice that the engine has sent."""
    heard: float
    """Time of that notice, of `time.monotonic`."""
    doubted: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set while the engine gets no requests: at first, and after a connection to it has broken. It is cleared when the
    router can connect to the engine and the engine has all adapters."""
    requests: int = 0
    """Number of requests that the router has sent to the engine and that are not answered yet."""
    seen: SeenPrefixes = dataclasses.field(default_factory=SeenPrefixes)
    """The beginnings of the prompts that the engine was sent."""
    adapters: dict[str, bytes | None] = dataclasses.field(default_factory=dict)
    """Adapter name -> body of the request with which the engine has loaded it; None if it has unloaded it."""
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the engine has sent no notice for too long. (An engine whose process dies breaks its connections.)"""
    metrics: str = ""
    """The engine's metrics when they were read last, in Prometheus' text format."""

    def __post_init__(self) -> None:
        self.doubted.set()

    @property
    def takes_requests(self) -> bool:
        """True if the router may send requests to the engine."""
        told = self.notice.draining or self.notice.failure is not None
        return not (told or self.doubted.is_set() or self.lost.is_set())

    async def until_lost(self) -> NoReturn:
        """Wait until the engine counts as lost; then raise `EngineGone`."""
        await self.lost.wait()
        raise EngineGone(f"{self.address}: lost")


def prefix_blocks(body: bytes) -> list[bytes]:
    """Return a hash for each whole block of a request's prompt, which depends on the blocks before it.

    Args:
      body: JSON of a completion, a chat, a response or an embedding.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(fields, dict):
        return []
    text = _prompt_text(fields)
    hashes = []
    digest = hashlib.blake2b(str(fields.get("model")).encode(errors="replace"), digest_size=16)
    for start in range(0, min(len(text), _MOST_BLOCKS * _BLOCK_CHARACTERS) - _BLOCK_CHARACTERS + 1, _BLOCK_CHARACTERS):
        digest.update(text[start : start + _BLOCK_CHARACTERS].encode(errors="replace"))
        hashes.append(digest.digest())
    return hashes


def _prompt_text(fields: dict[str, Any]) -> str:
    """Return what of a request's prompt comes first for the model, as a text."""
    parts = [fields.get("tools"), fields.get("instructions"), fields.get("system")]
    prompt = next((fields[key] for key in ("messages", "prompt", "input") if key in fields), "")
    texts = [json.dumps(part, ensure_ascii=False) for part in parts if part]
    return "".join([*texts, prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)])


def choose(loads: Sequence[int], known: Sequence[int]) -> int:
    """Return the number of the engine that a request goes to.

    Args:
      loads: requests that each engine has.
      known: blocks of the request's prompt that each engine has had.
    """
    least = min(loads)
    best = max(known)
    fitting = [number for number, blocks in enumerate(known) if blocks == best and loads[number] <= least + _SLACK]
    return min(fitting or range(len(loads)), key=lambda number: loads[number])
