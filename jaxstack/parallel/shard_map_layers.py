"""Attention, embedding, vocabulary loss and experts inside a `shard_map`, where each device computes its own part.

Attention: a Mosaic or Triton kernel is one custom call that XLA cannot partition: it would all-gather the operands to
every device. Sequences and heads are independent of each other, so that nothing is sent except, if the length is split
over `context`, what the attention method itself sends; `context_axis` returns the axis for it.

Embedding and loss: each device computes its own rows of the batch with a weight that is gathered once, in the compute
dtype. XLA alone would all-reduce the head's float32 gradient, and all-gather tokens for the embedding's gradient.

Mixture of experts: each device routes its own tokens and computes its own experts. XLA alone would sort, gather and
scatter the tokens of all devices on each of them.

Dims: B batch, T query length, S key length, N query heads, K kv heads, H head_dim, D model.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from jaxstack.parallel.overlap import sum_over_tensor
from jaxstack.parallel.packed_weights import packed_specs
from jaxstack.parallel.rules import AxisRules, Names, axes_of, restrict
from jaxstack.parallel.sharding_context import ShardingContext, current_context, current_rules, is_sharded
from jaxstack.parallel.static_leaves import split_arrays
from jaxstack.parallel.weight_gather import Exchange, dims_of, exchange, gather_parameter
from pallas_kernels import PackedWeight
from pallas_kernels.attention.context_layout import LINK_BANDWIDTH, NETWORK_BANDWIDTH

Cache = TypeVar("Cache")
"""A layer's cache: a tree of arrays."""


def with_local_heads(
    function: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    *batched: jax.Array | None,
    per_token: tuple[jax.Array, ...] = (),
    whole: tuple[jax.Array, ...] = (),
    per_head: tuple[jax.Array | None, ...] = (),
) -> jax.Array:
    """Apply an attention function inside a `shard_map`, on each device's own rows of the batch, heads and tokens.

    Rows, length and heads are split as the logical axes `batch`, `length`, `act_heads` and `act_kv_heads` say. If the
    kv heads cannot be split like the query heads, a device gets the kv heads that its query heads read. Rows or heads
    that their mesh axes do not divide are replicated: all devices of these axes compute the same.

    Args:
      function: returns [B, T, N, ...] for the B and N of the arrays that it gets.
      q: [B, T, N, H].
      k: [B, S, K, H]; query head n reads kv head n // (N // K). None if the function computes keys and values from
        other arguments.
      v: [B, S, K, H], or None.
      batched: further arrays [B, T, ...], or None.
      per_token: arrays [B, T, N, ...] with a value for each query head of a token.
      whole: arrays that are replicated to every device, such as a weight.
      per_head: arrays [N, ...], split as the query heads are, or None. The function takes them last.

    Raises:
      ValueError: the devices of `context` do not divide the length.
    """
    context = current_context()
    if context is None or not is_sharded():
        return function(q, k, v, *batched, *per_token, *whole, *per_head)
    rules = context.rules
    free = set(rules.free)
    rows, length, heads = rules.spec(("batch", "length", "act_heads"), (q.shape[0], 0, q.shape[2]))
    parts = rules.mesh.shape["context"] if length else 1
    if q.shape[1] % parts:
        raise ValueError(f"the length ({q.shape[1]}) must be divisible by the {parts} devices of the axis context.")
    split_alike = k is None or heads == rules.spec(("act_kv_heads",), (k.shape[2],))[0]
    inner = context.within(tuple(free))

    def local(q_part: jax.Array, k: jax.Array | None, v: jax.Array | None, *others: jax.Array | None) -> jax.Array:
        if not split_alike:
            k, v = (None if x is None else _heads_read(x, q.shape[2], heads, rules) for x in (k, v))
        with inner.entered():
            return function(q_part, k, v, *others)

    by_head = PartitionSpec(rows, length, heads)
    by_kv_head = by_head if split_alike else PartitionSpec(rows, length)
    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(
            by_head,
            by_kv_head,
            by_kv_head,
            *(PartitionSpec(rows, length) for _ in batched),
            *(by_head for _ in per_token),
            *(PartitionSpec() for _ in whole),
            *(PartitionSpec(heads) for _ in per_head),
        ),
        out_specs=by_head,
        axis_names=free,  # all of them: XLA refuses a kernel, or crashes, under automatic axes
        check_vma=False,
    )(q, k, v, *batched, *per_token, *whole, *per_head)


def with_local_cache(
    function: Callable[..., tuple[jax.Array, Cache]], heads: jax.Array, cache: Cache, *whole: Any
) -> tuple[jax.Array, Cache]:
    """Apply a decoding function inside a `shard_map`, on each device's heads and its part of their cache.

    Only on a mesh that `splits_heads_alone`.

    Args:
      function: takes the heads, the cache, and `whole`; returns [B, T, N, H] and the cache.
      heads: [B, T, all heads, H], in the order of the devices.
      cache: arrays [..., K, H], such as pages.
      whole: trees of arrays that are replicated to every device, and of static values.
    """
    context = current_context()
    assert context is not None
    rules = context.rules
    inner = context.within(rules.free)
    arrays, join = split_arrays(whole)

    def local(heads: jax.Array, cache: Cache, arrays: list[jax.Array]) -> tuple[jax.Array, Cache]:
        with inner.entered():
            return function(heads, cache, *join(arrays))

    split = PartitionSpec(None, None, "tensor")
    parts = jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim - 2), "tensor"), cache)
    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(split, parts, PartitionSpec()),
        out_specs=(split, parts),
        axis_names=set(rules.free),
        check_vma=False,
    )(heads, cache, arrays)


def splits_heads_alone(parts: int) -> bool:
    """Return True if XLA splits arrays over `parts` devices of the axis `tensor`, and over no other axis."""
    rules = current_rules()
    if rules is None or rules.manual:
        return False
    return {axis: size for axis, size in rules.mesh.shape.items() if size > 1} == {"tensor": parts}


def context_axis() -> str | None:
    """Return the mesh axis over which the surrounding `shard_map` splits sequences, or None.

    Inside `with_local_heads`, or a `shard_map` that is manual over `context`, this is `context` if it has several
    devices. The parts are in the order of `pallas_kernels.sequence_order`.
    """
    rules = current_rules()
    split = rules is not None and "context" in rules.manual and rules.mesh.shape["context"] > 1
    return "context" if split else None


def sum_over_sequence(x: jax.Array) -> jax.Array:
    """Sum an array over the devices that each hold a part of the sequences; unchanged where all hold them whole."""
    axis = context_axis()
    return x if axis is None else jax.lax.psum(x, axis)


def context_bandwidth() -> float:
    """Return the bytes per second that a device sends along `context`: less if its devices are of several processes.

    Processes stand for hosts here, as they do where one process has all GPUs of a host.
    """
    rules = current_rules()
    if rules is None or isinstance(rules.mesh, AbstractMesh):
        return LINK_BANDWIDTH
    rows = np.moveaxis(rules.mesh.devices, rules.mesh.axis_names.index("context"), -1)
    processes = np.vectorize(lambda device: device.process_index)(rows)
    return LINK_BANDWIDTH if (processes == processes[..., :1]).all() else NETWORK_BANDWIDTH


def _heads_read(x: jax.Array, num_heads: int, axes: str | tuple[str, ...] | None, rules: AxisRules) -> jax.Array:
    """Select the kv heads that this device's query heads read, in order: [B, S, K, H] -> [B, S, K', H].

    Each is read by equally many query heads: if a group of query heads is cut unevenly, its kv head is repeated.

    Args:
      x: keys or values, [B, S, K, H].
      num_heads: N, the query heads of all devices.
      axes: mesh axes over which the query heads are split, or None.
      rules: the current rules.
    """
    if axes is None:
        return x
    own = num_heads // rules.degree((axes,) if isinstance(axes, str) else axes)
    group = num_heads // x.shape[2]
    together = math.gcd(group, own)
    repeated = jnp.repeat(x, group // together, axis=2)
    count = own // together
    return jax.lax.dynamic_slice_in_dim(repeated, jax.lax.axis_index(axes) * count, count, axis=2)


def with_local_batch(
    function: Callable[..., jax.Array],
    parameter: nnx.Variable,
    dtype: jax.typing.DTypeLike | None,
    *batched: jax.Array,
    tensor: bool = False,
    as_stored: bool = False,
) -> jax.Array:
    """Return function(weight, *batched), computed in a `shard_map` on each device's own rows and tokens of the batch.

    Args:
      function: takes the weight, gathered over the `weight_axes`, and this device's part [b, t, ...] of each array of
        `batched`; returns an array [b, t, ...], or [1, 1] for a value of all its tokens, which the caller sums.
      parameter: a stored parameter with `logical_axes`.
      dtype: dtype of the weight that `function` takes; None: the stored dtype.
      batched: arrays [B, T, ...].
      tensor: True leaves the weight sharded over the axis `tensor`; `function` must return the same on all devices of
        that axis.
      as_stored: True casts the weight only if it is gathered, so that its gradient need not be rounded to `dtype`.
    """
    context = current_context()
    if context is None:
        return function(parameter[...] if as_stored else gather_parameter(parameter, dtype), *batched)
    rules = context.rules
    known = parameter.get_metadata()
    stored = context.parameter_spec(known["logical_axes"], known.get("whole_shape", parameter.shape))
    gathered = dims_of(stored, rules.weight_axes)
    if as_stored and not gathered:
        dtype = parameter[...].dtype
    wanted = ("data", "fsdp", "expert", "context", *(["tensor"] if tensor else []))
    axes = [a for a in wanted if rules.xla_splits(a)]
    # A gather inside the shard_map would first replicate the weight over a tensor axis that XLA still partitions.
    inside = bool(gathered) and set(rules.weight_axes) <= set(axes) and (tensor or not rules.xla_splits("tensor"))
    weight = parameter[...] if inside else gather_parameter(parameter, dtype)
    if not axes:
        return function(weight, *batched)
    weight_spec = restrict(stored, [a for a in axes if inside or a not in rules.weight_axes])
    rows = restrict(rules.spec(("batch", "length")), axes)
    inner = context.within(axes)

    def local(weight: jax.Array, *batched: jax.Array) -> jax.Array:
        if inside:
            weight = exchange(weight, Exchange(str(jax.numpy.dtype(dtype)), context.layout.reduce_dtype, gathered))
        with inner.entered():
            return function(weight, *batched)

    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(weight_spec, *(rows for _ in batched)),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )(weight, *batched)


Stored = jax.Array | PackedWeight
"""A parameter as it is stored: an array, or the packed weights of experts."""
Parameters = Mapping[str, tuple[Stored, Names]]
"""Name -> (stored array, its logical axes)."""


class TokenSplit(NamedTuple):
    """Mesh axes over which the tokens of a mixture of experts are split."""

    sequence_axes: tuple[str, ...] = ()
    """Mesh axes over which sequences are split."""
    summed: int = 1
    """Number of devices whose results for the same tokens are summed, each from its part of the experts' width."""
    expert_axis: str | None = None
    """Mesh axis whose devices have the same tokens and some of the experts each; their results are summed."""


Sums = TypeVar("Sums")
"""A tree of sums over tokens."""

Kept = TypeVar("Kept")
"""A tree of arrays [B, T, _]."""

Tokens = tuple[jax.Array, jax.Array | None]
"""x [B, T, D], and another array [B, T, _] of the same tokens or None."""

LocalFunction = Callable[[Tokens, dict[str, Any], TokenSplit], tuple[jax.Array, Sums, Kept]]


def with_local_tokens(
    function: LocalFunction[Sums, Kept],
    tokens: Tokens,
    parameters: Parameters,
    dtype: jax.typing.DTypeLike,
    as_stored: Collection[str] = (),
) -> tuple[jax.Array, Sums, Kept]:
    """Apply a mixture of experts inside a `shard_map`, on each device's tokens with the experts that it stores.

    Parameters stay sharded over `expert`, and along `expert_mlp` over `tensor`; they are gathered over the
    `weight_axes`. The devices of `tensor` get the same tokens, and their results are summed. With the rules
    `WHOLE_EXPERTS` each of these has some of the experts instead of a part of all.

    Args:
      function: returns (the results [B, T, D] of its tokens, a tree of sums, a tree of other arrays of its tokens). The
        sums are this device's terms of sums over all tokens. It takes parameters with a logical axis `expert` in
        `dtype`, others in their stored dtype.
      tokens: x [B, T, D], and another array of the same tokens or None.
      parameters: name -> (stored array, its logical axes); packed experts stay packed.
      dtype: the compute dtype.
      as_stored: names of parameters that stay in their stored dtype if they need not be gathered.

    Returns:
      The results [B, T, D] of all tokens, the sums over them, and their other arrays.
    """
    context = current_context()
    if context is None:
        whole = {name: p if name in as_stored else _cast(p, names, dtype) for name, (p, names) in parameters.items()}
        return function(tokens, whole, TokenSplit())
    rules = context.rules
    layout = _Layout.of(context, tokens[0], parameters)
    if not layout.free:
        return _local(function, layout, dtype, as_stored, tokens, {name: p for name, (p, _) in parameters.items()})
    inner = context.within(tuple(layout.free))

    def local(tokens: Tokens, stored: dict[str, Stored]) -> tuple[jax.Array, Sums, Kept]:
        with inner.entered():
            out, shares, kept = _local(function, layout, dtype, as_stored, tokens, stored)
            return out, jax.tree.map(lambda share: share[None], shares), kept

    specs: dict[str, object] = {**layout.specs}
    for name, (p, _) in parameters.items():
        if isinstance(p, PackedWeight):
            specs[name] = dataclasses.replace(p, arrays=packed_specs(p, layout.specs[name], rules.mesh))
    out, shares, kept = jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(layout.tokens, specs),
        out_specs=(layout.tokens, PartitionSpec(layout.split or None), layout.tokens),
        axis_names=layout.free,
        check_vma=False,
    )(tokens, {name: p for name, (p, _) in parameters.items()})
    return out, jax.tree.map(lambda share: share.sum(axis=0), shares), kept


class _Layout(NamedTuple):
    """Sharding of the tokens and parameters of a mixture of experts inside its `shard_map`."""

    free: set[str]
    """Axes that the `shard_map` is manual over."""
    tokens: PartitionSpec
    """Spec of x and of the results, [B, T, D]."""
    specs: dict[str, PartitionSpec]
    """Spec of each parameter."""
    names: dict[str, Names]
    """Logical axes of each parameter."""
    split: tuple[str, ...]
    """Free axes over which tokens are split, without `gathered`."""
    gathered: tuple[str, ...]
    """Axes over which the residual stream alone is split along the length (Megatron's sequence parallelism)."""
    sequence: tuple[str, ...]
    """Axes over which the function's tokens are split along the length."""
    partial_sums: bool
    """True if experts, or the width of each, are split along `tensor`, whose devices' results are then summed."""
    whole_experts: bool
    """True if it is the experts, and not the width of each."""
    weight_axes: tuple[str, ...]
    """Axes over which parameters are gathered."""

    @classmethod
    def of(cls, context: ShardingContext, x: jax.Array, parameters: Parameters) -> "_Layout":
        """Return how the sharding rules in `context` split the tokens x [B, T, D] and the experts' parameters."""
        rules = context.rules
        sizes = context.rules.mesh.shape
        free = set(rules.mesh.axis_names) - rules.manual
        free = free if any(sizes[a] > 1 for a in free) else set()
        batch, residual, _ = (axes_of(part) for part in rules.spec(("batch", "residual_length", "act_embed"), x.shape))
        length = axes_of(rules.spec(("length",), (x.shape[1],))[0])
        kept = tuple(a for a in residual if a in length)
        gathered = tuple(a for a in residual if a not in length)
        manual = tuple(a for a in rules.table["length"] if a in rules.manual and sizes[a] > 1)
        specs = {
            name: PartitionSpec(*(tuple(a for a in axes_of(part) if a in free) or None for part in spec))
            for name, spec in (
                (name, context.parameter_spec(names, p.shape)) for name, (p, names) in parameters.items()
            )
        }
        named = {name: names for name, (_, names) in parameters.items()}
        on_tensor = {
            axis
            for name in named
            for axis, part in zip(named[name], specs[name], strict=True)
            if "tensor" in axes_of(part)
        }
        whole = "expert" in on_tensor
        summed = whole or "expert_mlp" in on_tensor
        tokens = PartitionSpec(batch or None, residual or None, None)
        split = (*batch, *kept)
        sequence = (*kept, *manual)
        return cls(free, tokens, specs, named, split, gathered, sequence, summed, whole, rules.weight_axes)


def _local(
    function: LocalFunction[Sums, Kept],
    layout: _Layout,
    dtype: jax.typing.DTypeLike,
    as_stored: Collection[str],
    tokens: Tokens,
    stored: dict[str, Stored],
) -> tuple[jax.Array, Sums, Kept]:
    parameters: dict[str, Stored] = {}
    for name, value in stored.items():
        gathers = dims_of(layout.specs[name], layout.weight_axes)
        if isinstance(value, PackedWeight):
            parameters[name] = _gather_packed(value, layout.specs[name], gathers)
            continue
        if gathers or name not in as_stored:
            value = _cast(value, layout.names[name], dtype)
        for axes, dim in gathers:
            value = jax.lax.all_gather(value, axes, axis=dim, tiled=True)
        parameters[name] = value
    if layout.gathered:
        tokens = jax.tree.map(lambda x: jax.lax.all_gather(x, layout.gathered, axis=1, tiled=True), tokens)
    split = TokenSplit(
        layout.sequence,
        summed=jax.lax.axis_size("tensor") if layout.partial_sums and not layout.whole_experts else 1,
        expert_axis="tensor" if layout.whole_experts else None,
    )

    def own_rows(x: jax.Array) -> jax.Array:
        rows = x.shape[1] // jax.lax.axis_size(layout.gathered)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(layout.gathered) * rows, rows, axis=1)

    out, shares, kept = function(tokens, parameters, split)
    if layout.partial_sums and "tensor" in layout.gathered:
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
    elif layout.partial_sums:
        out = sum_over_tensor(out)
    elif layout.gathered:
        out = own_rows(out)
    return out, shares, jax.tree.map(own_rows, kept) if layout.gathered else kept


def _gather_packed(
    weight: PackedWeight, spec: PartitionSpec, gathers: Sequence[tuple[tuple[str, ...], int]]
) -> PackedWeight:
    """Return a device's part of packed experts [E, in, out], gathered over the axes of `gathers`, as one weight."""
    shape = list(weight.shape)
    for dim, part in enumerate(spec):
        for axis in axes_of(part):
            shape[dim] //= jax.lax.axis_size(axis)
    arrays = dict(weight.arrays)
    # An array with one value for the whole dim was not split: gathered it repeats that value, which means the same.
    for axes, dim in gathers:
        shape[dim] *= jax.lax.axis_size(axes)
        kind = ("", "in", "out")[dim]
        for name, array in arrays.items():
            for place, of in enumerate(weight.format.dims_of[name], start=1):
                if of == kind:
                    arrays[name] = jax.lax.all_gather(array, axes, axis=place, tiled=True)
    stack, inputs, outputs = shape
    return PackedWeight(arrays, weight.format, (inputs,), (outputs,), (stack,))


def _cast(x: Stored, names: Names, dtype: jax.typing.DTypeLike) -> Stored:
    return x.astype(dtype) if "expert" in names else x
