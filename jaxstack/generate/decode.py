"""Autoregressive decoding with a KV cache: one prefill over the prompts, then a token a step for all of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.errors import ConfigError
from jaxstack.functional import FunctionalModule
from jaxstack.generate.sampling import Sampling, sample
from jaxstack.parallel.rules import AxisRules, logical_axis_rules

_BLOCK = 64
"""Prompt lengths and caches are rounded up to a multiple of it, so that few shapes are compiled."""


class Decoder:
    """Generates with a `Transformer`.

    Args:
      module: the functional form of the Transformer.
      params, rest: its arrays; their sharding is kept.
      rules: the mesh that they lie on.
    """

    def __init__(self, module: FunctionalModule, params: Any, rest: Any, rules: AxisRules):
        self.module, self.params, self.rest, self.rules = module, params, rest, rules
        self._prefill = jax.jit(self._prefill_step, static_argnames=("length", "sampling"))
        self._next = jax.jit(self._decode_step, static_argnames="sampling", donate_argnames="cache")

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling, *, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """Yields the next token of every prompt, int32 [B], `max_tokens` times.

        Prompts may differ in length. The draw of a sequence depends on `seed`, its row and the step alone.

        Raises:
          ConfigError: a prompt is empty, or prompt and new tokens exceed the model's positions.
        """
        if not prompts or min(map(len, prompts)) == 0:
            raise ConfigError("a prompt must have at least one token.")
        longest = max(map(len, prompts))
        self._check_length(longest, max_tokens)
        width = -(-longest // _BLOCK) * _BLOCK
        tokens, positions = _left_padded(prompts, width)
        length = width + -(-max_tokens // _BLOCK) * _BLOCK
        key = jax.random.key(seed)
        token, cache = self._prefill(tokens, positions, jax.random.fold_in(key, 0), length=length, sampling=sampling)
        at = positions[:, -1:]
        for step in range(1, max_tokens + 1):
            # The next step is dispatched before this one's token is looked at: the device does not wait for us.
            shown, at = token, at + 1
            if step < max_tokens:
                token, cache = self._next(shown[:, None], at, cache, jax.random.fold_in(key, step), sampling=sampling)
            yield np.asarray(shown)

    def _check_length(self, longest: int, max_tokens: int) -> None:
        config = self.module.merge(self.params, self.rest).config
        limit = config.max_position_embeddings
        if limit is not None and longest + max_tokens > limit:
            raise ConfigError(
                f"the prompt ({longest} tokens) and {max_tokens} new tokens exceed the model's "
                f"max_position_embeddings ({limit}); at most {max(limit - longest, 0)} new tokens fit."
            )

    def _prefill_step(
        self, tokens: jax.Array, positions: jax.Array, key: jax.Array, *, length: int, sampling: Sampling
    ) -> Any:
        with logical_axis_rules(self.rules):
            model = self.module.merge(self.params, self.rest)
            cache = model.make_cache(tokens.shape[0], length)
            logits, cache = model.decode(tokens, positions, cache, last_only=True)
        return sample(logits[:, -1], key, sampling), cache

    def _decode_step(
        self, tokens: jax.Array, positions: jax.Array, cache: Any, key: jax.Array, *, sampling: Sampling
    ) -> Any:
        with logical_axis_rules(self.rules):
            model = self.module.merge(self.params, self.rest)
            logits, cache = model.decode(tokens, positions, cache)
        return sample(logits[:, -1], key, sampling), cache


def _left_padded(prompts: Sequence[Sequence[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """tokens and positions int32 [B, width], prompts at the right, position -1 in the padding before them."""
    tokens = np.zeros((len(prompts), width), np.int32)
    positions = np.full((len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        positions[row, width - len(prompt) :] = np.arange(len(prompt))
    return jnp.asarray(tokens), jnp.asarray(positions)
