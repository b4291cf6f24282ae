"""Rules that map logical axes to mesh axes. Models name logical axes; only this file knows the mesh.

A parameter carries its logical axes as metadata (`nnx.Param(value, logical_axes=("embed", "mlp"))`); an activation
names them in `shard(x, "batch", "length", "act_mlp")`. Both take effect inside `logical_axis_rules` only.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxstack.parallel.config import WORKERS

Names = Sequence[str | None]
"""The logical axis of each dim of an array; None for a dim that no rule applies to."""
Part = str | tuple[str, ...] | None
"""The mesh axes of one dim of a PartitionSpec."""

SEQUENCES = {"tokens": 0, "labels": 0, "segment_ids": 0, "positions": 0, "dropout_keys": 0, "experts": 2}
"""Arrays [B, ..., T, ...] of a batch whose dim T is split over the axes of `length` -> number of dims after T."""

WEIGHT_AXES = ("fsdp", "context")
"""Mesh axes over which matrices are sharded between uses, and gathered where they are used. The devices of `context`
share a sequence, and therefore need the same weights, as the devices of `fsdp` do."""

PARAMETER_RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_mlp": ("tensor",),
    "embed": WEIGHT_AXES,
    "head_dim": (),
    "position": (),
    "norm": (),
    "expert": ("expert",),
    "router": (),
    "rank": (),
    "layers": ("pipeline",),
}
WHOLE_EXPERTS: dict[str, tuple[str, ...]] = {"expert": ("tensor",), "expert_mlp": ()}
"""Rules by which each device of `tensor` has some of the experts, and these whole, where all have the same tokens."""
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
    """Sharding rules: a mesh and the table that maps logical axis names to its axes."""

    mesh: Mesh
    table: Mapping[str, tuple[str, ...]]
    """Logical axis -> mesh axes."""
    manual: frozenset[str] = frozenset()
    """Mesh axes that a surrounding `shard_map` is manual over."""

    def spec(self, names: Names, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return the PartitionSpec of an array whose dims have these logical axes.

        Args:
          names: the logical axis of each dim.
          shape: the array's shape; a dim that its mesh axes do not divide is replicated. None: no dim is checked.

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
        """Return the number of shards along these mesh axes: the product of their sizes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def parameter_spec(self, names: Names | None, shape: Sequence[int]) -> PartitionSpec:
        """Return the PartitionSpec of a parameter with these logical axes and global shape, also inside a `shard_map`.

        The logical axes decide; if they leave out the `weight_axes`, these split the largest free dim. A parameter
        without logical axes (of a module that was not written for jaxstack) is split over the `weight_axes` alone.
        Vectors are replicated: they are small, so that gathering them costs latency and saves nothing.
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
        return PartitionSpec(*spec)

    def _split_weight(self, spec: list[Part], names: Names | None, shape: Sequence[int], axes: tuple[str, ...]) -> None:
        """Shard in `spec` the largest free dim divisible by the size of all `axes` together, else by that of one."""
        free = [d for d in range(len(shape)) if spec[d] is None and not _is_stack(names, d)]
        for wanted in (axes, *((axis,) for axis in axes)):
            dims = [d for d in free if shape[d] % self.degree(wanted) == 0]
            if dims:
                spec[max(dims, key=lambda d: shape[d])] = wanted
                return

    def _split_first(self, spec: list[Part], names: Names | None, shape: Sequence[int]) -> None:
        """Move the sharding over the `weight_axes` (fsdp, context) to a parameter's first dim if that is unsharded.

        Rows of the first dim are contiguous in memory, so that they can be sent as they are; a gradient that is split
        along another dim must be transposed first.
        """
        first = next(d for d in range(len(shape)) if not _is_stack(names, d))
        taken = next((d for d, part in enumerate(spec) if set(self.weight_axes) <= set(axes_of(part))), first)
        if spec[first] is None and shape[first] % self.degree(axes_of(spec[taken])) == 0:
            spec[first] = spec[taken]
            spec[taken] = None

    def _store_over_stages(self, spec: list[Part], names: Names | None, shape: Sequence[int]) -> None:
        """Shard a parameter that belongs to no stage (embedding, head) over `pipeline` too, along its largest dim."""
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

    def stored_spec(self, names: Names | None, shape: Sequence[int], zero: int = 0) -> PartitionSpec:
        """Return the PartitionSpec in which a parameter and its optimizer state are stored between steps.

        With ZeRO 1 and 2 matrices are split over `data` as well as by `parameter_spec`: along a separate dim if
        there is one that `data` divides, else along the dim of the `weight_axes`.

        Args:
          names: the parameter's logical axes, or None.
          shape: its global shape.
          zero: `StepLayout.zero`.
        """
        if self.manual:
            return dataclasses.replace(self, manual=frozenset()).stored_spec(names, shape, zero)
        spec = list(self.parameter_spec(names, shape))
        data = self.mesh.shape["data"]
        if not zero or data == 1 or not is_matrix(names, shape):
            return PartitionSpec(*spec)
        fits = [d for d, part in enumerate(spec) if shape[d] % (self.degree(axes_of(part)) * data) == 0]
        fits = [d for d in fits if set(axes_of(spec[d])) <= set(self.weight_axes) and not _is_stack(names, d)]
        if fits:
            dim = min(fits, key=lambda d: spec[d] is not None)
            spec[dim] = (*axes_of(spec[dim]), "data") if spec[dim] else "data"
        return PartitionSpec(*spec)

    def lacking(self, spec: PartitionSpec, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the mesh axes among `axes` that shard no dim in `spec`."""
        used = {axis for part in spec for axis in axes_of(part)}
        return tuple(axis for axis in axes if axis not in used)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device over which matrices are sharded, and gathered for use (fsdp, context)."""
        return tuple(a for a in WEIGHT_AXES if self.mesh.shape[a] > 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device over which a batch is split, by rows or (`context`) along sequences."""
        return tuple(a for a in ("data", "fsdp", "expert", "context") if self.mesh.shape[a] > 1)

    def batch_spec(self, shape: Sequence[int], name: str = "") -> PartitionSpec:
        """Return the PartitionSpec of an array of a batch: rows over the batch axes, sequences also over `context`.

        Several sequences of a row, such as a pair of answers, are a dim before that of their tokens.
        """
        rows = self.spec(("batch",), shape[:1])
        length = self.spec(("length",)) if name in SEQUENCES else PartitionSpec()
        # A spec without the undivided length also fits one number per row, such as the labels of a classifier.
        if not any(length):
            return PartitionSpec(*rows)
        return PartitionSpec(*rows, *(None,) * (len(shape) - 2 - SEQUENCES[name]), *length)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the NamedSharding on this mesh of `spec`, a PartitionSpec of mesh axes."""
        return NamedSharding(self.mesh, spec)

    @property
    def free(self) -> tuple[str, ...]:
        """Mesh axes along which XLA partitions, because no surrounding `shard_map` is manual over them."""
        return tuple(a for a in self.mesh.axis_names if a not in self.manual)

    def xla_splits(self, axis: str) -> bool:
        """Return True if XLA partitions along this axis: it has several devices and is not manual."""
        return self.mesh.shape[axis] > 1 and axis not in self.manual

    def within(self, manual: Sequence[str]) -> "AxisRules":
        """Return the rules to use inside a `shard_map` that is manual over these mesh axes."""
        return dataclasses.replace(self, manual=self.manual | set(manual))


def axes_of(part: Part) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec (None, a name or several names) as a tuple."""
    return (part,) if isinstance(part, str) else part or ()


def restrict(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return the PartitionSpec `spec` with only the mesh axes in `axes` left in it."""
    kept = (tuple(a for a in axes_of(part) if a in axes) for part in spec)
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in kept))


def state_spec(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, param: Sequence[int], state: Sequence[int]
) -> PartitionSpec:
    """Return the PartitionSpec of an array of optimizer state that belongs to a parameter.

    Dim by dim the array is split as its parameter, where the number of shards divides the dim: a moment has the
    parameter's shape, a scale for each block of a dim has the number of blocks there, an average over a dim has 1.
    With further dims, such as those of a matrix for each block, mesh axes that found no place split the first dim that
    they divide. An array with fewer dims is replicated.

    Args:
      mesh: the mesh.
      spec: the parameter's.
      param: the parameter's shape.
      state: the array's shape.
    """
    if tuple(param) == tuple(state):
        return spec
    if len(state) < len(param):
        return PartitionSpec()

    def degree(axes):
        return math.prod(mesh.shape[a] for a in axes)

    wanted = [axes_of(part) for part in spec] + [()] * (len(state) - len(spec))
    found = [axes if size > 1 and size % degree(axes) == 0 else () for axes, size in zip(wanted, state, strict=True)]
    if len(state) > len(param):
        for axes in [axes for axes, kept in zip(wanted, found, strict=True) if axes != kept]:
            fits = [d for d, size in enumerate(state) if size > 1 and size % degree((*found[d], *axes)) == 0]
            if fits:
                found[fits[0]] = (*found[fits[0]], *axes)
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in found))


def is_matrix(names: Names | None, shape: Sequence[int]) -> bool:
    """Return True if a parameter has two or more dims, not counting one of stacked layers; only such are sharded."""
    return len(shape) - ("layers" in (names or ())) > 1


KEEP_FLOAT32 = "uncast"
"""Key in the metadata of parameters that layers use in float32, not in the compute dtype."""


def is_cast(names: Names | None, shape: Sequence[int], metadata: Mapping[str, object]) -> bool:
    """Return True if a parameter is cast to the compute dtype for use: all matrices except those that need float32.

    These are routers, and parameters whose metadata has `KEEP_FLOAT32`.
    """
    return is_matrix(names, shape) and "router" not in (names or ()) and not metadata.get(KEEP_FLOAT32)


def _is_stack(names: Names | None, dim: int) -> bool:
    return names is not None and names[dim] == "layers"


def make_rules(
    mesh: Mesh, *, sequence: bool = False, overrides: Mapping[str, tuple[str, ...]] | None = None
) -> AxisRules:
    """Return the standard sharding rules on a mesh, which say along which mesh axes each logical axis is split.

    Args:
      mesh: as `make_mesh` returns.
      sequence: Megatron's sequence parallelism: the residual stream is split along the length over `tensor`.
      overrides: rows of the table to change or add, logical axis -> mesh axes.
    """
    table = {**PARAMETER_RULES, **ACTIVATION_RULES}
    if sequence:
        table["residual_length"] = ("context", "tensor")
    if WORKERS in mesh.shape:
        table["batch"] = (WORKERS, *table["batch"])
    table.update(overrides or {})
    return AxisRules(mesh, table)
