"""Settings of the HTTP server."""

from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.decoding.config import EngineConfig


class ServerConfig(Component):
    """Configuration of the HTTP server: limits on requests, shutdown time, chat template."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest size of a request's body in bytes."""
    max_tokens: int = Field(default=4096, ge=1)
    """Largest `max_tokens` that a request may ask for, and the limit of chat answers that name none."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an unfinished request is cancelled with HTTP status 504."""
    receive_timeout: float = Field(default=10.0, gt=0)
    """Seconds in which the head of a request must arrive, and then its body; otherwise HTTP status 408."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds after SIGTERM or Ctrl-C in which running requests may finish; then they are cancelled."""
    chat_template: str = "auto"
    """Chat template. auto: the tokenizer's own; chatml, llama3 or gemma: a built-in one; otherwise a file with a Jinja
    template."""
    allowed_hosts: list[str] = Field(default=[])
    """Further host names that requests may be addressed to (header Host) where the server listens on this machine only,
    such as that of a reverse proxy; "*": any. Other names are refused: a web page could have its own name resolved to
    this machine, and so send requests from a visitor's browser (DNS rebinding)."""
    document_start: bool = True
    """Put the tokenizer's document-start id before each text of /v1/completions and /v1/embeddings, as in training."""
    pooling: Literal["last", "mean"] = "last"
    """Embedding of a text: the final hidden state of its last token, or the mean over its tokens."""
    adapter_folder: str | None = None
    """Directory below which requests may load adapters (/v1/load_lora_adapter), if `engine.adapters` leaves room; null:
    only those of the command line are served."""


class ServeConfig(Component):
    """Configuration of `jaxstack.serve`: the serving engine and the HTTP server."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _drafts_fit(self) -> "ServeConfig":
        if self.engine.draft_tokens >= self.engine.chunk:
            raise ValueError("engine.draft_tokens must be smaller than engine.chunk.")
        return self
