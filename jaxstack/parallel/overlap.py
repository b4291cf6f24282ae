"""Matmuls of tensor parallelism together with their collective, inside a `shard_map`, where XLA's own are slower.

With sequence parallelism the residual stream is sharded along the sequence over `tensor`. A matmul that reads it needs
all of its rows, one that writes it sums over the devices. XLA runs these one after the other: all-gather, then matmul;
matmul, then reduce-scatter. The kernels `all_gather_matmul` and `matmul_reduce_scatter` do both at once.

In decoding the sums over `tensor` are so small that their latency decides. XLA inserts the all-reduce itself; with
`StepLayout.peer_sums` the row-parallel matmul stands in a `shard_map`, and `pallas_kernels.all_reduce` adds the terms.

Each function that projects returns None if the plain form is better; `record_choices` records why.

Dims: B batch, T length, D model, F what a kernel reads or produces (one dim or several, the first split), n devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxstack.distributed.xla_options import ONE_SIDED_NCCL, nccl_version
from jaxstack.jax_compat import concrete_mesh
from jaxstack.parallel.rules import AxisRules, axes_of
from jaxstack.parallel.sharding_context import ShardingContext, current_context
from pallas_kernels import all_gather_matmul, all_reduce, matmul_reduce_scatter
from pallas_kernels.all_reduce.api import reason_against_kernel
from pallas_kernels.all_reduce.request import AllReduceRequest
from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.collective_matmul.api import reason_against_kernels
from pallas_kernels.collective_matmul.request import CollectiveRequest
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.target import current_target

AXIS = "tensor"


@dataclass(frozen=True)
class _Call:
    """Request for overlapped matmuls: matmul shapes, collectives, and the caller's reason against the kernels."""

    products: CollectiveRequest
    unsuitable: str | None
    always: bool

    def __str__(self) -> str:
        return str(self.products)


def _unsupported_reason(call: _Call) -> str | None:
    return call.unsuitable


def _lower_priority_reason(call: _Call) -> str | None:
    return None if call.always else reason_against_kernels(call.products)


@dataclass(frozen=True)
class _Overlapped:
    """Sharding rules of overlapped matmuls, and the backend of their kernels by name; None for the automatic choice."""

    context: ShardingContext
    implementation: str | None


def _do_nothing(call: _Call) -> None:
    """Placeholder for a backend's function: callers such as `gather_project` call the chosen kernels themselves."""


_BACKENDS: tuple[Backend[_Call], ...] = (
    Backend(
        "overlapped",
        "one or two kernels, whose tensor cores work while rows and sums travel",
        _unsupported_reason,
        _do_nothing,
        _lower_priority_reason,
    ),
    Backend("compiler", "XLA's matmuls, and its collective operations before and after", lambda _: None, _do_nothing),
)


def gather_project(x: jax.Array, kernels: Sequence[jax.Array], unsuitable: str | None = None) -> list[jax.Array] | None:
    """Return x @ kernel for each kernel, overlapped with an all-gather of x; None if separate operations are better.

    Args:
      x: [B, T, D], sharded along T over `tensor`.
      kernels: each [D, F], sharded along the first dim of F.
      unsuitable: the reason, if any, why the caller cannot use the kernels.

    Returns:
      A result [B, T, F] for each kernel, sharded along F.
    """
    chosen = _choose("tensor_parallel_input", x.shape, x.dtype, kernels, (), unsuitable)
    if chosen is None:
        return None
    rules = chosen.context.rules
    options = {"axis_name": AXIS, "implementation": chosen.implementation}

    def local(x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
        parts = all_gather_matmul(x.reshape(-1, x.shape[2]), [_matrix(k, 1) for k in kernels], **options)
        sizes = jax.lax.axis_size(AXIS), x.shape[0], x.shape[1]
        whole = (part.reshape(*sizes, -1).swapaxes(0, 1) for part in parts)
        return [part.reshape(x.shape[0], -1, *kernel.shape[1:]) for part, kernel in zip(whole, kernels, strict=True)]

    rows = _batch_axes(rules, x.shape[0])
    split = PartitionSpec(None, AXIS)
    ins = (PartitionSpec(rows, AXIS), *(split for _ in kernels))
    return _mapped(rules, local, ins, [PartitionSpec(rows, None, AXIS)] * len(kernels))(x, *kernels)


def project_scatter(y: jax.Array, kernel: jax.Array, unsuitable: str | None = None) -> jax.Array | None:
    """Return y @ kernel, overlapped with its reduce-scatter along the sequence; None if separate operations are better.

    Args:
      y: [B, T, F], sharded along F over `tensor`.
      kernel: [F, D], sharded along the first dim of F.
      unsuitable: the reason, if any, why the caller cannot use the kernels.

    Returns:
      [B, T, D], sharded along T.
    """
    shape = (*y.shape[:2], kernel.shape[-1])
    chosen = _choose("tensor_parallel_output", shape, y.dtype, (), (kernel,), unsuitable)
    if chosen is None:
        return None
    rules = chosen.context.rules
    options = {"axis_name": AXIS, "implementation": chosen.implementation}

    def local(y: jax.Array, kernel: jax.Array) -> jax.Array:
        batch = y.shape[0]
        devices = jax.lax.axis_size(AXIS)
        matrix = _matrix(kernel, kernel.ndim - 1)
        by_device = y.reshape(batch, devices, -1, matrix.shape[0]).swapaxes(0, 1)
        out = matmul_reduce_scatter(by_device.reshape(-1, matrix.shape[0]), matrix, **options)
        return out.reshape(batch, -1, matrix.shape[1])

    rows = _batch_axes(rules, y.shape[0])
    ins = (PartitionSpec(rows, None, AXIS), PartitionSpec(AXIS))
    return _mapped(rules, local, ins, PartitionSpec(rows, AXIS))(y, kernel)


def gather_project_scatter(
    x: jax.Array,
    firsts: Sequence[tuple[jax.Array, jax.Array | None]],
    between: Callable[..., jax.Array],
    last: jax.Array,
    unsuitable: str | None = None,
) -> jax.Array | None:
    """Compute the MLP between(x @ kernel + bias, ...) @ last, overlapped with its all-gather and reduce-scatter.

    The result is None if XLA's separate operations are better.

    Args:
      x: [B, T, D], sharded along T over `tensor`.
      firsts: kernels [D, F] with their biases [F] or None.
      between: an elementwise function of arrays [rows, F], whose rows may be in any order.
      last: [F, D].
      unsuitable: the reason, if any, why the caller cannot use the kernels.

    Returns:
      [B, T, D], sharded along T.
    """
    kernels = [kernel for kernel, _ in firsts]
    biases = [bias for _, bias in firsts]
    chosen = _choose("tensor_parallel_mlp", x.shape, x.dtype, kernels, (last,), unsuitable)
    if chosen is None:
        return None
    rules = chosen.context.rules
    inner = chosen.context.within(rules.free)
    options = {"axis_name": AXIS, "implementation": chosen.implementation}

    def local(x: jax.Array, kernels: list[jax.Array], biases: list[jax.Array | None], last: jax.Array) -> jax.Array:
        parts = all_gather_matmul(x.reshape(-1, x.shape[2]), kernels, **options)
        parts = [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]
        with inner.entered():
            hidden = between(*parts)
        return matmul_reduce_scatter(hidden, last, **options).reshape(x.shape)

    rows = PartitionSpec(_batch_axes(rules, x.shape[0]), AXIS)
    ins = (rows, PartitionSpec(None, AXIS), PartitionSpec(AXIS), PartitionSpec(AXIS))
    return _mapped(rules, local, ins, rows)(x, kernels, biases, last)


def _choose(
    operation: str,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    gathering: Sequence[jax.Array],
    scattering: Sequence[jax.Array],
    unsuitable: str | None,
) -> _Overlapped | None:
    """Choose and record if kernels overlap these matmuls with communication; return how if so, else None.

    Args:
      operation: the name under which the choice is recorded.
      shape: of the residual stream, [B, T, D].
      dtype: of the residual stream.
      gathering: kernels [D, F] that read the residual stream.
      scattering: kernels [F, D] that write it.
      unsuitable: the caller's reason against the kernels, if any.
    """
    context = current_context()
    if context is None or len(shape) != 3:
        return None
    rules = context.rules
    overlap = context.layout.overlap
    along = axes_of(rules.spec(("residual_length",))[0])
    if AXIS not in along:
        return None
    devices = rules.mesh.shape[AXIS]
    if unsuitable is None and rules.mesh.shape["pipeline"] > 1:
        # Each kernel starts with a barrier of the whole mesh, which would deadlock inside a stage's own conditional.
        unsuitable = "the kernels start on all devices of the mesh together, the stages of a pipeline do not"
    if unsuitable is None and len(along) > 1:
        unsuitable = f"the length is split over {', '.join(along)}, of which all but {AXIS} must be a shard_map's"
    if unsuitable is None and rules.manual and concrete_mesh().empty:
        unsuitable = "inside a shard_map over other axes the mesh must be in context: call within jax.set_mesh(mesh)"
    split = [kernel.shape[1] for kernel in gathering] + [kernel.shape[0] for kernel in scattering]
    if unsuitable is None and (shape[1] % devices or any(size % devices for size in split)):
        unsuitable = (
            f"{AXIS} ({devices}) must divide the length and what the kernels split, "
            f"here {shape[1]} and {', '.join(map(str, split))}"
        )
    sizes = [math.prod(kernel.shape[1:]) for kernel in gathering] or [math.prod(k.shape[:-1]) for k in scattering]
    batch = shape[0] // rules.degree(_batch_axes(rules, shape[0]))
    inner = tuple(size // devices for size in sizes)
    request = CollectiveRequest(batch * shape[1] // devices, shape[2], inner, devices, AXIS, dtype, current_target())
    named = "compiler" if overlap == "never" else None
    chosen = select(operation, _BACKENDS, named, _Call(request, unsuitable, overlap == "always"))
    if chosen.name != "overlapped":
        return None
    return _Overlapped(context, _named_kernels(request) if overlap == "always" else None)


def _named_kernels(request: CollectiveRequest) -> str | None:
    """Return the name of the kernels' backend where several processes can use it, which is not its automatic choice."""
    between = jax.process_count() > 1 and nccl_version() >= ONE_SIDED_NCCL
    return "mosaic" if between and reason_against_kernels(request, support_only=True) is None else None


def sum_over_tensor(x: jax.Array) -> jax.Array:
    """Sum x over the axis `tensor` of the surrounding `shard_map`."""
    context = current_context()
    if context is None or context.layout.peer_sums == "never" or is_batch_invariant():
        return jax.lax.psum(x, AXIS)
    return all_reduce(x, axis_name=AXIS, implementation=None if _has_ordered_devices(context.rules) else "xla")


def project_sum(y: jax.Array, kernel: jax.Array, unsuitable: str | None = None) -> jax.Array | None:
    """Return y @ kernel, summed over `tensor` by a kernel of ours; None if XLA's all-reduce is the better choice.

    Args:
      y: [B, T, F], sharded along F over `tensor`.
      kernel: [F, D], sharded along the first dim of F.
      unsuitable: the reason, if any, why the caller cannot use a plain matmul of this kernel.
    """
    context = current_context()
    if context is None or unsuitable is not None or not _sum_suits(context, y, kernel):
        return None
    rules = context.rules
    inner = context.within(rules.free)

    def local(y: jax.Array, kernel: jax.Array) -> jax.Array:
        matrix = _matrix(kernel, kernel.ndim - 1)
        terms = jax.lax.dot_general(y.reshape(-1, len(matrix)), matrix, (((1,), (0,)), ((), ())))
        with inner.entered():
            return sum_over_tensor(terms).reshape(*y.shape[:2], -1)

    rows = rules.spec(("batch", "length"), y.shape[:2])
    ins = (PartitionSpec(*rows, AXIS), PartitionSpec(AXIS))
    return _mapped(rules, local, ins, PartitionSpec(*rows))(y, kernel)


def _sum_suits(context: ShardingContext, y: jax.Array, kernel: jax.Array) -> bool:
    """Return True if the sum of this product should be computed by `all_reduce`."""
    rules = context.rules
    devices = rules.mesh.shape[AXIS]
    if context.layout.peer_sums == "never" or devices == 1 or AXIS in rules.manual or y.ndim != kernel.ndim + 1:
        return False
    if rules.mesh.shape["pipeline"] > 1 or (rules.manual and concrete_mesh().empty):
        return False
    if axes_of(rules.spec(("residual_length",))[0]) or y.shape[2] % devices:
        return False
    if context.layout.peer_sums == "always":
        return True
    rows = math.prod(y.shape[:2]) // rules.degree(_batch_axes(rules, y.shape[0]))
    request = AllReduceRequest(rows, kernel.shape[-1], devices, AXIS, y.dtype, current_target())
    return _has_ordered_devices(rules) and reason_against_kernel(request) is None


def _has_ordered_devices(rules: AxisRules) -> bool:
    """Return True if the mesh has all devices from 0 on in order, by whose numbers a kernel addresses its peers."""
    return not isinstance(rules.mesh, Mesh) or _ordered(rules.mesh)


@functools.cache
def _ordered(mesh: Mesh) -> bool:
    return bool((mesh.device_ids.ravel() == np.arange(mesh.size)).all())


def _mapped(rules: AxisRules, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(rules.free),  # all of them: XLA cannot partition a kernel over an automatic axis
        check_vma=False,
    )


def _batch_axes(rules: AxisRules, batch: int) -> tuple[str, ...]:
    return axes_of(rules.spec(("batch",), (batch,))[0])


def _matrix(kernel: jax.Array, inputs: int) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
