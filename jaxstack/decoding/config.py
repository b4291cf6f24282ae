"""Settings of the engine that generates text: sizes of its batch and its cache, steps, speculative decoding."""

from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component


class EngineConfig(Component):
    """Configuration of the engine: limits on requests and tokens, memory of the KV cache, speculative decoding."""

    slots: int | None = Field(default=None, ge=1)
    """Largest number of requests that are decoded at a time; further ones wait in the queue (`queue`). null: 16 on a
    CPU, and on GPUs a power of two up to 512, with which the cache holds 1,024 tokens of each request."""
    context: int | None = Field(default=None, ge=2)
    """Largest number of tokens of a request, prompt and answer together; null: the model's max_position_embeddings
    (4096 if it has none), or as many as fit into the KV cache if that is fewer."""
    page_size: int = Field(default=16, ge=1)
    """Tokens per page of the KV cache."""
    pages: int | None = Field(default=None, ge=1)
    """Number of pages of the KV cache; null: enough for `slots` requests of `context` tokens, as far as
    `memory_fraction` allows."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the devices' memory for weights and KV cache together, where `pages` is null. On a CPU the cache gets
    half of what that leaves."""
    chunk: int = Field(default=512, ge=16)
    """Largest number of prompt tokens that a step computes; fewer while answers are generated, see `chunk_slowdown`.
    More with `step_tokens`."""
    chunk_slowdown: float = Field(default=2.0, ge=1)
    """Largest duration of a step with prompt tokens while answers are generated, relative to a step without them. The
    number of prompt tokens follows from measurements at the start, and falls along a long prompt. A larger value starts
    answers sooner; a smaller one delays the running answers less."""
    step_tokens: int | None = Field(default=None, ge=16)
    """Largest number of prompt tokens that a step computes while many wait: up to `step_tokens / chunk` chunks, of
    several prompts or of one, as far as `chunk_slowdown` allows; null: `chunk`. A larger value starts many requests in
    fewer steps, where only their total time counts, and adds a program to compile."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests, as long as there is room, for later ones that begin with the same
    tokens."""
    snapshots: int | None = Field(default=None, ge=0)
    """Number of snapshots that the prefix cache keeps of states, if layers have some: a prefix can then be reused only
    where a snapshot is. Each takes the memory of a slot's states. null: as many as `slots`, in at most a quarter of the
    memory that weights and slots leave; 0: there is no prefix cache."""
    queue: int = Field(default=256, ge=0)
    """Largest number of requests that wait for a slot; further ones are refused (HTTP status 429)."""
    decode_steps: int = Field(default=8, ge=1, le=64)
    """Largest number of decode steps in one program, while no prompt has to be computed, or a quarter of that of steps
    with drafts. Its tokens arrive together, so that programs that would take longer than 30 ms get fewer steps."""
    steps_ahead: int = Field(default=2, ge=0)
    """Number of steps that are queued on the device before the host reads the tokens of the oldest one."""
    half_batches_from: int | None = Field(default=None, ge=2)
    """Smallest number of tokens of a step, padding included, from which tensor parallelism computes the step as two
    half-batches, whose all-reduces can overlap with matmuls of the other half (NanoFlow); null: never. Each half reads
    all weights, so that steps of few tokens get slower."""
    draft_tokens: int = Field(default=0, ge=0, le=15)
    """Number of next tokens that each step guesses and verifies, by a draft model (`--draft`), or else by the model's
    layer for multi-token prediction, or else from earlier text (n-gram speculation); 0: none. With a draft model the
    default is 4."""
    drafts: Literal["auto", "always"] = "auto"
    """auto: steps guess tokens only while that is measured to be faster than steps without, at the present number of
    requests; always: all steps do."""
    draft_layers_together: int = Field(default=1, ge=1)
    """Number of layers of a draft model whose attention reads the same input while it guesses, so that tensor
    parallelism sums their outputs at once (EasySpec). The text stays that of the model; 1: the draft model is run
    exactly, and more of its guesses are accepted."""
    adapters: int = Field(default=0, ge=0, le=64)
    """Number of low-rank adapters of the model that can be loaded at a time; requests choose one by its name. Requests
    of different adapters are computed in the same step, in which every token is multiplied with the matrices of all;
    steps without any of them run programs of their own."""
    adapter_rank: int = Field(default=16, ge=1)
    """Largest rank of these adapters."""

    @property
    def draft_steps(self) -> int:
        """Largest number of steps with drafts in one program.

        It is larger than that of steps without, as the device waits for the host between two such programs: only when
        their tokens are read can the next one be planned.
        """
        return 4 * self.decode_steps if self.decode_steps > 1 else 1

    @model_validator(mode="after")
    def _a_chunk_fits_into_a_step(self) -> "EngineConfig":
        if self.step_tokens is not None and self.step_tokens < self.chunk:
            raise ValueError(
                f"engine.step_tokens ({self.step_tokens}) must be at least engine.chunk ({self.chunk}); set it to null "
                "or make chunk smaller."
            )
        return self
