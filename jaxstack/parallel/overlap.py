"""Tensor parallelism whose matmuls send and receive while they multiply: `shard_map` islands around the kernels'
`all_gather_matmul` and `matmul_reduce_scatter`.

With sequence parallelism the residual stream lies split along the sequence over `tensor`. What reads it needs all of
its rows, what writes it sums over the devices. Left to XLA both wait: gather, then multiply; multiply, then scatter.
Each function here returns None where that plain form is the better one; `record_choices` then tells why.

Dims: B batch, T length, D model, F what a kernel reads or produces (one dim or several, the first split), n devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.mesh import get_concrete_mesh  # jax.sharding.get_mesh refuses to answer while a function is traced
from jax.sharding import PartitionSpec

from jaxstack.parallel.rules import AxisRules, axes_of, current_rules, logical_axis_rules
from pallas_kernels import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.collective_matmul.api import reason_against_kernels
from pallas_kernels.collective_matmul.request import CollectiveRequest
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.target import current_target

AXIS = "tensor"


@dataclass(frozen=True)
class _Call:
    """One pair of a gather and its matmuls, or of a matmul and its scatter, or both."""

    products: CollectiveRequest
    unsuitable: str | None
    always: bool

    def __str__(self) -> str:
        return str(self.products)


_BACKENDS = (
    Backend(
        "overlapped",
        "one or two kernels, whose tensor cores work while rows and sums travel",
        lambda call: call.unsuitable,
        lambda: None,
        lambda call: None if call.always else reason_against_kernels(call.products),
    ),
    Backend("compiler", "XLA's matmuls, and its collective operations before and after", lambda _: None, lambda: None),
)


def gather_project(x: jax.Array, kernels: Sequence[jax.Array], unsuitable: str | None = None) -> list[jax.Array] | None:
    """x [B, T, D], split along T, times each kernel [D, F]: [B, T, F], split along F; x is gathered once.

    Args:
      unsuitable: why the caller cannot have it this way, if so.
    """
    rules = _rules_for("tensor_parallel_input", x.shape, x.dtype, kernels, (), unsuitable)
    if rules is None:
        return None

    def local(x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
        parts = all_gather_matmul(x.reshape(-1, x.shape[2]), [_matrix(k, 1) for k in kernels], axis_name=AXIS)
        sizes = jax.lax.axis_size(AXIS), x.shape[0], x.shape[1]
        whole = (part.reshape(*sizes, -1).swapaxes(0, 1) for part in parts)
        return [part.reshape(x.shape[0], -1, *kernel.shape[1:]) for part, kernel in zip(whole, kernels, strict=True)]

    rows, split = _batch_axes(rules, x.shape[0]), PartitionSpec(None, AXIS)
    ins = (PartitionSpec(rows, AXIS), *(split for _ in kernels))
    return _mapped(rules, local, ins, [PartitionSpec(rows, None, AXIS)] * len(kernels))(x, *kernels)


def project_scatter(y: jax.Array, kernel: jax.Array, unsuitable: str | None = None) -> jax.Array | None:
    """y [B, T, F], split along F, times the kernel [F, D]: [B, T, D], split along T."""
    shape = (*y.shape[:2], kernel.shape[-1])
    rules = _rules_for("tensor_parallel_output", shape, y.dtype, (), (kernel,), unsuitable)
    if rules is None:
        return None

    def local(y: jax.Array, kernel: jax.Array) -> jax.Array:
        batch, devices = y.shape[0], jax.lax.axis_size(AXIS)
        matrix = _matrix(kernel, kernel.ndim - 1)
        by_device = y.reshape(batch, devices, -1, matrix.shape[0]).swapaxes(0, 1)
        out = matmul_reduce_scatter(by_device.reshape(-1, matrix.shape[0]), matrix, axis_name=AXIS)
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
    """between(x @ kernel + bias, ...) @ last: [B, T, D] to [B, T, D], both split along T.

    Args:
      firsts: kernels [D, F] with their biases [F] or None.
      between: works elementwise on arrays [rows, F], whose rows are in an order of their own.
      last: [F, D].
    """
    kernels, biases = [kernel for kernel, _ in firsts], [bias for _, bias in firsts]
    rules = _rules_for("tensor_parallel_mlp", x.shape, x.dtype, kernels, (last,), unsuitable)
    if rules is None:
        return None
    inner = rules.within(rules.free)

    def local(x: jax.Array, kernels: list[jax.Array], biases: list[jax.Array | None], last: jax.Array) -> jax.Array:
        parts = all_gather_matmul(x.reshape(-1, x.shape[2]), kernels, axis_name=AXIS)
        parts = [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]
        with logical_axis_rules(inner):
            hidden = between(*parts)
        return matmul_reduce_scatter(hidden, last, axis_name=AXIS).reshape(x.shape)

    rows = PartitionSpec(_batch_axes(rules, x.shape[0]), AXIS)
    ins = (rows, PartitionSpec(None, AXIS), PartitionSpec(AXIS), PartitionSpec(AXIS))
    return _mapped(rules, local, ins, rows)(x, kernels, biases, last)


def _rules_for(
    operation: str,
    shape: tuple[int, ...],
    dtype: Any,
    gathering: Sequence[jax.Array],
    scattering: Sequence[jax.Array],
    unsuitable: str | None,
) -> AxisRules | None:
    """The current rules where the call is to be an island, by the choice that it records; else None.

    Args:
      shape: of the residual stream, [B, T, D].
      gathering: kernels [D, F].
      scattering: kernels [F, D].
    """
    rules = current_rules()
    if rules is None or len(shape) != 3:
        return None
    along = axes_of(rules.spec(("residual_length",))[0])
    if AXIS not in along:
        return None
    devices = rules.mesh.shape[AXIS]
    if unsuitable is None and rules.mesh.shape["pipeline"] > 1:
        # A barrier of the whole mesh stands before each kernel: under a stage's own condition it would wait for ever.
        unsuitable = "the kernels start on all devices of the mesh together, the stages of a pipeline do not"
    if unsuitable is None and len(along) > 1:
        unsuitable = f"the length is split over {', '.join(along)}, of which all but {AXIS} must be a shard_map's"
    if unsuitable is None and rules.manual and get_concrete_mesh().empty:
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
    named = "compiler" if rules.overlap == "never" else None
    chosen = select(operation, _BACKENDS, named, _Call(request, unsuitable, rules.overlap == "always"))
    return rules if chosen.name == "overlapped" else None


def _mapped(rules: AxisRules, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(rules.free),  # all of them: a kernel cannot be partitioned over one that stays automatic
        check_vma=False,
    )


def _batch_axes(rules: AxisRules, batch: int) -> tuple[str, ...]:
    return axes_of(rules.spec(("batch",), (batch,))[0])


def _matrix(kernel: jax.Array, inputs: int) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
