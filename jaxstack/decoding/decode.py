"""Autoregressive decoding with a KV cache: one prefill over the prompts, then a token a step for all of them."""

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.decoding.sampling import Sampling, sample
from jaxstack.distributed.devices import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.functional.module import FunctionalModule
from jaxstack.parallel.context import logical_axis_rules
from jaxstack.parallel.rules import AxisRules, is_matrix

_BLOCK = 64
"""Prompts are filled up to this many tokens times a power of two, caches to a multiple, so that few shapes are
compiled."""


class ModelOnMesh:
    """A `Transformer` on a mesh, ready for use without training.

    Args:
      module: the functional form of the Transformer.
      params, rest: its arrays; their sharding is kept. Matrices are kept in the compute dtype, as they are used.
      rules: the mesh that they lie on.

    Raises:
      ConfigError: the mesh splits sequences or layers over devices.
    """

    def __init__(self, module: FunctionalModule, params: Any, non_params: Any, rules: AxisRules):
        wrong = {axis: rules.mesh.shape[axis] for axis in ("pipeline", "context") if rules.mesh.shape[axis] > 1}
        if wrong:
            shown = ", ".join(f"{axis} {degree}" for axis, degree in wrong.items())
            raise ConfigError(
                f"generation and tasks lay a model over data, fsdp, expert and tensor; found {shown}: set it to 1."
            )
        self.module, self.rules = module, rules
        self.config = module.merge(module.abstract_params, module.abstract_non_params).config
        self.load(params, non_params)

    def load(self, params: Any, non_params: Any) -> None:
        """Takes other arrays of the same model; nothing is compiled anew."""
        self.params, self.non_params = in_compute_dtype(self.module, params, self.rules), non_params

    def unload(self) -> None:
        """Lets the arrays go, until others are loaded."""
        self.params = self.non_params = None

    @property
    def batch_unit(self) -> int:
        """What a number of rows should be divisible by: the devices that have rows of their own."""
        return self.rules.degree(self.rules.table["batch"])

    @property
    def context_length(self) -> int | None:
        """Most tokens of a sequence; None: the model does not bound it."""
        return self.config.max_position_embeddings

    def width(self, longest: int) -> int:
        """To how many tokens rows are filled up whose longest has so many."""
        width = _BLOCK
        while width < longest:
            width *= 2
        return max(longest, min(width, self.context_length or width))

    def check_ids(self, rows: Sequence[Sequence[int]]) -> None:
        """Raises ConfigError where a token is none of the model's."""
        highest = max((max(row) for row in rows if len(row)), default=0)
        if highest >= (self.config.vocab_size or 0):
            raise ConfigError(
                f"the token id {highest} is outside of the model's vocabulary of {self.config.vocab_size} ids: the "
                "tokenizer is that of another model."
            )


def in_compute_dtype(module: FunctionalModule, params: Any, rules: AxisRules) -> Any:
    """The parameters with matrices in the dtype of the computation, as a Transformer casts them where it uses them."""

    def casts(names: Any, shape: Sequence[int], _: Any) -> bool:
        return is_matrix(names, shape) and "router" not in (names or ())

    wanted = module.map_parameters(casts, rules)
    return jax.tree.map(lambda x, cast: x.astype(module.dtype) if cast else x, params, wanted)


class Decoder(ModelOnMesh):
    """Generates with a `Transformer`; arguments as of `ModelOnMesh`. Fastest with `scan_layers: false`.

    Args:
      vocab_size: draw among the first so many ids, where the model has rows that no token of the tokenizer uses.
    """

    def __init__(
        self, module: FunctionalModule, params: Any, non_params: Any, rules: AxisRules, *, vocab_size: int | None = None
    ):
        super().__init__(module, params, non_params, rules)
        self._vocab_size = vocab_size
        self._prefill = jax.jit(self._prefill_step, static_argnames="room")
        self._next = jax.jit(self._decode_step, donate_argnames="cache")
        self._draw = jax.jit(self._draw_step, static_argnames="sampling", out_shardings=rules.sharding(jax.P()))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[np.ndarray]:
        """Yields the next token of every prompt, int32 [B], at most `max_tokens` times.

        Args:
          prompts: token ids; they may differ in length.
          seed: of each row; a number s stands for s, s + 1, ... A row's tokens depend on its prompt and its seed alone
            (to rounding: XLA may choose another matmul for another number of rows).
          stop_tokens: a row ends with one of them, and is -1 from then on. When all have ended nothing more comes.

        Raises:
          ConfigError: a prompt is empty, has unknown ids, or exceeds with its new tokens what the model can hold.
        """
        self._check(prompts, max_tokens)
        seeds = np.asarray([seed + row for row in range(len(prompts))] if isinstance(seed, int) else seed, np.uint32)
        if len(seeds) != len(prompts):
            raise ValueError(f"seed must be a number or one a prompt ({len(prompts)}); found {len(seeds)}.")
        rows = -(-len(prompts) // self.batch_unit) * self.batch_unit
        tokens, lengths = _filled_up(prompts, rows, self.width(max(map(len, prompts))))
        room = tokens.shape[1] + -(-max_tokens // _BLOCK) * _BLOCK
        self._check_cache(rows, room, tokens.shape[1])
        draw = functools.partial(self._draw, seeds=np.resize(seeds, rows), sampling=sampling)
        ended, stops = np.zeros(len(prompts), bool), np.asarray(sorted(stop_tokens), np.int32)
        with jax.set_mesh(self.rules.mesh):
            logits, cache = self._prefill(self.params, self.non_params, tokens, lengths, room=room)
            token = draw(logits, step=0)
        for step in range(max_tokens):
            shown = token
            if step + 1 < max_tokens:
                # Dispatched before this step's token is looked at: the device does not wait for us.
                with jax.set_mesh(self.rules.mesh):
                    logits, cache = self._next(self.params, self.non_params, shown, lengths + step, cache)
                    token = draw(logits, step=step + 1)
            found = np.where(ended, -1, np.asarray(shown)[: len(prompts)])
            yield found
            ended |= np.isin(found, stops)
            if ended.all():
                return

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if not prompts or min(map(len, prompts)) == 0:
            raise ConfigError("a prompt must have at least one token.")
        self.check_ids(prompts)
        longest, limit = max(map(len, prompts)), self.context_length
        if limit is not None and longest > limit - 1:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in the model's context of {limit} tokens "
                f"(max_position_embeddings); shorten it to at most {limit - 1}."
            )
        if limit is not None and longest + max_tokens > limit:
            raise ConfigError(
                f"the prompt ({longest} tokens) and {max_tokens} new tokens exceed the model's "
                f"max_position_embeddings ({limit}); at most {limit - longest} new tokens fit."
            )

    def _check_cache(self, rows: int, room: int, filled: int) -> None:
        """Raises ConfigError where the cache for `room` tokens of each row cannot fit the devices' memory."""
        available = memory_per_device()
        if available is None:
            return
        total = available * self.rules.mesh.size
        needed = self._cache_bytes(rows, room)
        if needed <= total:
            return
        per_token = (needed - self._cache_bytes(rows, _BLOCK)) / max(room - _BLOCK, 1)
        fits = max(0, int(total / per_token) // _BLOCK * _BLOCK - filled)
        raise ConfigError(
            f"the cache of keys and values for {rows} x {room:,} tokens takes {needed / 2**30:,.1f} GiB, of "
            f"{total / 2**30:,.1f} GiB on {self.rules.mesh.size} device(s); at most about {fits:,} new tokens fit."
        )

    def _cache_bytes(self, rows: int, room: int) -> int:
        model = self.module.merge(self.module.abstract_params, self.module.abstract_non_params)
        cache = jax.eval_shape(lambda: model.make_cache(rows, room).layers)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))

    def _prefill_step(self, params: Any, non_params: Any, tokens: jax.Array, lengths: jax.Array, *, room: int) -> Any:
        with logical_axis_rules(self.rules):
            return self.module.merge(params, non_params).prefill(tokens, lengths, room)

    def _decode_step(self, params: Any, non_params: Any, token: jax.Array, position: jax.Array, cache: Any) -> Any:
        with logical_axis_rules(self.rules):
            logits, cache = self.module.merge(params, non_params).decode(token[:, None], position[:, None], cache)
        return logits[:, 0], cache

    def _draw_step(self, logits: jax.Array, *, seeds: jax.Array, step: jax.Array, sampling: Sampling) -> jax.Array:
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(seeds)
        if self._vocab_size is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self._vocab_size, logits, -jnp.inf)
        return sample(logits, keys, sampling)


def _filled_up(prompts: Sequence[Sequence[int]], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [rows, width] that begin with the prompts, and how many of each row are its own, int32 [rows]."""
    tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths
