"""The token mixer of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a state space layer between a convolution and a norm.

The input is projected to a gate z, inputs x of the heads, what the groups write to the states (B) and read from them
(C), and a step size dt of each head. x, B and C go through a short convolution. The output of a head, with D x added,
is multiplied by silu(z) and then normalized over the channels of its group.

Dims: B batch, T length, D model, N heads, P channels of a head, G groups, S state size, W taps.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.attention.slot_cache import SlotRows, decode_slots, padding_last
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer, step_size_bias
from jaxstack.models.layer import CacheRoom, CacheSlots, Context, Layer, LayerCache, ParameterCount, SegmentIds
from jaxstack.models.linear import Linear, apply_scattered, apply_together
from jaxstack.models.mixers.context_states import convolution_over, gathers_states
from jaxstack.models.mixers.short_convolution import ShortConvolution, convolve_and_keep
from jaxstack.models.norm import LayerInput
from jaxstack.models.recurrent import StateSpace
from jaxstack.parallel import context_axis, save_for_backward, shard, with_local_heads
from jaxstack.parallel.rules import KEEP_FLOAT32
from pallas_kernels import ssd, ssd_over_shards, update_states, with_whole_sequences


class StateSpaceCache(NamedTuple):
    """Cache of a state space layer, of fixed size for each row: the state, and the convolution's last raw inputs."""

    state: Float[Array, "B N P S"]
    """float32."""
    x: Float[Array, "B tail N P"]
    """Inputs of the last W - 1 tokens, in the compute dtype; B and C follow."""
    b: Float[Array, "B tail G S"]
    c: Float[Array, "B tail G S"]


class StateSpaceLayer(nnx.Module):
    """The sublayer of Mamba-2: projections, short convolutions, the state space recurrence and a gated norm.

    Args:
      layer: its mixer is a `StateSpace`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        kind = layer.mixer
        assert isinstance(kind, StateSpace)
        d = config.hidden_size
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        per_head = (kind.num_heads, kind.head_dim), ("heads", "head_dim")
        per_group = (kind.n_groups, kind.state_size), ("kv_heads", "head_dim")

        def project(outputs: tuple[int, ...], axes: tuple[str, ...]) -> Linear:
            return Linear((d,), outputs, ("embed", *axes), rngs=rngs, initialize=inner, bias=kind.use_bias)

        def convolve(channels: tuple[int, ...], axes: tuple[str, ...]) -> ShortConvolution:
            return ShortConvolution(channels, axes, kind.conv_kernel, rngs=rngs, bias=kind.use_conv_bias)

        self.z_proj = project(*per_head)
        self.x_proj = project(*per_head)
        self.b_proj = project(*per_group)
        self.c_proj = project(*per_group)
        self.dt_proj = project((kind.num_heads,), ("heads",))
        self.x_conv = convolve(*per_head)
        self.b_conv = convolve(*per_group)
        self.c_conv = convolve(*per_group)
        n = (kind.num_heads,)
        self.a_log = _per_head(jnp.log(jax.random.uniform(rngs.params(), n, minval=1.0, maxval=16.0)))
        self.dt_bias = _per_head(
            step_size_bias(rngs.params(), (kind.num_heads,), kind.time_step_min, kind.time_step_max)
        )
        self.skip = _per_head(jnp.ones(n, jnp.float32))
        self.norm = GroupsNorm(kind, config.norm_eps)
        self.out_proj = Linear(
            per_head[0], (d,), (*per_head[1], "embed"), rngs=rngs, initialize=outer, bias=kind.use_bias
        )
        self.kind = kind
        self.implementation = config.attention_implementation

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the sublayer to x [B, T, D]; also return the cache with this call's tokens added."""
        z, x, b, c, dt = apply_together(x, self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj)
        x, z = (shard(y, "batch", "length", "act_heads", "act_head_dim") for y in (x, z))
        b, c = (shard(y, "batch", "length", "act_kv_heads", "act_head_dim") for y in (b, c))
        dt = shard(dt, "batch", "length", "act_heads")
        slots = context.slots
        if cache is None or slots is None:
            raw = (save_for_backward(y) for y in (x, b, c))
            y = with_local_heads(
                self._recur_over, *raw, context.segment_ids, per_token=(dt,), per_head=self._weights_of_heads()
            )
        elif slots.pages is None:
            y, cache = self._decode(x, b, c, dt, cache, slots)
        else:
            # Packed tokens are one row for the recurrence, whatever rows they are for the matmuls.
            packed = [y.reshape(1, -1, *y.shape[2:]) for y in (x, b, c, dt)]
            y, cache = decode_slots(self._decode, packed, cache, slots, self._step)
            y = y.reshape(x.shape)
        y = self.norm(y, z)
        y = shard(y, "batch", "length", "act_heads", "act_head_dim")
        return apply_scattered(y, self.out_proj), cache

    def _weights_of_heads(self) -> tuple[jax.Array, ...]:
        """Return what `_recur` needs of each head, heads first; the weights of a group are those of all its heads."""
        repeats = self.kind.num_heads // self.kind.n_groups
        found = []
        for conv, repeat in ((self.x_conv, 1), (self.b_conv, repeats), (self.c_conv, repeats)):
            taps = jnp.moveaxis(conv.taps[...], 0, 1)
            bias = jnp.zeros_like(taps[:, 0]) if conv.bias is None else conv.bias[...]
            found += [jnp.repeat(weight, repeat, axis=0) for weight in (taps, bias)]
        return (*found, self.a_log[...], self.dt_bias[...], self.skip[...])

    def _recur_over(
        self,
        x: Float[Array, "B T N P"],
        b: Float[Array, "B T G S"],
        c: Float[Array, "B T G S"],
        segment_ids: SegmentIds,
        dt: Float[Array, "B T N"],
        *weights: jax.Array,
    ) -> Float[Array, "B T N P"]:
        """Compute the outputs of the heads before the gate, for raw inputs that may be a part of the sequence.

        Inside a `shard_map` over `context` an all-to-all gives each device whole sequences of a part of the heads, or
        devices gather the states, see `gathers_states`.

        Args:
          weights: of these heads, from `_weights_of_heads`.
        """
        axis = context_axis()
        if axis is None:
            return self._recur(x, b, c, segment_ids, dt, *weights)

        if gathers_states(axis, self.kind, x):
            return self._recur(x, b, c, segment_ids, dt, *weights, axis=axis)

        def whole(joined: jax.Array, b: jax.Array, c: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
            count = joined.shape[2]
            start = jax.lax.axis_index(axis) * count
            own = (jax.lax.dynamic_slice_in_dim(weight, start, count) for weight in weights)
            return self._recur(joined[..., :-1], b, c, segment_ids, joined[..., -1], *own)

        joined = jnp.concatenate([x, dt[..., None]], axis=-1)
        return with_whole_sequences(whole, joined, b, c, segment_ids, axis_name=axis)

    def _recur(
        self,
        x: Float[Array, "B T N P"],
        b: Float[Array, "B T G S"],
        c: Float[Array, "B T G S"],
        segment_ids: SegmentIds,
        dt: Float[Array, "B T N"],
        *weights: jax.Array,
        axis: str | None = None,
    ) -> Float[Array, "B T N P"]:
        """Compute the outputs of the heads before the gate, for the raw inputs of whole sequences.

        Args:
          axis: the mesh axis on whose devices the inputs are parts of the sequences; None: they are whole.
        """
        *convolutions, a_log, dt_bias, skip = weights
        one_per_group = slice(None, None, x.shape[2] // b.shape[2])
        parts = ((x, slice(None)), (b, one_per_group), (c, one_per_group))
        x, b, c = (
            convolution_over(axis)(y, jnp.moveaxis(taps[heads], 0, 1), bias[heads], segment_ids=segment_ids)
            for (y, heads), taps, bias in zip(parts, convolutions[::2], convolutions[1::2], strict=True)
        )
        inputs = x, self._step_sizes(dt, dt_bias), -jnp.exp(a_log), b, c
        if axis is None:
            y, _ = ssd(*inputs, segment_ids=segment_ids)
        else:
            y = ssd_over_shards(*inputs, axis_name=axis, segment_ids=segment_ids)
        return _add_skip(y, x, skip)

    def _step_sizes(self, dt: Float[Array, "B T N"], bias: Float[Array, " N"]) -> Float[Array, "B T N"]:
        """Return the positive step sizes in float32, within the limits of the configuration."""
        dt = jax.nn.softplus(dt.astype(jnp.float32) + bias)
        low, high = self.kind.time_step_limit
        return dt if not low and high is None else jnp.clip(dt, low, high)

    def _decode(
        self, x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, cache: StateSpaceCache, slots: CacheSlots
    ) -> tuple[Float[Array, "B T N P"], StateSpaceCache]:
        """Add the tokens to the cache; return the outputs of the heads before the gate, and the cache."""
        lengths, (x, b, c, dt), restore = padding_last(slots.queries, x, b, c, dt)
        there = jnp.arange(x.shape[1]) < lengths[:, None]
        # A step size of 0 leaves the state as it is.
        dt = jnp.where(there[..., None], self._step_sizes(dt, self.dt_bias[...]), 0)
        convolutions = self.x_conv, self.b_conv, self.c_conv
        (x, b, c), tails = convolve_and_keep(convolutions, (x, b, c), cache[1:], lengths)
        y, state = ssd(x, dt, -jnp.exp(self.a_log[...]), b, c, state=cache.state)
        return restore(_add_skip(y, x, self.skip[...])), StateSpaceCache(state, *tails)

    def _step(
        self,
        x: Float[Array, "R 1 N P"],
        b: Float[Array, "R 1 G S"],
        c: Float[Array, "R 1 G S"],
        dt: Float[Array, "R 1 N"],
        cache: StateSpaceCache,
        rows: SlotRows,
    ) -> tuple[Float[Array, "R 1 N P"], StateSpaceCache]:
        """Add a token to each row of the slots' cache; return their outputs before the gate, and the cache."""
        convolutions = self.x_conv, self.b_conv, self.c_conv
        tails = rows.read(cache[1:])
        (x, b, c), tails = convolve_and_keep(convolutions, (x, b, c), tails, rows.filled.astype(jnp.int32))
        dt = self._step_sizes(dt, self.dt_bias[...])[:, 0].astype(jnp.float32)
        y, state = update_states(
            cache.state,
            rows.written(len(cache.state)),
            c[:, 0],
            b[:, 0],
            x[:, 0].astype(jnp.float32) * dt[..., None],
            -dt * jnp.exp(self.a_log[...]),
            begins=rows.seen == 0,
            key_axis=3,
        )
        y = y[:, None].astype(x.dtype)
        return _add_skip(y, x, self.skip[...]), StateSpaceCache(state, *rows.write(cache[1:], tuple(tails)))

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> StateSpaceCache:
        """Create an empty cache for each of `batch` rows, whatever their length."""
        kind = self.kind
        state = jnp.zeros((batch, kind.num_heads, kind.head_dim, kind.state_size), jnp.float32)
        x = jnp.zeros((batch, kind.conv_kernel - 1, kind.num_heads, kind.head_dim), dtype)
        b = jnp.zeros((batch, kind.conv_kernel - 1, kind.n_groups, kind.state_size), dtype)
        return StateSpaceCache(
            shard(state, "batch", "act_heads", None, None),
            shard(x, "batch", None, "act_heads", None),
            *(shard(b, "batch", None, "act_kv_heads", None) for _ in range(2)),
        )

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> StateSpaceCache:
        """Create an empty cache with one row for each slot of an engine."""
        return self.make_cache(room.rows, room.length, dtype)

    def complete_cache(self, cache: LayerCache) -> LayerCache:
        """Return the cache as it is: nothing in it depends on weights."""
        return cache

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: projections; and convolutions, biases, norm, weights of heads."""
        kind = layer.mixer
        assert isinstance(kind, StateSpace)
        d = config.hidden_size
        inner = kind.num_heads * kind.head_dim
        convolved = inner + 2 * kind.n_groups * kind.state_size
        projected = inner + convolved + kind.num_heads
        biases = kind.use_bias * (projected + d)
        other = convolved * (kind.conv_kernel + kind.use_conv_bias) + 3 * kind.num_heads + inner + biases
        return ParameterCount(d * (projected + inner), other)

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: Layer, length: int) -> float:
        """Return forward and backward FLOPs per token of the recurrence: writing to the states and reading them."""
        kind = layer.mixer
        assert isinstance(kind, StateSpace)
        return 12.0 * kind.num_heads * kind.head_dim * kind.state_size


class GroupsNorm(nnx.Module):
    """RMS normalization of y = x silu(gate) over the channels of each group of heads together, y / rms(y) * scale.

    It is computed by XLA, which sums squares over the devices that share the heads of a group.
    """

    def __init__(self, kind: StateSpace, eps: float):
        ones = jnp.ones((kind.num_heads, kind.head_dim), jnp.float32)
        self.scale = nnx.Param(ones, logical_axes=("heads", "head_dim"), **{KEEP_FLOAT32: True})
        self.groups = kind.n_groups
        self.eps = eps

    def __call__(self, x: Float[Array, "... N P"], gate: Float[Array, "... N P"]) -> Float[Array, "... N P"]:
        return _normalize(x, gate, self.scale[...], self.groups, self.eps)


@partial(jax.checkpoint, static_argnums=(3, 4))  # its backward needs only x and the gate, not float32 copies of them
def _normalize(
    x: Float[Array, "... N P"], gate: Float[Array, "... N P"], scale: Float[Array, "N P"], groups: int, eps: float
) -> Float[Array, "... N P"]:
    wide = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    wide = wide.reshape(*x.shape[:-2], groups, -1, x.shape[-1])
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=(-2, -1), keepdims=True) + eps)
    return (wide.reshape(x.shape) * scale).astype(x.dtype)


def _per_head(value: Float[Array, " N"]) -> nnx.Param:
    return nnx.Param(value, logical_axes=("heads",))


@jax.checkpoint
def _add_skip(y: Float[Array, "B T N P"], x: Float[Array, "B T N P"], skip: Float[Array, " N"]) -> jax.Array:
    """Return y + skip x in the dtype of y."""
    return (y.astype(jnp.float32) + skip[:, None] * x.astype(jnp.float32)).astype(y.dtype)
