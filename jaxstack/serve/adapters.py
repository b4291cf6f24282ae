"""Adapters that the server loads: at its start, and when a request asks for it."""

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.decoding.engine import Engine
from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.engine import EngineGroup


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
        path = (self._folder / directory).resolve()
        if not path.is_relative_to(self._folder) or not path.is_dir():
            raise ConfigError(f"lora_path must be a directory below server.adapter_folder; found {directory!r}.")
        self._engine.load_adapter(name, self._read(path))
