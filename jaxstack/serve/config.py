"""Settings of the serving engine and of the HTTP server."""

from pydantic import Field, model_validator

from jaxstack.config.base import Component


class EngineConfig(Component):
    """Sizes of the engine: the number of concurrent requests and the memory of the KV cache."""

    slots: int = Field(default=16, ge=1)
    """Requests that are decoded together; more of them wait."""
    context: int | None = Field(default=None, ge=2)
    """Token limit of a request, prompt and answer together; null: the model's max_position_embeddings, or 4096 if it
    has none, and at most what the pages hold."""
    page_size: int = Field(default=16, ge=1)
    """Tokens per page of the cache of keys and values."""
    pages: int | None = Field(default=None, ge=1)
    """Pages of the cache; null: enough for `slots` requests of `context` tokens, within `memory_fraction`."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the devices' memory that weights and cache may take together, if `pages` is null."""
    chunk: int = Field(default=512, ge=16)
    """Prompt tokens that one step computes beside the decoded tokens: more of them start answers sooner, fewer keep the
    time between tokens of running answers even."""
    prefix_cache: bool = True
    """Keep the keys and values of computed prefixes for later requests that begin alike."""
    queue: int = Field(default=256, ge=0)
    """Requests that may wait for a slot; further ones are refused."""
    steps_ahead: int = Field(default=2, ge=0)
    """Steps that are dispatched before the tokens of the first of them are read."""
    draft_tokens: int = Field(default=0, ge=0, le=15)
    """Tokens that are guessed per step from earlier occurrences of the newest ones (n-gram speculation); 0: none."""


class ServerConfig(Component):
    """Limits of the HTTP server."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Size limit of a request's body."""
    max_tokens: int = Field(default=4096, ge=1)
    """Largest `max_tokens` of a request; answers without one get as many as fit, up to this."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an unfinished request is ended."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that running requests have to finish after SIGTERM."""
    chat_template: str = "auto"
    """Template of chats. auto: the tokenizer's own; chatml, llama3, gemma; a file with a Jinja template."""
    document_start: bool = True
    """Begin prompts of /v1/completions with the tokenizer's document-start id, as in training."""


class ServeConfig(Component):
    """Configuration of `jaxstack.serve`."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _drafts_fit(self) -> "ServeConfig":
        if self.engine.draft_tokens >= self.engine.chunk:
            raise ValueError("engine.draft_tokens must be smaller than engine.chunk.")
        return self
