"""Logical axes -> mesh axes. Models name logical axes; only this file knows the mesh.

A parameter carries its logical axes as metadata (`nnx.Param(value, logical_axes=("embed", "mlp"))`); an activation
names them in `shard(x, "batch", "length", "act_mlp")`. Both mean nothing until `logical_axis_rules` is entered.
"""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jaxstack.parallel.pipeline.plan import PipelinePlan

Names = Sequence[str | None]

SEQUENCES = ("tokens", "labels", "segment_ids", "positions", "dropout_keys")
"""Arrays [B, T] of a batch that are split along their length where the mesh splits it."""

WEIGHT_AXES = ("fsdp", "context")
"""Axes over which matrices are stored in parts, and gathered where they are used. Devices that share a sequence use
the same weights as those that share a batch do, and have as little need of a copy each."""

PARAMETER_RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": WEIGHT_AXES,
    "head_dim": (),
    "position": (),
    "norm": (),
    "expert": ("expert",),
    "router": (),
    "rank": (),
    "layers": ("pipeline",),
}
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "residual_length": ("context",),
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
    gathered: frozenset[str] = frozenset()
    """Axes along which the parameters at hand are whole already, however they are stored."""
    zero: int = 0
    """1 or 2: parameters and optimizer state are stored in parts over `data` too, see `stored_spec`."""
    summed: tuple[str, ...] = ()
    """Inside the `shard_map` of a train step: axes over which gradients are summed where their weight is used."""
    context_method: str | None = None
    """How attention sees the keys of other devices of `context`; None: by its shape."""
    overlap: str = "auto"
    """As `ParallelConfig.overlap`."""
    prefetch: bool = False
    """As `ParallelConfig.prefetch`."""
    copies: bool = False
    """Whether weights and their gradients travel by copies between devices, see `transfers`."""
    pipeline: "PipelinePlan | None" = None
    """How a batch goes through the stages of `pipeline`; None: 1F1B, see `plan_pipeline`."""

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
        """The layout of a whole parameter of this shape: its logical axes, and the `weight_axes` on the largest free
        dim if those leave them out. Axes that a `shard_map` has taken count too.

        A parameter without logical axes (somebody else's module) gets the `weight_axes` alone. Vectors stay whole: they
        are small, and gathering them costs latency only.
        """
        if self.manual:
            return dataclasses.replace(self, manual=frozenset()).parameter_spec(names, shape)
        spec = list(self.spec(names or (None,) * len(shape), shape))
        matrix = is_matrix(names, shape)
        if not matrix:
            spec = list(restrict(PartitionSpec(*spec), set(self.mesh.axis_names) - set(self.weight_axes)))
        elif lacking := self.lacking(PartitionSpec(*spec), self.weight_axes):
            self._split_weight(spec, names, shape, lacking)
        elif self.weight_axes and {"expert", "vocab"}.isdisjoint(names or ()):
            self._split_first(spec, names, shape)
        if self.mesh.shape["pipeline"] > 1 and matrix:
            self._store_over_stages(spec, names, shape)
        return restrict(PartitionSpec(*spec), set(self.mesh.axis_names) - self.gathered)

    def _split_weight(self, spec: list[Any], names: Names | None, shape: Sequence[int], axes: tuple[str, ...]) -> None:
        """Splits the largest free dim that can be over all these axes, or failing that over one of them."""
        free = [d for d in range(len(shape)) if spec[d] is None and not _is_stack(names, d)]
        for wanted in (axes, *((axis,) for axis in axes)):
            dims = [d for d in free if shape[d] % self.degree(wanted) == 0]
            if dims:
                spec[max(dims, key=lambda d: shape[d])] = wanted
                return

    def _split_first(self, spec: list[Any], names: Names | None, shape: Sequence[int]) -> None:
        """Moves the split over the `weight_axes` to the first dim where that is free: whole rows travel as they lie,
        where a gradient that is split along another dim is transposed first. (A table may be the head's matrix too, and
        keeps one split for both uses.)"""
        first = next(d for d in range(len(shape)) if not _is_stack(names, d))
        taken = next((d for d, part in enumerate(spec) if set(self.weight_axes) <= set(axes_of(part))), first)
        if spec[first] is None and shape[first] % self.degree(axes_of(spec[taken])) == 0:
            spec[first], spec[taken] = spec[taken], None

    def _store_over_stages(self, spec: list[Any], names: Names | None, shape: Sequence[int]) -> None:
        """Splits what belongs to no stage (embedding, head) over `pipeline` too, along its largest dim that can be."""
        if any("pipeline" in axes_of(part) for part in spec):
            return
        stages = self.mesh.shape["pipeline"]
        sizes = {d: shape[d] // self.degree(axes_of(part)) for d, part in enumerate(spec)}
        # A dim of `tensor` would have to be rearranged inside the `shard_map` that leaves this axis to XLA.
        free = [d for d, part in enumerate(spec) if "tensor" not in axes_of(part) and not _is_stack(names, d)]
        dims = [d for d in free if shape[d] % (self.degree(axes_of(spec[d])) * stages) == 0]
        if dims:
            best = max(dims, key=lambda d: sizes[d])
            spec[best] = (*axes_of(spec[best]), "pipeline") if spec[best] else "pipeline"

    def stored_spec(self, names: Names | None, shape: Sequence[int]) -> PartitionSpec:
        """`parameter_spec` as a parameter and its optimizer state are stored between steps: with ZeRO 1 and 2 matrices
        are split over `data` too, along a dim of their own if there is one that it divides, else along that of the
        `weight_axes`.
        """
        if self.manual:
            return dataclasses.replace(self, manual=frozenset()).stored_spec(names, shape)
        spec, data = list(self.parameter_spec(names, shape)), self.mesh.shape["data"]
        if not self.zero or data == 1 or not is_matrix(names, shape):
            return PartitionSpec(*spec)
        fits = [d for d, part in enumerate(spec) if shape[d] % (self.degree(axes_of(part)) * data) == 0]
        fits = [d for d in fits if set(axes_of(spec[d])) <= set(self.weight_axes) and not _is_stack(names, d)]
        if fits:
            dim = min(fits, key=lambda d: spec[d] is not None)
            spec[dim] = (*axes_of(spec[dim]), "data") if spec[dim] else "data"
        return PartitionSpec(*spec)

    def lacking(self, spec: PartitionSpec, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that split no dim of `spec`."""
        used = {axis for part in spec for axis in axes_of(part)}
        return tuple(axis for axis in axes if axis not in used)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Those of `WEIGHT_AXES` with more than one device."""
        return tuple(a for a in WEIGHT_AXES if self.mesh.shape[a] > 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of more than one device over which each device has its own items of the batch."""
        return tuple(a for a in ("data", "fsdp", "expert", "context") if self.mesh.shape[a] > 1)

    def batch_spec(self, shape: Sequence[int], name: str = "") -> PartitionSpec:
        """The layout of a batch's array: rows split over the batch axes, `SEQUENCES` along their length too."""
        rows = self.spec(("batch",), shape[:1])
        return PartitionSpec(*rows, *(self.spec(("length",)) if name in SEQUENCES else ()))

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


def is_matrix(names: Names | None, shape: Sequence[int]) -> bool:
    """Whether a parameter is sharded: it has two dims beside that of the layers."""
    return len(shape) - ("layers" in (names or ())) > 1


def is_cast(names: Names | None, shape: Sequence[int]) -> bool:
    """Whether a parameter is used in the compute dtype: a matrix, but not that of a router, which scores in float32."""
    return is_matrix(names, shape) and "router" not in (names or ())


def _is_stack(names: Names | None, dim: int) -> bool:
    return names is not None and names[dim] == "layers"


def make_rules(
    mesh: Mesh,
    *,
    sequence: bool = False,
    reduce: str = "float32",
    zero: int = 0,
    context_method: str | None = None,
    overlap: str = "auto",
    prefetch: bool = False,
    copies: bool = False,
    pipeline: "PipelinePlan | None" = None,
    overrides: Mapping[str, tuple[str, ...]] | None = None,
) -> AxisRules:
    """The standard table on `mesh`.

    Args:
      sequence: Megatron's sequence parallelism on the tensor axis.
      reduce: dtype in which gradients are summed over devices.
      zero: 1 or 2 shards parameters and optimizer state over `data`; 2 each microbatch's gradients as well.
      context_method: of `pallas_kernels.context_attention`; None or "auto": by the shape of each call.
      overlap, prefetch: as in `ParallelConfig`.
      copies: whether weights and their gradients travel by copies, see `transfers`.
      pipeline: schedule and microbatches where the mesh has stages; None: 1F1B.
      overrides: rows of the table to change or add.
    """
    table = {**PARAMETER_RULES, **ACTIVATION_RULES}
    if sequence:
        table["residual_length"] = ("context", "tensor")
    table.update(overrides or {})
    method = None if context_method == "auto" else context_method
    return AxisRules(
        mesh, table, reduce=reduce, zero=zero, context_method=method, overlap=overlap, prefetch=prefetch,
        copies=copies, pipeline=pipeline,
    )  # fmt: skip


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


def splits_length() -> bool:
    """Whether the current rules spread sequences over several devices."""
    rules = _current.get()
    return rules is not None and rules.degree(rules.table["length"]) > 1


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
    return jax.lax.with_sharding_constraint(x, placed(rules, rules.spec(names, x.shape)))


def placed(rules: AxisRules, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
    """What `with_sharding_constraint` takes for a spec of the rules' free axes."""
    # Inside a shard_map the ambient mesh knows which axes are manual; a NamedSharding of the outer mesh does not.
    return spec if rules.manual else NamedSharding(rules.mesh, spec)
