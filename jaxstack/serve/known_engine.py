"""Records of the engines that have registered with the router."""

import asyncio
import dataclasses

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.serve.engine_choice import SeenPrefixes
from jaxstack.serve.upstream import Address


class EngineNotice(Component):
    """JSON body of what an engine tells the router."""

    id: str = Field(min_length=1, max_length=64)
    """Random name of the engine's process."""
    port: int = Field(ge=1, lt=2**16)
    """Its port; its host is the one that the notice comes from."""
    model: str = Field(max_length=1024)
    """Name of its model."""
    failure: str | None = None
    """Reason why it gets no requests; None: it is well."""
    draining: bool = False
    """True if it takes no more requests."""


@dataclasses.dataclass(eq=False)
class KnownEngine:
    """An engine that has registered, as the router sees it."""

    address: Address
    notice: EngineNotice
    heard: float
    """Time of its newest notice."""
    doubted: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set until the router has connected to it and it has the adapters; again from a broken connection."""
    requests: int = 0
    """Requests that the router has given it and that are not answered."""
    seen: SeenPrefixes = dataclasses.field(default_factory=SeenPrefixes)
    adapters: dict[str, bytes | None] = dataclasses.field(default_factory=dict)
    """Name of an adapter -> the change of it that the engine has made last (`SharedAdapters`)."""
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the engine has fallen silent. If it dies, its connections break."""
    metrics: str = ""
    """Its metrics, as it has told them last."""

    def __post_init__(self) -> None:
        self.doubted.set()

    @property
    def takes_requests(self) -> bool:
        """True if requests may be sent to it."""
        told = self.notice.draining or self.notice.failure is not None
        return not (told or self.doubted.is_set() or self.lost.is_set())
