"""Sums over `tensor` for decoding, where they are so small that their latency decides.

A row-parallel matmul leaves each device with a term of the result. XLA inserts the all-reduce itself; with
`StepLayout.peer_sums` the matmul stands in a `shard_map` and `pallas_kernels.all_reduce` adds the terms up, if its
kernel is the better choice.

Dims: B batch, T length, D model, F what the devices split (one dim or several, the first split).
"""

import functools
import math

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxstack.jax_compat import concrete_mesh
from jaxstack.parallel.overlap import AXIS
from jaxstack.parallel.rules import AxisRules, axes_of
from jaxstack.parallel.sharding_context import ShardingContext, current_context
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce.api import reason_against_kernel
from pallas_kernels.all_reduce.request import AllReduceRequest
from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.target import current_target


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
    if context is None or unsuitable is not None or not _suits(context, y, kernel):
        return None
    rules = context.rules
    inner = context.within(rules.free)

    def local(y: jax.Array, kernel: jax.Array) -> jax.Array:
        matrix = kernel.reshape(-1, kernel.shape[-1])
        terms = jax.lax.dot_general(y.reshape(-1, len(matrix)), matrix, (((1,), (0,)), ((), ())))
        with inner.entered():
            return sum_over_tensor(terms).reshape(*y.shape[:2], -1)

    rows = rules.spec(("batch", "length"), y.shape[:2])
    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(PartitionSpec(*rows, AXIS), PartitionSpec(AXIS)),
        out_specs=PartitionSpec(*rows),
        axis_names=set(rules.free),  # all of them: XLA cannot partition a kernel over an automatic axis
        check_vma=False,
    )(y, kernel)


def _suits(context: ShardingContext, y: jax.Array, kernel: jax.Array) -> bool:
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
    rows = math.prod(y.shape[:2]) // rules.degree(axes_of(rules.spec(("batch",), y.shape[:1])[0]))
    request = AllReduceRequest(rows, kernel.shape[-1], devices, AXIS, y.dtype, current_target())
    return _has_ordered_devices(rules) and reason_against_kernel(request) is None


def _has_ordered_devices(rules: AxisRules) -> bool:
    """Return True if the mesh has all devices from 0 on in order, by whose numbers a kernel addresses its peers."""
    return not isinstance(rules.mesh, Mesh) or _ordered(rules.mesh)


@functools.cache
def _ordered(mesh: Mesh) -> bool:
    return bool((mesh.device_ids.ravel() == np.arange(mesh.size)).all())
