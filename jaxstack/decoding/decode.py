"""Autoregressive decoding with a KV cache: one prefill of a batch of prompts, then one token per sequence and step."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jaxstack.decoding.sampling import Sampling, sample
from jaxstack.distributed.device_setup import memory_per_device
from jaxstack.distributed.xla_options import OptionValue, packed_weight_options
from jaxstack.errors import ConfigError
from jaxstack.models.joined_projections import join_projections
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules, is_cast
from jaxstack.parallel.sharding_context import logical_axis_rules
from pallas_kernels import PackedWeight
from pallas_kernels.target import current_target

Params = dict[str, PyTree]
"""Parameters, or other variables, of a module as nested dicts of arrays."""
Cache = PyTree
"""Keys and values, or states, of all layers."""

_BLOCK = 64
"""Unit of padding: prompts are padded to this many tokens times a power of two, and caches to a multiple, so that few
shapes are compiled."""
_STEPS = 8
"""Decoding steps of one program, so that the host's work for each step overlaps with the device's."""


class ModelOnMesh:
    """A Transformer with its parameters sharded over a mesh, for inference.

    Args:
      module: the functional form of the Transformer.
      params: its parameters, in their final sharding. Matrices are cast to the compute dtype.
      non_params: its other variables.
      rules: sharding rules of the mesh.

    Raises:
      ConfigError: the mesh splits sequences or layers over devices.
    """

    def __init__(self, module: ModuleArrays, params: Params, non_params: Params, rules: AxisRules):
        wrong = {axis: rules.mesh.shape[axis] for axis in ("pipeline", "context") if rules.mesh.shape[axis] > 1}
        if wrong:
            shown = ", ".join(f"{axis} {degree}" for axis, degree in wrong.items())
            raise ConfigError(
                f"generation and tasks support only data, fsdp, expert and tensor; found {shown}: set it to 1."
            )
        self.module = module
        self.rules = rules
        self.config = module.merge(module.abstract_params, module.abstract_non_params).config
        self.load(params, non_params)
        packed = any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed)))
        self.compiler_options: dict[str, OptionValue] | None = None
        """Options of XLA for programs that multiply with the parameters; None: the defaults."""
        if packed and current_target().platform == "cuda":
            self.compiler_options = packed_weight_options()

    def load(self, params: Params, non_params: Params) -> None:
        """Use new parameters of the same shapes from now on, without compiling again."""
        self.params = cast_matrices(self.module, params, self.rules)
        self.non_params = non_params

    def unload(self) -> None:
        """Free the memory of the parameters until `load` is called again."""
        self.params = {}
        self.non_params = {}

    def join_projections(self) -> None:
        """Merge dense layers with the same input, such as q, k and v, for faster decoding, if weights are not sharded.

        Outputs are the same up to rounding. Afterwards `module` and `params` have a layer `qkv_proj` in place of
        `q_proj`, `k_proj` and `v_proj`, and `gate_up_proj` in place of `gate_proj` and `up_proj`; `load` then takes
        parameters of that form. Layers that are sharded or packed in different formats stay as they are.
        """
        if any(degree > 1 for axis, degree in self.rules.mesh.shape.items() if axis != "data"):
            return
        make = self.module.make
        model = self.module.merge(self.params, self.non_params)
        self.params = {}
        with jax.set_mesh(self.rules.mesh):
            paths = join_projections(model)

        def make_joined(rngs: nnx.Rngs) -> nnx.Module:
            made = make(rngs)
            join_projections(made, paths)
            return made

        self.module = ModuleArrays(make_joined)
        self.params = self.module.split(model)[0]

    @property
    def batch_unit(self) -> int:
        """Number of devices over which a batch is split; a batch size should be a multiple of it."""
        return self.rules.degree(self.rules.table["batch"])

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens in a sequence; None if the model has no limit."""
        return self.config.max_position_embeddings

    def padded_length(self, longest: int) -> int:
        """Return the length to which a batch is padded, given its longest row. Few lengths limit compilations."""
        length = _BLOCK
        while length < longest:
            length *= 2
        return max(longest, min(length, self.context_length or length))

    def logits(self, tokens: Int[ArrayLike, "B T"]) -> Float[Array, "B T V"]:
        """Compute the logits of token ids [B, T], float32 [B, T, V], as the model computes them in training.

        Raises:
          ConfigError: an id is not in the vocabulary.
        """
        rows = np.asarray(tokens, np.int32)
        self.check_ids(rows.tolist())
        padding = -len(rows) % self.batch_unit
        padded = np.concatenate([rows, np.zeros((padding, rows.shape[1]), np.int32)])
        with jax.set_mesh(self.rules.mesh):
            return self._logits(self.params, self.non_params, padded)[: len(rows)]

    @functools.cached_property
    def _logits(self) -> Callable[[Params, Params, ArrayLike], Float[Array, "B T V"]]:
        def compute(params: Params, non_params: Params, tokens: jax.Array) -> jax.Array:
            with logical_axis_rules(self.rules):
                return self.module.merge(params, non_params)(tokens).astype(jnp.float32)

        return jax.jit(compute, compiler_options=self.compiler_options)

    def check_ids(self, rows: Sequence[Sequence[int]]) -> None:
        """Check that every token id in the rows of a batch is in the model's vocabulary.

        Raises:
          ConfigError: one is not.
        """
        highest = max((max(row) for row in rows if len(row)), default=0)
        if highest >= (self.config.vocab_size or 0):
            raise ConfigError(
                f"the token id {highest} is outside of the model's vocabulary of {self.config.vocab_size} ids. If a "
                "tokenizer wrote it, that tokenizer belongs to another model."
            )


def is_packed(x: object) -> bool:
    """Return True if x is a packed (such as quantized) weight, which pytree functions should treat as one leaf."""
    return isinstance(x, PackedWeight)


def cast_shapes(module: ModuleArrays, rules: AxisRules) -> Params:
    """Return shapes, shardings and dtypes of a model's parameters, the matrices in the dtype of `cast_matrices`."""
    shapes = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding(spec)),
        module.abstract_params,
        module.parameter_specs(rules),
    )
    wanted = module.map_parameters(is_cast, rules)

    def cast(x: jax.ShapeDtypeStruct, wanted: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, module.dtype, sharding=x.sharding) if wanted else x

    return jax.tree.map(cast, shapes, wanted)


def cast_matrices(module: ModuleArrays, params: Params, rules: AxisRules) -> Params:
    """Cast the model's matrices to the compute dtype once, instead of each time that a layer uses them.

    Routers keep their dtype, packed weights their format, and parameters with `KEEP_FLOAT32` in their metadata float32.
    """

    def casts(names: Sequence[str | None] | None, shape: Sequence[int], metadata: Mapping[str, object]) -> bool:
        return is_cast(names, shape, metadata)

    wanted = module.map_parameters(casts, rules)

    def cast(x, wanted):
        return x.astype(module.dtype) if wanted else x

    return jax.tree.map(cast, params, wanted, is_leaf=is_packed)


class Decoder(ModelOnMesh):
    """Generates tokens with a Transformer for a batch of prompts. Unrolled layers (`scan_layers: false`) are fastest.

    Args:
      module, params, non_params, rules: as of `ModelOnMesh`.
      vocab_size: number of ids that may be generated, if the model has more rows than the tokenizer has ids.
      steps: number of steps of one program; None: 8, or 1 on a CPU, where a step takes so long that each token should
        appear at once.
    """

    def __init__(
        self,
        module: ModuleArrays,
        params: Params,
        non_params: Params,
        rules: AxisRules,
        *,
        vocab_size: int | None = None,
        steps: int | None = None,
    ):
        super().__init__(module, params, non_params, rules)
        self._vocab_size = vocab_size
        self._steps = steps or (1 if current_target().platform == "cpu" else _STEPS)
        whole = rules.sharding(jax.P())
        options = self.compiler_options
        self._prefill = jax.jit(self._prefill_step, static_argnames="room", compiler_options=options)
        # The tokens are not donated: the host reads them while the next program runs.
        self._next = jax.jit(
            self._decode_steps,
            static_argnames=("count", "sampling"),
            donate_argnames="cache",
            out_shardings=(whole, whole, None),
            compiler_options=options,
        )
        self._sample = jax.jit(self._sample_step, static_argnames="sampling", out_shardings=whole)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[Int[np.ndarray, " B"]]:
        """Yield the next token of every prompt in the batch, int32 [B], at most `max_tokens` times.

        Args:
          prompts: token ids of each row; they may differ in length.
          max_tokens: number of new tokens.
          sampling: how tokens are sampled from the logits.
          seed: seed of each row; a number s stands for s, s + 1, ... The tokens of a row depend on its prompt and its
            seed alone (up to rounding: XLA may choose another matmul for another number of rows).
          stop_tokens: ids that end a row, which is -1 from then on. Generation ends when all rows have ended.

        Raises:
          ConfigError: a prompt is empty, has unknown ids, or is too long for the model with its new tokens.
        """
        self._check(prompts, max_tokens)
        seeds = _seed_rows(seed, len(prompts))
        rows = self._row_count(len(prompts))
        tokens, lengths = _pad(prompts, rows, self.padded_length(max(map(len, prompts))))
        capacity = _capacity(tokens.shape[1], max_tokens)
        self._check_cache(rows, capacity, tokens.shape[1])
        parts = self._dispatch(tokens, lengths, np.resize(seeds, rows), capacity, max_tokens, sampling)
        ended = np.zeros(len(prompts), bool)
        stops = np.asarray(sorted(stop_tokens), np.int32)
        for row in itertools.islice(_read_ahead(parts), max_tokens):
            new = np.where(ended, -1, row[: len(prompts)])
            yield new
            ended |= np.isin(new, stops)
            if ended.all():
                return

    def _row_count(self, prompts: int) -> int:
        """Return the padded batch size for a number of prompts: a multiple of `batch_unit`; on GPUs, twice it or more.

        XLA computes a matmul of one row as a product and a sum, and in bfloat16 writes the product to memory, which
        takes three times the bytes of the weights.
        """
        least = 2 if current_target().platform == "cuda" else 1
        return max(least, -(-prompts // self.batch_unit)) * self.batch_unit

    def _dispatch(
        self,
        prompts: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, " B"],
        seeds: UInt32[np.ndarray, " B"],
        capacity: int,
        max_tokens: int,
        sampling: Sampling,
    ) -> Iterator[Int[Array, "..."]]:
        """Yield new tokens of all rows as device arrays, without waiting: [B] from the prefill, then [steps, B].

        The program of each part is dispatched when the part is asked for. The last part may exceed `max_tokens`.
        """
        with jax.set_mesh(self.rules.mesh):
            lengths, seeds = jax.device_put((lengths, seeds), self.rules.sharding(jax.P()))
            logits, cache = self._prefill(self.params, self.non_params, prompts, lengths, room=capacity)
            token = self._sample(logits, seeds=seeds, step=0, sampling=sampling)
        yield token
        done = 1
        while done < max_tokens:
            # Two sizes are compiled; a few steps too many cost less than as many programs of one step.
            count = self._steps if max_tokens - done > self._steps // 2 else 1
            with jax.set_mesh(self.rules.mesh):
                token, tokens, cache = self._next(
                    self.params, self.non_params, token, lengths, seeds, done, cache, count=count, sampling=sampling
                )
            yield tokens
            done += count

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if not prompts or min(map(len, prompts)) == 0:
            raise ConfigError("a prompt must have at least one token.")
        self.check_ids(prompts)
        longest = max(map(len, prompts))
        limit = self.context_length
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

    def cache_bytes(self, lengths: Sequence[int], max_tokens: int) -> int:
        """Return the bytes of the KV cache that `generate` allocates for prompts of these lengths, on all devices."""
        filled = self.padded_length(max(lengths))
        return self._cache_bytes(self._row_count(len(lengths)), _capacity(filled, max_tokens))

    def _check_cache(self, rows: int, capacity: int, filled: int) -> None:
        """Check that a KV cache for `capacity` tokens per row fits the devices' memory.

        Raises:
          ConfigError: it does not.
        """
        available = memory_per_device()
        if available is None:
            return
        total = available * self.rules.mesh.size
        needed = self._cache_bytes(rows, capacity)
        if needed <= total:
            return
        per_token = (needed - self._cache_bytes(rows, _BLOCK)) / max(capacity - _BLOCK, 1)
        fits = max(0, int(total / per_token) // _BLOCK * _BLOCK - filled)
        raise ConfigError(
            f"the cache of keys and values for {rows} x {capacity:,} tokens takes {needed / 2**30:,.1f} GiB, of "
            f"{total / 2**30:,.1f} GiB on {self.rules.mesh.size} device(s); at most about {fits:,} new tokens fit."
        )

    def _cache_bytes(self, rows: int, capacity: int) -> int:
        def make(params: Params, non_params: Params) -> list[Cache]:
            return self.module.merge(params, non_params).make_cache(rows, capacity).layers

        cache = jax.eval_shape(make, self.params, self.non_params)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))

    def _prefill_step(
        self,
        params: Params,
        non_params: Params,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        *,
        room: int,
    ) -> tuple[Float[Array, "B V"], Cache]:
        with logical_axis_rules(self.rules):
            return self.module.merge(params, non_params).prefill(tokens, lengths, room)

    def _decode_steps(
        self,
        params: Params,
        non_params: Params,
        token: Int[Array, " B"],
        lengths: Int[Array, " B"],
        seeds: UInt32[Array, " B"],
        done: int | jax.Array,
        cache: Cache,
        *,
        count: int,
        sampling: Sampling,
    ) -> tuple[Int[Array, " B"], Int[Array, "count B"], Cache]:
        """Run `count` decoding steps as one program, each of which samples the next token of every row.

        Returns:
          The newest token of each row; the tokens of all steps; and the cache with all tokens before the newest.
        """

        def advance(
            carry: tuple[jax.Array, Cache], step: jax.Array
        ) -> tuple[tuple[jax.Array, Cache], Int[Array, " B"]]:
            token, cache = carry
            logits, cache = self._decode_step(params, non_params, token, lengths + step - 1, cache)
            token = self._sample_step(logits, seeds=seeds, step=step, sampling=sampling)
            return (token, cache), token

        steps = done + jnp.arange(count, dtype=jnp.int32)
        (token, cache), tokens = jax.lax.scan(advance, (token, cache), steps)
        return token, tokens, cache

    def _decode_step(
        self,
        params: Params,
        non_params: Params,
        token: Int[Array, " B"],
        position: Int[Array, " B"],
        cache: Cache,
    ) -> tuple[Float[Array, "B V"], Cache]:
        with logical_axis_rules(self.rules):
            logits, cache = self.module.merge(params, non_params).decode(token[:, None], position[:, None], cache)
        return logits[:, 0], cache

    def _sample_step(
        self, logits: Float[Array, "B V"], *, seeds: UInt32[Array, " B"], step: int | jax.Array, sampling: Sampling
    ) -> Int[Array, " B"]:
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(seeds)
        if self._vocab_size is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self._vocab_size, logits, -jnp.inf)
        return sample(logits, keys, sampling)


def _read_ahead(parts: Iterator[jax.Array]) -> Iterator[Int[np.ndarray, " B"]]:
    """Yield the tokens of each step, int32 [B]; before an array is read, the program that computes the next is started.

    The device then has work while the host waits for tokens and handles them.
    """
    current = next(parts, None)
    while current is not None:
        ahead = next(parts, None)
        yield from np.atleast_2d(np.asarray(current))
        current = ahead


def _capacity(filled: int, max_tokens: int) -> int:
    """Return the tokens per row that a KV cache holds: those of padded prompts, and the new ones in whole blocks."""
    return filled + -(-max_tokens // _BLOCK) * _BLOCK


def _seed_rows(seed: int | Sequence[int], rows: int) -> UInt32[np.ndarray, " B"]:
    """Return one uint32 seed per row: those of the sequence `seed`, or for a number `seed`, `seed` + 1, ..."""
    seeds = np.asarray([seed + row for row in range(rows)] if isinstance(seed, int) else seed, np.uint32)
    if len(seeds) != rows:
        raise ValueError(f"seed must be one number, or one per prompt ({rows}); found {len(seeds)}.")
    return seeds


def _pad(
    prompts: Sequence[Sequence[int]], rows: int, width: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Pad prompts at their end to an int32 array [rows, width]; return it with the prompts' lengths."""
    tokens = np.zeros((rows, width), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths
