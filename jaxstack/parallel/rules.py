"""Logical axes -> mesh axes. Models name logical axes; only this file knows the mesh.

A parameter carries its logical axes as metadata (`nnx.Param(value, logical_axes=("embed", "mlp"))`); an activation
names them in `shard(x, "batch", "length", "act_mlp")`. Both mean nothing until `logical_axis_rules` is entered.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Names = Sequence[str | None]

PARAMETER_RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "head_dim": (),
    "position": (),
    "norm": (),
    "layers": (),
}
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": (),
    "residual_length": (),
    "act_embed": (),
    "act_heads": ("tensor",),
    "act_kv_heads": ("tensor",),
    "act_head_dim": (),
    "act_mlp": ("tensor",),
    "act_vocab": ("tensor",),
}


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """A mesh and the mapping of logical axes onto it. `manual` axes are those a surrounding `shard_map` has taken."""

    mesh: Mesh
    table: Mapping[str, tuple[str, ...]]
    manual: frozenset[str] = frozenset()
    reduce: str = "float32"
    """Dtype in which gradients are summed over devices."""
    overlap: str = "auto"
    """As `ParallelConfig.overlap`."""

    def spec(self, names: Names, shape: Sequence[int] | None = None) -> PartitionSpec:
        """The PartitionSpec of an array whose dims have these logical axes.

        With `shape`, a dim that its mesh axes do not divide stays whole.

        Raises:
          ValueError: an unknown logical axis, or two dims on one mesh axis.
        """
        parts: list[tuple[str, ...]] = []
        for index, name in enumerate(names):
            if name is not None and name not in self.table:
                raise ValueError(f"unknown logical axis {name!r}; known: {', '.join(sorted(self.table))}.")
            axes = self.table[name] if name else ()
            axes = tuple(a for a in axes if self.mesh.shape[a] > 1 and a not in self.manual)
            if shape is not None and shape[index] % self.degree(axes):
                axes = ()
            parts.append(axes)
        used = [a for axes in parts for a in axes]
        if len(used) != len(set(used)):
            raise ValueError(f"two dims of {tuple(names)} map to one mesh axis: {parts}.")
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in parts))

    def degree(self, axes: Sequence[str]) -> int:
        """Into how many parts these mesh axes split."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def parameter_spec(self, names: Names | None, shape: Sequence[int]) -> PartitionSpec:
        """The layout of a whole parameter of this shape: its logical axes, and `fsdp` on the largest free dim if they
        leave it out. Axes that a `shard_map` has taken count too.

        A parameter without logical axes (somebody else's module) gets `fsdp` alone. Vectors stay whole: they are small,
        and gathering them costs latency only.
        """
        if self.manual:
            return dataclasses.replace(self, manual=frozenset()).parameter_spec(names, shape)
        spec = list(self.spec(names or (None,) * len(shape), shape))
        fsdp = self.mesh.shape["fsdp"]
        taken = any("fsdp" in axes_of(part) for part in spec)
        matrix = len(shape) - ("layers" in (names or ())) > 1
        if fsdp > 1 and matrix and not taken:
            free = [d for d in range(len(shape)) if spec[d] is None and not _is_stack(names, d)]
            dims = [d for d in free if shape[d] % fsdp == 0]
            if dims:
                spec[max(dims, key=lambda d: shape[d])] = "fsdp"
        elif not matrix:
            spec = [None if part == "fsdp" else part for part in spec]
        return PartitionSpec(*spec)

    def batch_spec(self, shape: Sequence[int]) -> PartitionSpec:
        """The layout of an array of the global batch: rows split over the batch axes, everything else whole."""
        return self.spec(("batch",), shape[:1])

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def free(self) -> tuple[str, ...]:
        """The axes that no surrounding `shard_map` has taken, along which XLA partitions."""
        return tuple(a for a in self.mesh.axis_names if a not in self.manual)

    def splits(self, axis: str) -> bool:
        """Whether XLA partitions along this axis: it has more than one device, and no `shard_map` has taken it."""
        return self.mesh.shape[axis] > 1 and axis not in self.manual

    def within(self, manual: Sequence[str]) -> "AxisRules":
        """The rules as they stand inside a `shard_map` that is manual over these axes."""
        return dataclasses.replace(self, manual=self.manual | set(manual))


def axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one dim of a PartitionSpec."""
    return (part,) if isinstance(part, str) else part or ()


def restrict(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The spec without the mesh axes that are not among `axes`."""
    kept = (tuple(a for a in axes_of(part) if a in axes) for part in spec)
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in kept))


def _is_stack(names: Names | None, dim: int) -> bool:
    return names is not None and names[dim] == "layers"


def make_rules(
    mesh: Mesh,
    *,
    sequence: bool = False,
    reduce: str = "float32",
    overlap: str = "auto",
    overrides: Mapping[str, tuple[str, ...]] | None = None,
) -> AxisRules:
    """The standard table on `mesh`.

    Args:
      sequence: Megatron's sequence parallelism on the tensor axis.
      reduce: dtype in which gradients are summed over devices.
      overlap: as `ParallelConfig.overlap`.
      overrides: rows of the table to change or add.
    """
    table = {**PARAMETER_RULES, **ACTIVATION_RULES}
    if sequence:
        table["residual_length"] = ("tensor",)
    table.update(overrides or {})
    return AxisRules(mesh, table, reduce=reduce, overlap=overlap)


_current: ContextVar[AxisRules | None] = ContextVar("axis_rules", default=None)


@contextlib.contextmanager
def logical_axis_rules(rules: AxisRules | Mesh) -> Iterator[AxisRules]:
    """Within it, `shard` and `gather_weights` act on this mesh. Enter it inside the traced function."""
    rules = rules if isinstance(rules, AxisRules) else make_rules(rules)
    token = _current.set(rules)
    try:
        yield rules
    finally:
        _current.reset(token)


def current_rules() -> AxisRules | None:
    """The rules entered last, or None outside of `logical_axis_rules`."""
    return _current.get()


def is_sharded() -> bool:
    """Whether XLA spreads arrays over more than one device under the current rules."""
    rules = _current.get()
    return rules is not None and rules.degree(rules.free) > 1


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation to the layout of its logical axes; does nothing outside of `logical_axis_rules`.

    Raises:
      ValueError: the number of names is not the rank of `x`, or a name is unknown.
    """
    rules = _current.get()
    if len(names) != x.ndim:
        raise ValueError(f"shard() got {len(names)} axis names {names} for an array of rank {x.ndim}.")
    if rules is None or not is_sharded():
        return x
    return jax.lax.with_sharding_constraint(x, _placed(rules, rules.spec(names, x.shape)))


def _placed(rules: AxisRules, spec: PartitionSpec) -> "Placement":
    # Inside a shard_map the ambient mesh knows which axes are manual; a NamedSharding of the outer mesh does not.
    return spec if rules.manual else NamedSharding(rules.mesh, spec)


def gather_weight(
    x: jax.Array, names: Names | None, dtype: jax.typing.DTypeLike | None, shape: Sequence[int] | None = None
) -> jax.Array:
    """A stored parameter as the computation wants it: cast, and whole over `fsdp`; its gradient lies as it is stored.

    Inside a `shard_map` over `fsdp` it is this device's shard that is cast and gathered, and its gradient is summed
    over the axis in the rules' `reduce` dtype.

    Args:
      shape: of the whole parameter, where `x` is a shard of it.
    """
    wanted = x.dtype if dtype is None or x.ndim < 2 else jax.numpy.dtype(dtype)
    dim = fsdp_dim(names, shape or x.shape)
    rules = _current.get()
    if rules is None or dim is None:
        return x.astype(wanted)
    if "fsdp" in rules.manual:
        return gather_shards(x, "fsdp", dim, wanted, rules.reduce)
    stored = rules.parameter_spec(names, shape or x.shape)
    whole = restrict(stored, set(rules.free) - {"fsdp"})
    # The cast value is pinned to the stored layout first. Without that pin XLA gathers float32 (twice the bytes), or
    # moves activations instead of weights when the use is inside a layer scan.
    return _gather(x.astype(wanted), _placed(rules, restrict(stored, rules.free)), _placed(rules, whole))


def fsdp_dim(names: Names | None, shape: Sequence[int]) -> int | None:
    """The dim along which a parameter of this (whole) shape lies on the `fsdp` axis; None where it is whole."""
    rules = _current.get()
    if rules is None or rules.mesh.shape["fsdp"] == 1:
        return None
    stored = rules.parameter_spec(names, shape)
    return next((d for d, part in enumerate(stored) if "fsdp" in axes_of(part)), None)


def gather_values(x: jax.Array, names: Names | None, shape: Sequence[int]) -> jax.Array:
    """Values of a parameter's shape that lie as it is stored, whole over `fsdp`, moved in their own dtype.

    Without a gradient: for what is derived from a parameter, such as its FP8 form.
    """
    rules, dim = _current.get(), fsdp_dim(names, shape)
    x = jax.lax.stop_gradient(x)
    if rules is None or dim is None:
        return x
    if "fsdp" in rules.manual:
        return jax.lax.all_gather(x, "fsdp", axis=dim, tiled=True)
    stored = rules.parameter_spec(names, shape)
    whole = restrict(stored, set(rules.free) - {"fsdp"})
    return _gather(x, _placed(rules, restrict(stored, rules.free)), _placed(rules, whole))


def maximum_over_shards(x: jax.Array) -> jax.Array:
    """The maximum over the `fsdp` axis of what each device has computed of its shard, in a `shard_map` over it."""
    rules = _current.get()
    return jax.lax.pmax(x, "fsdp") if rules is not None and "fsdp" in rules.manual else x


def gather_parameter(parameter: nnx.Variable, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """`gather_weight` of a Flax variable, which knows the axes and, in a `shard_map`, the shape of its whole."""
    known = parameter.get_metadata()
    return gather_weight(parameter[...], known.get("logical_axes"), dtype, known.get("whole_shape"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_shards(x: jax.Array, axis: str, dim: int, dtype: jax.typing.DTypeLike, reduce: str) -> jax.Array:
    """Inside a `shard_map` over `axis`: the whole of which `x` is this device's shard along `dim`, moved as `dtype`.

    The gradient is this device's shard of the sum over the axis, summed in the dtype `reduce`.
    """
    return jax.lax.all_gather(x.astype(dtype), axis, axis=dim, tiled=True)


def _gather_shards_forward(
    x: jax.Array, axis: str, dim: int, dtype: jax.typing.DTypeLike, reduce: str
) -> tuple[jax.Array, jax.Array]:
    return gather_shards(x, axis, dim, dtype, reduce), jax.numpy.zeros((), x.dtype)


def _gather_shards_backward(
    axis: str, dim: int, dtype: jax.typing.DTypeLike, reduce: str, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    part = jax.lax.psum_scatter(gradient.astype(reduce), axis, scatter_dimension=dim, tiled=True)
    return (part.astype(like.dtype),)


gather_shards.defvjp(_gather_shards_forward, _gather_shards_backward)

Placement = NamedSharding | PartitionSpec


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, stored: Placement, whole: Placement) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, stored), whole)


def _gather_forward(x: jax.Array, stored: Placement, whole: Placement) -> tuple[jax.Array, None]:
    return _gather(x, stored, whole), None


def _gather_backward(stored: Placement, whole: Placement, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    # The transposed constraint would ask for the whole gradient first: an all-reduce where a reduce-scatter does.
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gather.defvjp(_gather_forward, _gather_backward)
