"""The current sharding rules and parallelism settings, which modules can query while they are traced."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.parallel.pipeline.plan import PipelinePlan
from jaxstack.parallel.rules import AxisRules, Names, make_rules, restrict


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Parallelism settings of a train step in addition to its mesh: ZeRO stage, communication overlap, pipeline.

    The defaults suit every mesh.
    """

    zero: int = 0
    """ZeRO stage over the `data` axis. 1 shards float32 weights and optimizer state, 2 the gradients too."""
    reduce_dtype: str = "float32"
    """Dtype in which gradients are summed over devices."""
    context_method: Literal["ring", "all_gather", "all_to_all"] | None = None
    """Method by which attention exchanges keys and values over `context`; None: by the shape of each call."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """When tensor-parallel matmuls communicate while they multiply, see `ParallelConfig.overlap`."""
    prefetch: bool = False
    """True gathers the next layer's weights while a scanned layer computes, see `ParallelConfig.prefetch`."""
    peer_copies: bool = False
    """True moves weights and gradients by peer-to-peer copies in place of collectives, see `parallel.collectives`."""
    pipeline: PipelinePlan | None = None
    """Schedule and microbatches of the `pipeline` axis; None: no pipeline, or 1F1B if the mesh has stages."""
    sequence: bool = False
    """True splits the residual stream along the length over `tensor` (Megatron's sequence parallelism)."""
    peer_sums: Literal["auto", "always", "never"] = "never"
    """When a kernel that reads the memory of the other GPUs sums small arrays over `tensor`, see `overlap`. auto:
    if it is expected to be faster; always: in the same place, by XLA's all-reduce if the kernel does not fit."""
    axis_rules: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)
    """Logical axis -> mesh axes, for axes that are sharded in another way than by the standard rules."""

    def rules_on(self, mesh: Mesh) -> AxisRules:
        """Return the rules that map logical axes onto a mesh in this layout; see `make_rules`."""
        return make_rules(mesh, sequence=self.sequence, overrides=self.axis_rules)


@dataclasses.dataclass(frozen=True)
class TracedParameters:
    """Mesh axes over which a traced function's parameters are already gathered, and over which it sums gradients."""

    gathered: frozenset[str] = frozenset()
    """Mesh axes over which the parameters have been gathered already, although they are stored sharded over them."""
    summed: tuple[str, ...] = ()
    """Mesh axes over which a gradient is summed where its parameter is used, and over which it is not scattered."""


@dataclasses.dataclass(frozen=True)
class ShardingContext:
    """Sharding rules and parallelism settings that modules can query while a function is traced."""

    rules: AxisRules
    layout: StepLayout = StepLayout()
    parameters: TracedParameters = TracedParameters()

    def within(self, manual: Sequence[str]) -> "ShardingContext":
        """Return these rules and settings for use inside a `shard_map` that is manual over the given mesh axes."""
        return dataclasses.replace(self, rules=self.rules.within(manual))

    def parameter_spec(self, names: Names | None, shape: Sequence[int]) -> PartitionSpec:
        """Return the PartitionSpec of a parameter, without the axes over which it has been gathered already."""
        spec = self.rules.parameter_spec(names, shape)
        return restrict(spec, set(self.rules.mesh.axis_names) - self.parameters.gathered)

    def stored_spec(self, names: Names | None, shape: Sequence[int]) -> PartitionSpec:
        """Return the PartitionSpec in which a parameter is stored between steps, with this run's ZeRO stage."""
        return self.rules.stored_spec(names, shape, self.layout.zero)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make these rules and settings current in a `with` block, which must be inside the traced function."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[ShardingContext | None] = ContextVar("sharding_context", default=None)


@contextlib.contextmanager
def logical_axis_rules(rules: AxisRules | Mesh, layout: StepLayout | None = None) -> Iterator[AxisRules]:
    """Shard activations and weights by these rules in a `with` block, which must be inside the traced function.

    Args:
      rules: as `make_rules` returns; a mesh means the rules of the layout on it.
      layout: the other choices of parallelism; None: `StepLayout()`.
    """
    layout = layout or StepLayout()
    rules = rules if isinstance(rules, AxisRules) else layout.rules_on(rules)
    with ShardingContext(rules, layout).entered():
        yield rules


def current_context() -> ShardingContext | None:
    """Return the sharding rules and settings of the innermost `with` block that sets them, or None if there is none."""
    return _current.get()


def current_rules() -> AxisRules | None:
    """Return the sharding rules of the current context, or None if there is none."""
    context = _current.get()
    return context.rules if context is not None else None


def is_sharded() -> bool:
    """Return True if XLA partitions arrays over more than one device in the current context."""
    rules = current_rules()
    return rules is not None and rules.degree(rules.free) > 1


def batch_shards() -> int:
    """Return over how many devices the mesh in use splits a batch; 1 without a mesh."""
    rules = current_rules()
    return 1 if rules is None else rules.degree(rules.table["batch"])


def sum_over_batch(x: jax.Array) -> jax.Array:
    """Sum an array over the devices that each hold a part of the batch; unchanged where all hold the whole of it."""
    rules = current_rules()
    axes = () if rules is None else tuple(axis for axis in rules.batch_axes if axis in rules.manual)
    return jax.lax.psum(x, axes) if axes else x


def splits_length() -> bool:
    """Return True if the current sharding rules split sequences over several devices."""
    rules = current_rules()
    return rules is not None and rules.degree(rules.table["length"]) > 1


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain an activation to the sharding of its logical axes; return it unchanged outside `logical_axis_rules`.

    Raises:
      ValueError: the number of names is not the rank of `x`, or a name is unknown.
    """
    rules = current_rules()
    if len(names) != x.ndim:
        raise ValueError(f"shard() got {len(names)} axis names {names} for an array of rank {x.ndim}.")
    if rules is None or not is_sharded():
        return x
    return jax.lax.with_sharding_constraint(x, placed(rules, rules.spec(names, x.shape)))


def placed(rules: AxisRules, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
    """Return `spec` for `jax.lax.with_sharding_constraint`: unchanged in a `shard_map`, else as a NamedSharding."""
    # Inside a shard_map the ambient mesh knows which axes are manual; a NamedSharding of the outer mesh does not.
    return spec if rules.manual else NamedSharding(rules.mesh, spec)
