"""A model on its mesh with its parameters in the compute dtype, from which text is generated and scored."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxstack.distributed.xla_options import OptionValue, packed_many_row_options, packed_weight_options
from jaxstack.errors import ConfigError
from jaxstack.models.restack import join_projections
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules, is_cast
from jaxstack.parallel.sharding_context import StepLayout, logical_axis_rules
from pallas_kernels.target import current_target
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS
from pallas_kernels.weight_only.packed import device_bytes, is_packed

Params = dict[str, PyTree]
"""Parameters, or other variables, of a module as nested dicts of arrays."""
DECODING_LAYOUT = StepLayout(peer_sums="auto")
"""Choices of parallelism for inference."""
_BLOCK = 64
"""Unit of padding: rows are padded to this many tokens times a power of two, so that few shapes are compiled."""


def copies_on_devices(shape: Sequence[int], sharding: jax.sharding.Sharding) -> int:
    """Return how many times the devices together hold an array of this shape and sharding."""
    return len(sharding.device_set) * math.prod(sharding.shard_shape(tuple(shape))) // max(1, math.prod(shape))


def bytes_on_devices(x: jax.Array) -> int:
    """Return the bytes of an array in device memory, summed over its devices."""
    return device_bytes(x) * copies_on_devices(x.shape, x.sharding)


def has_many(rows: int) -> bool:
    """Return True if products of so many rows round their inputs, where FP8 weights ask for it."""
    return rows > MOST_EXACT_ROWS


class ModelOnMesh:
    """A Transformer with its parameters sharded over a mesh, for inference.

    Args:
      module: the functional form of the Transformer.
      params: its parameters, in their final sharding. Matrices are cast to the compute dtype.
      non_params: its other variables.
      rules: sharding rules of the mesh.
      layout: the other choices of parallelism.

    Raises:
      ConfigError: the mesh splits sequences or layers over devices.
    """

    def __init__(
        self,
        module: ModuleArrays,
        params: Params,
        non_params: Params,
        rules: AxisRules,
        layout: StepLayout = DECODING_LAYOUT,
    ):
        wrong = {axis: rules.mesh.shape[axis] for axis in ("pipeline", "context") if rules.mesh.shape[axis] > 1}
        if wrong:
            shown = ", ".join(f"{axis} {degree}" for axis, degree in wrong.items())
            raise ConfigError(
                f"generation and tasks support only data, fsdp, expert and tensor; found {shown}: set it to 1."
            )
        self.module = module
        self.rules = rules
        self.layout = layout
        self.config = module.merge(module.abstract_params, module.abstract_non_params).config
        self.load(params, non_params)
        packed = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(leaf)]
        self.compiler_options: dict[str, OptionValue] | None = None
        """Options of XLA for programs that multiply with the parameters; None: the defaults. See also `options`."""
        self._many_row_options: dict[str, OptionValue] = {}
        if packed and current_target().platform == "cuda":
            self.compiler_options = packed_weight_options()
            dtype = module.dtype or jnp.float32
            self._many_row_options = packed_many_row_options(packed, dtype, partitioned=rules.mesh.size > 1)

    def options(self, *, many: bool) -> dict[str, OptionValue] | None:
        """Return XLA's options for a program that multiplies with the parameters.

        Args:
          many: True if the products have many rows, see `has_many`.
        """
        if not many or not self._many_row_options:
            return self.compiler_options
        return {**(self.compiler_options or {}), **self._many_row_options}

    def load(self, params: Params, non_params: Params) -> None:
        """Use new parameters of the same shapes from now on, without compiling again."""
        self.params = cast_matrices(self.module, params, self.rules)
        self.non_params = non_params

    def check_whole(self, what: str) -> None:
        """Check that one program can compute the whole model, as `what` needs.

        Raises:
          ConfigError: its layers are split over the stages of a pipeline.
        """

    @property
    def device_count(self) -> int:
        """Number of devices that the weights and the cache are spread over."""
        return self.rules.mesh.size

    @property
    def memory_share(self) -> float:
        """Share of the memory of all devices that weights and cache can take until the fullest device is full."""
        return 1.0

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in device memory, summed over all devices; what is replicated counts for each."""
        return sum(map(bytes_on_devices, jax.tree.leaves((self.params, self.non_params))))

    def unload(self) -> None:
        """Free the memory of the parameters until `load` is called again."""
        self.params = {}
        self.non_params = {}

    def join_projections(self) -> None:
        """Merge dense layers with the same input, such as q, k and v, for faster decoding.

        Outputs are the same up to rounding. Afterwards `module` and `params` have a layer `qkv_proj` in place of
        `q_proj`, `k_proj` and `v_proj`, and `gate_up_proj` in place of `gate_proj` and `up_proj`; `load` then takes
        parameters of that form. Layers that are packed in different formats stay as they are, as do all layers if
        weights are sharded over other axes than `tensor`.
        """
        degrees = self.rules.mesh.shape
        if any(degree > 1 for axis, degree in degrees.items() if axis not in ("data", "tensor")):
            return
        parts = degrees["tensor"]
        make = self.module.make
        model = self.module.merge(self.params, self.non_params)
        self.params = {}
        with jax.set_mesh(self.rules.mesh):
            paths = join_projections(model, parts=parts)

        def make_joined(rngs: nnx.Rngs) -> nnx.Module:
            made = make(rngs)
            join_projections(made, paths, parts)
            return made

        self.module = ModuleArrays(make_joined)
        self.params = self.module.split(model)[0]

    def split_replicas(self) -> list["ModelOnMesh"]:
        """Return the data-parallel replicas of the model, each on its own mesh, without copying arrays."""
        mesh = self.rules.mesh
        axis = mesh.axis_names.index("data")
        if mesh.devices.shape[axis] == 1:
            return [self]
        replicas = []
        for devices in np.split(mesh.devices, mesh.devices.shape[axis], axis):
            rules = dataclasses.replace(self.rules, mesh=Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))
            params = on_replica(self.params, rules.mesh)
            non_params = on_replica(self.non_params, rules.mesh)
            replicas.append(ModelOnMesh(self.module, params, non_params, rules, self.layout))
        return replicas

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
          ConfigError: an id is not in the vocabulary, or the model is split over stages.
        """
        self.check_whole("computing logits")
        rows = np.asarray(tokens, np.int32)
        self.check_ids(rows.tolist())
        padding = -len(rows) % self.batch_unit
        padded = np.concatenate([rows, np.zeros((padding, rows.shape[1]), np.int32)])
        with jax.set_mesh(self.rules.mesh):
            return self._logits(self.params, self.non_params, padded)[: len(rows)]

    @functools.cached_property
    def _logits(self) -> Callable[[Params, Params, ArrayLike], Float[Array, "B T V"]]:
        def compute(params: Params, non_params: Params, tokens: jax.Array) -> jax.Array:
            with logical_axis_rules(self.rules, self.layout):
                return self.module.merge(params, non_params)(tokens).astype(jnp.float32)

        return jax.jit(compute, compiler_options=self.options(many=True))

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


def on_replica(params: Params, mesh: Mesh) -> Params:
    """Return the replica of parameters on the devices of `mesh`; only arrays on a single device are copied."""
    devices = set(mesh.devices.flat)

    def part(x: jax.Array) -> jax.Array:
        if not isinstance(x.sharding, NamedSharding):  # x is on a single device, of this mesh or of another replica's
            return jax.device_put(x, NamedSharding(mesh, jax.P()))
        shards = [shard.data for shard in x.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), shards)

    return jax.tree.map(part, params)


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

    Routers keep their dtype, and parameters with `KEEP_FLOAT32` in their metadata float32. Packed weights keep their
    format; of those that hold values as they are, these are cast.
    """

    def casts(names: Sequence[str | None] | None, shape: Sequence[int], metadata: Mapping[str, object]) -> bool:
        return is_cast(names, shape, metadata)

    wanted = module.map_parameters(casts, rules)

    dtype = module.dtype or jnp.float32

    def cast(x, wanted):
        if not wanted:
            return x
        return x.with_numbers(dtype) if is_packed(x) else x.astype(dtype)

    return jax.tree.map(cast, params, wanted, is_leaf=is_packed)


_MAX_LOGIT_TOKENS = 4096
"""Number of tokens whose logits are in memory at a time."""


class Score(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding would produce it.

    Attributes:
      log_probability: natural logarithm, summed over the tokens of the continuation.
      is_greedy: True if each token is the likeliest at its place.
    """

    log_probability: float
    is_greedy: bool


class Scorer:
    """Computes the log-probabilities of given continuations under a model, in batches padded to few shapes.

    Args:
      model: the model on its mesh.
      batch_size: rows per batch; rounded up to a multiple of the model's `batch_unit`.
    """

    def __init__(self, model: ModelOnMesh, batch_size: int):
        model.check_whole("scoring")
        self.model = model
        self.batch_size = -(-batch_size // model.batch_unit) * model.batch_unit
        self._score = jax.jit(self._score_batch, out_shardings=model.rules.sharding(jax.P()))

    def score(
        self, rows: Sequence[tuple[Sequence[int], int]], report: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """Return for each row (ids, first) the summed log-probability of ids[first:] given ids[:first], as a `Score`.

        Args:
          rows: ids of a row, and the index of its first scored token, at least 1.
          report: called after each batch with the number of rows done.

        Returns:
          A score per row.

        Raises:
          ConfigError: an id is not in the model's vocabulary.
        """
        self.model.check_ids([ids for ids, _ in rows])
        found: dict[int, Score] = {}
        order = sorted(
            range(len(rows)), key=lambda number: -len(rows[number][0])
        )  # longest first, to run out of memory early
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            tokens, targets = self._arrange([rows[number] for number in numbers])
            with jax.set_mesh(self.model.rules.mesh):
                sums, greedy = self._score(self.model.params, self.model.non_params, tokens, targets)
            for number, total, all_likeliest in zip(numbers, sums.tolist(), greedy.tolist(), strict=False):
                found[number] = Score(total, all_likeliest)
            report(len(found))
        return [found[number] for number in range(len(rows))]

    def _arrange(
        self, rows: Sequence[tuple[Sequence[int], int]]
    ) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """Return padded int32 arrays of input tokens and target tokens for a batch; a target of -1 is not scored."""
        width = self.model.padded_length(max(len(ids) - 1 for ids, _ in rows))
        tokens, targets = (np.full((self.batch_size, width), fill, np.int32) for fill in (0, -1))
        for row, (ids, first) in enumerate(rows):
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, first - 1 : len(ids) - 1] = ids[first:]
        return tokens, targets

    def _score_batch(
        self, params: Params, non_params: Params, tokens: Int[Array, "B T"], targets: Int[Array, "B T"]
    ) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
        """Return each row's summed log-probability, and whether greedy decoding would produce its targets."""
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.model.module.merge(params, non_params)
            hidden = model.hidden(tokens)
            length = tokens.shape[1]
            while length % 2 == 0 and length * tokens.shape[0] > _MAX_LOGIT_TOKENS:
                length //= 2

            def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x, wanted = chunk
                logits = model.logits(x)
                chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], -1)[..., 0]
                log_probability = chosen - jax.nn.logsumexp(logits, -1)
                counts = wanted >= 0
                likeliest = (jnp.argmax(logits, -1) == wanted) | ~counts
                return jnp.where(counts, log_probability, 0).sum(1), likeliest.all(1)

            chunks = [jnp.stack(jnp.split(x, tokens.shape[1] // length, 1)) for x in (hidden, targets)]
            sums, greedy = jax.lax.map(score_chunk, tuple(chunks))
        return sums.sum(0), greedy.all(0)
