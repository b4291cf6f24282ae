"""Sampling of next tokens from a model's logits, with the settings of each row of a batch.

The settings are arrays of the compiled programs, so that new settings need no compilation.

Dims: R rows, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from pallas_kernels.batch_invariant import rows as invariant
from pallas_kernels.batch_invariant.mode import is_batch_invariant

Mode = Literal["greedy", "free", "limited"]
"""Cheapest program that samples all rows of a step: argmax only; with temperatures; with top_k, top_p or min_p."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for sampling tokens: changes of logits, temperature, limits on the choice, and what is told of it.

    Limits apply in the order of the attributes, each to the tokens that the ones before it leave. Changes come first:
    `logit_bias` and `min_tokens`, then the penalties.

    Attributes:
      temperature: divisor of the logits; 0 takes the likeliest token.
      top_k: sample from this many likeliest tokens.
      top_p: sample from the likeliest tokens whose probabilities first reach this sum (Holtzman et al. 2020).
      min_p: sample from the tokens at least this many times as likely as the likeliest one (Nguyen et al. 2024,
        arXiv:2407.01082).
      presence_penalty: subtracted from the logits of tokens that the answer has already.
      frequency_penalty: subtracted from them as many times as the answer has the token.
      repetition_penalty: divisor of the positive logits of tokens that the prompt or the answer has, and factor of the
        negative ones (Keskar et al. 2019, arXiv:1909.05858); 1 changes nothing.
      logit_bias: what is added to the logits of tokens, by their ids.
      min_tokens: number of tokens before which no stop token is sampled, unless a constraint leaves no other.
      logprobs: number of likeliest tokens to score beside each token of the answer; None: the answer has no scores.
      prompt_logprobs: the same for the prompt, all of whose tokens are then computed, cached or not.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite; found {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1; found {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; found {self.top_p}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be at least 0 and at most 1; found {self.min_p}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be -2 to 2; found {getattr(self, name)}.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0 and finite; found {self.repetition_penalty}.")
        for token, value in (self.logit_bias or {}).items():
            if not -100 <= value <= 100 or token < 0:
                raise ValueError(f"logit_bias must add -100 to 100 to the logits of token ids; found {token}: {value}.")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0; found {self.min_tokens}.")

    @property
    def changes_logits(self) -> bool:
        """True if a setting changes logits, beyond temperature and limits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def extended(self) -> bool:
        """True if the request needs the program that scores samples and changes logits, which is one of several."""
        return self.changes_logits or self.logprobs is not None


class RowSampling(NamedTuple):
    """Sampling settings of each row of a batch as arrays; see `Sampling`."""

    seed: UInt32[Array, " R"]
    number: Int[Array, " R"]
    """Number of the token in its answer; with the seed it determines the random numbers."""
    temperature: Float[Array, " R"]
    """0 takes the likeliest token."""
    top_k: Int[Array, " R"]
    """V or more: no limit."""
    top_p: Float[Array, " R"]
    """1: no limit."""
    min_p: Float[Array, " R"]
    """0: no limit."""


def sample_rows(logits: Float[Array, "R V"], rows: RowSampling, mode: Mode) -> Int[Array, " R"]:
    """Sample the next token of each row of a batch from its logits, with the row's own sampling settings."""
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)
    if mode == "greedy":
        return greedy
    sampled = jax.vmap(jax.random.categorical)(_keys(rows), _scaled(logits, rows, mode)).astype(jnp.int32)
    return jnp.where(rows.temperature > 0, sampled, greedy)


def probabilities(logits: Float[Array, "R V"], rows: RowSampling, mode: Mode) -> Float[Array, "R V"]:
    """Return the probabilities of all tokens under each row's sampling settings, from which `sample_rows` draws."""
    greedy = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
    if mode == "greedy":
        return greedy
    return jnp.where(rows.temperature[:, None] > 0, jax.nn.softmax(_scaled(logits, rows, mode), -1), greedy)


def log_probabilities(logits: Float[Array, "R V"], tokens: Int[Array, " R"], rows: RowSampling) -> Float[Array, " R"]:
    """Return each token's log-probability at its row's temperature (at 1 if that is 0), without other limits."""
    scaled = _scaled(logits, rows, "free")
    if is_batch_invariant():
        return invariant.log_probabilities(scaled, tokens)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def uniform(rows: RowSampling) -> Float[Array, " R"]:
    """Return a uniform random number in [0, 1) for each row, determined by the row's seed and token number."""
    return jax.vmap(jax.random.uniform)(_keys(rows))


def _keys(rows: RowSampling) -> Key[Array, " R"]:
    return jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(rows.seed, rows.number)


def _scaled(logits: Float[Array, "R V"], rows: RowSampling, mode: Mode) -> Float[Array, "R V"]:
    """Divide logits by each row's temperature, and set tokens outside of its top-k, top-p or min-p limits to -inf."""
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    return scaled if mode == "free" else keep_likeliest_rows(scaled, rows.top_k, rows.top_p, rows.min_p)


def keep_likeliest_rows(
    logits: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
) -> Float[Array, "R V"]:
    """Restrict each row's logits to its top-k, top-p and min-p tokens, with -inf at all others.

    The threshold logit is found exactly by bisection over the bits of float32, in 32 passes over the logits, without
    sorting the vocabulary.
    """
    order = _ordered(logits)
    least = _bisect(lambda t: (order >= t[:, None]).sum(-1) >= jnp.minimum(top_k, logits.shape[-1]), len(logits))
    logits = jnp.where(order < least[:, None], -jnp.inf, logits)
    order = _ordered(logits)
    probabilities = jax.nn.softmax(logits, -1)
    least = _bisect(lambda t: jnp.where(order >= t[:, None], probabilities, 0).sum(-1) >= top_p, len(logits))
    logits = jnp.where((order < least[:, None]) & (top_p < 1)[:, None], -jnp.inf, logits)
    return jnp.where(logits < logits.max(-1, keepdims=True) + jnp.log(min_p)[:, None], -jnp.inf, logits)


def apply_bitmask(logits: Float[Array, "R V"], mask: Int[Array, "R words"]) -> Float[Array, "R V"]:
    """Set logits to -inf where a token's mask bit is 0; bit i of word w is token 32 w + i."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] == 1
    allowed = jnp.pad(allowed, ((0, 0), (0, logits.shape[1] - allowed.shape[1])))
    return jnp.where(allowed, logits, -jnp.inf)


def _ordered(x: Float[Array, "R V"]) -> UInt32[Array, "R V"]:
    """Map floats to unsigned integers in the same order, so that a threshold can be found by bisection of bits."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _bisect(holds: Callable[[UInt32[Array, " R"]], Bool[Array, " R"]], rows: int) -> UInt32[Array, " R"]:
    """Find by bisection, for each row, the largest integer at which the monotone predicate `holds` is true."""

    def add_bit(step: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(rows, jnp.uint32))
