"""The token mixer of gated DeltaNet (Yang et al., arXiv:2412.06464): a delta rule between a convolution and a norm.

The input is projected to queries, keys and values, which go through a short convolution, to a gate z, and to two
numbers for each value head: how much of its state is kept, and how much of it is corrected. Queries and keys have
length 1. The output of a head is normalized, and then multiplied by silu(z).

`jaxstack.models.mixers.kimi_delta` has other projections to the gate and to the decays, of which a value head has one
for each key channel: [B, T, N, H] in place of [B, T, N].

Dims: B batch, T length, D model, K key heads of H channels, N value heads of V channels, W taps.
"""

from collections.abc import Callable
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
from jaxstack.models.norm import LayerInput, make_norm
from jaxstack.models.recurrent import GatedDelta
from jaxstack.parallel import context_axis, save_for_backward, shard, with_local_heads
from pallas_kernels import gated_delta_rule, gated_delta_rule_over_shards, update_states, with_whole_sequences


class GatedDeltaCache(NamedTuple):
    """Cache of a gated DeltaNet layer, of fixed size for each row: the state, and the convolution's last raw inputs."""

    state: Float[Array, "B N H V"]
    """float32."""
    q: Float[Array, "B tail K H"]
    """Queries of the last W - 1 tokens, in the compute dtype; keys and values follow."""
    k: Float[Array, "B tail K H"]
    v: Float[Array, "B tail N V"]


class GatedDeltaNet(nnx.Module):
    """The sublayer of gated DeltaNet: projections, short convolutions, the gated delta rule and a gated norm.

    Args:
      layer: its mixer is a `GatedDelta`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        kind = layer.mixer
        assert isinstance(kind, GatedDelta)
        d = config.hidden_size
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        keys = (kind.num_key_heads, kind.key_head_dim), ("kv_heads", "head_dim")
        values = (kind.num_heads, kind.head_dim), ("heads", "head_dim")

        def project(outputs: tuple[int, ...], axes: tuple[str, ...]) -> Linear:
            return Linear((d,), outputs, ("embed", *axes), rngs=rngs, initialize=inner)

        def convolve(channels: tuple[int, ...], axes: tuple[str, ...]) -> ShortConvolution:
            return ShortConvolution(channels, axes, kind.conv_kernel, rngs=rngs, bias=False)

        self.in_proj_q = project(*keys)
        self.in_proj_k = project(*keys)
        self.in_proj_v = project(*values)
        self.in_proj_b = project((kind.num_heads,), ("heads",))
        self._make_gates(config, kind, rngs)
        self.q_conv = convolve(*keys)
        self.k_conv = convolve(*keys)
        self.v_conv = convolve(*values)
        rates = jax.random.uniform(rngs.params(), (kind.num_heads,), minval=1.0, maxval=16.0)
        self.a_log = nnx.Param(jnp.log(rates), logical_axes=("heads",))
        eps = config.norm_eps if kind.norm_eps is None else kind.norm_eps
        self.norm = make_norm("rms_norm", kind.head_dim, eps)
        self.out_proj = Linear(values[0], (d,), (*values[1], "embed"), rngs=rngs, initialize=outer)
        self.kind = kind

    def _make_gates(self, config: ModelConfig, kind: GatedDelta, rngs: nnx.Rngs) -> None:
        """Make what the gate and the decays are computed by: projections, and the bias of the decays."""
        d = config.hidden_size
        inner = make_initializer(config)
        heads = (kind.num_heads,)
        axes = ("embed", "heads", "head_dim")
        self.in_proj_z = Linear((d,), (*heads, kind.head_dim), axes, rngs=rngs, initialize=inner)
        self.in_proj_a = Linear((d,), heads, axes[:2], rngs=rngs, initialize=inner)
        self.dt_bias = nnx.Param(step_size_bias(rngs.params(), heads), logical_axes=("heads",))

    def _project(self, x: LayerInput) -> list[jax.Array]:
        """Project the input; return queries, keys, values, the gate z, beta [B, T, N] and what gives the decays."""
        wide = apply_together(x, self.in_proj_q, self.in_proj_k, self.in_proj_v, self.in_proj_z)
        return [*wide, *apply_together(x, self.in_proj_b, self.in_proj_a)]  # never in FP8, as the others may be

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the sublayer to x [B, T, D]; also return the cache with this call's tokens added."""
        q, k, v, z, beta, dt = self._project(x)
        q, k = (shard(y, "batch", "length", "act_kv_heads", "act_head_dim") for y in (q, k))
        v, z = (shard(y, "batch", "length", "act_heads", "act_head_dim") for y in (v, z))
        beta = shard(beta, "batch", "length", "act_heads")
        dt = shard(dt, "batch", "length", "act_heads", *(None,) * (dt.ndim - 3))
        slots = context.slots
        if cache is None or slots is None:
            raw = (save_for_backward(y) for y in (v, q, k))
            ids = context.segment_ids
            out = with_local_heads(self._recur_over, *raw, ids, per_token=(beta, dt), per_head=self._weights_of_heads())
        elif slots.pages is None:
            out, cache = self._decode(q, k, v, beta, dt, cache, slots)
        else:
            # Packed tokens are one row for the recurrence, whatever rows they are for the matmuls.
            packed = [y.reshape(1, -1, *y.shape[2:]) for y in (q, k, v, beta, dt)]
            out, cache = decode_slots(self._decode, packed, cache, slots, self._step)
            out = out.reshape(v.shape)
        out = _times_gate(self.norm(out), z, self._gate)
        out = shard(out, "batch", "length", "act_heads", "act_head_dim")
        return apply_scattered(out, self.out_proj), cache

    @staticmethod
    def _gate(z: Float[Array, "B T N V"]) -> Float[Array, "B T N V"]:
        """Return what the normalized output is multiplied by."""
        return jax.nn.silu(z)

    def _weights_of_heads(self) -> tuple[jax.Array, ...]:
        """Return what `_recur` needs of each value head, heads first; the taps of a key head are repeated."""
        repeats = self.kind.num_heads // self.kind.num_key_heads
        taps = [jnp.moveaxis(conv.taps[...], 0, 1) for conv in (self.q_conv, self.k_conv, self.v_conv)]
        q, k = (jnp.repeat(x, repeats, axis=0) for x in taps[:2])
        return q, k, taps[2], self.a_log[...], self.dt_bias[...]

    def _recur_over(
        self,
        v: Float[Array, "B T N V"],
        q: Float[Array, "B T K H"],
        k: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        beta: Float[Array, "B T N"],
        dt: Float[Array, "B T N *channels"],
        *weights: jax.Array,
    ) -> Float[Array, "B T N V"]:
        """Compute the outputs of the heads before the norm, for raw inputs that may be a part of the sequence.

        Inside a `shard_map` over `context` an all-to-all gives each device whole sequences of a part of the heads, or
        devices gather the maps of the states, see `gathers_states`.

        Args:
          weights: of these heads, from `_weights_of_heads`.
        """
        axis = context_axis()
        if axis is None:
            return self._recur(v, q, k, segment_ids, beta, dt, *weights)

        width = v.shape[-1]
        if gathers_states(axis, self.kind, v):
            return self._recur(v, q, k, segment_ids, beta, dt, *weights, axis=axis)

        def whole(joined: jax.Array, q: jax.Array, k: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
            count = joined.shape[2]
            start = jax.lax.axis_index(axis) * count
            own = (jax.lax.dynamic_slice_in_dim(w, start, count) for w in weights)
            dt_parts = joined[..., width + 1 :].reshape(*joined.shape[:3], *dt.shape[3:])
            return self._recur(joined[..., :width], q, k, segment_ids, joined[..., width], dt_parts, *own)

        joined = jnp.concatenate([v, beta[..., None], dt.reshape(*beta.shape, -1)], axis=-1)
        return with_whole_sequences(whole, joined, q, k, segment_ids, axis_name=axis)

    def _recur(
        self,
        v: Float[Array, "B T N V"],
        q: Float[Array, "B T K H"],
        k: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        beta: Float[Array, "B T N"],
        dt: Float[Array, "B T N *channels"],
        *weights: jax.Array,
        axis: str | None = None,
    ) -> Float[Array, "B T N V"]:
        """Compute the outputs of the heads before the norm, for the raw inputs of whole sequences.

        Args:
          axis: the mesh axis on whose devices the inputs are parts of the sequences; None: they are whole.
        """
        *taps, a_log, dt_bias = weights
        of_key_head = slice(None, None, v.shape[2] // k.shape[2])
        q, k, v = (
            convolution_over(axis)(x, jnp.moveaxis(w, 0, 1), segment_ids=segment_ids)
            for x, w in zip((q, k, v), (taps[0][of_key_head], taps[1][of_key_head], taps[2]), strict=True)
        )
        decay, beta = self._gates(dt, beta, a_log, dt_bias)
        q = _of_length_1(q)
        k = _of_length_1(k)
        if axis is not None:
            return gated_delta_rule_over_shards(q, k, v, decay, beta, axis_name=axis, segment_ids=segment_ids)
        return gated_delta_rule(q, k, v, decay, beta, segment_ids=segment_ids)[0]

    def _gates(
        self,
        dt: Float[Array, "B T N *channels"],
        beta: Float[Array, "B T N"],
        a_log: Float[Array, " N"],
        dt_bias: Float[Array, " N *channels"],
    ) -> tuple[Float[Array, "B T N *channels"], Float[Array, "B T N"]]:
        """Return the logarithm of the share of each state that is kept, and the share that is corrected, in float32."""
        rate = jnp.exp(a_log).reshape(-1, *(1,) * (dt_bias.ndim - 1))
        most = 2.0 if self.kind.allow_neg_eigval else 1.0
        log_decay = -rate * jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        return log_decay, most * jax.nn.sigmoid(beta.astype(jnp.float32))

    def _decode(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        beta: jax.Array,
        dt: jax.Array,
        cache: GatedDeltaCache,
        slots: CacheSlots,
    ) -> tuple[Float[Array, "B T N V"], GatedDeltaCache]:
        """Add the tokens to the cache; return the outputs of the heads before the norm, and the cache."""
        lengths, (q, k, v, beta, dt), restore = padding_last(slots.queries, q, k, v, beta, dt)
        there = jnp.arange(v.shape[1]) < lengths[:, None]
        decay, beta = (
            jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, 0)
            for x in self._gates(dt, beta, self.a_log[...], self.dt_bias[...])
        )  # which leaves the state as it is
        convolutions = self.q_conv, self.k_conv, self.v_conv
        (q, k, v), tails = convolve_and_keep(convolutions, (q, k, v), cache[1:], lengths)
        out, state = gated_delta_rule(_of_length_1(q), _of_length_1(k), v, decay, beta, state=cache.state)
        return restore(out), GatedDeltaCache(state, *tails)

    def _step(
        self,
        q: Float[Array, "R 1 K H"],
        k: Float[Array, "R 1 K H"],
        v: Float[Array, "R 1 N V"],
        beta: Float[Array, "R 1 N"],
        dt: Float[Array, "R 1 N *channels"],
        cache: GatedDeltaCache,
        rows: SlotRows,
    ) -> tuple[Float[Array, "R 1 N V"], GatedDeltaCache]:
        """Add a token to each row of the slots' cache; return their outputs before the norm, and the cache."""
        convolutions = self.q_conv, self.k_conv, self.v_conv
        tails = rows.read(cache[1:])
        (q, k, v), tails = convolve_and_keep(convolutions, (q, k, v), tails, rows.filled.astype(jnp.int32))
        decay, beta = self._gates(dt, beta, self.a_log[...], self.dt_bias[...])
        out, state = update_states(
            cache.state,
            rows.written(len(cache.state)),
            _of_length_1(q)[:, 0].astype(jnp.float32) * q.shape[-1] ** -0.5,
            _of_length_1(k)[:, 0],
            v[:, 0],
            decay[:, 0],
            beta[:, 0],
            begins=rows.seen == 0,
        )
        return out[:, None], GatedDeltaCache(state, *rows.write(cache[1:], tuple(tails)))

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> GatedDeltaCache:
        """Create an empty cache for each of `batch` rows, whatever their length."""
        kind = self.kind
        state = jnp.zeros((batch, kind.num_heads, kind.key_head_dim, kind.head_dim), jnp.float32)
        key = jnp.zeros((batch, kind.conv_kernel - 1, kind.num_key_heads, kind.key_head_dim), dtype)
        value = jnp.zeros((batch, kind.conv_kernel - 1, kind.num_heads, kind.head_dim), dtype)
        key = shard(key, "batch", None, "act_kv_heads", None)
        value = shard(value, "batch", None, "act_heads", None)
        return GatedDeltaCache(shard(state, "batch", "act_heads", None, None), key, key, value)

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> GatedDeltaCache:
        """Create an empty cache with one row for each slot of an engine."""
        return self.make_cache(room.rows, room.length, dtype)

    def complete_cache(self, cache: LayerCache) -> LayerCache:
        """Return the cache as it is: nothing in it depends on weights."""
        return cache

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: projections; convolutions, the norm, and what each head has."""
        kind = layer.mixer
        assert isinstance(kind, GatedDelta)
        keys = kind.num_key_heads * kind.key_head_dim
        values = kind.num_heads * kind.head_dim
        projected = 2 * keys + 3 * values + 2 * kind.num_heads
        other = kind.conv_kernel * (2 * keys + values) + 2 * kind.num_heads + kind.head_dim
        return ParameterCount(config.hidden_size * projected, other)

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: Layer, length: int) -> float:
        """Return forward and backward FLOPs per token of the recurrence: three products of each state."""
        kind = layer.mixer
        assert isinstance(kind, GatedDelta)
        return 18.0 * kind.num_heads * kind.key_head_dim * kind.head_dim


@partial(jax.checkpoint, static_argnums=2)  # its backward needs only what it is given, not float32 copies
def _times_gate(
    out: Float[Array, "B T N V"], z: Float[Array, "B T N V"], activation: Callable[[jax.Array], jax.Array]
) -> Float[Array, "B T N V"]:
    """Return out activation(z), computed in float32."""
    return (out.astype(jnp.float32) * activation(z.astype(jnp.float32))).astype(out.dtype)


@jax.checkpoint
def _of_length_1(x: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)
