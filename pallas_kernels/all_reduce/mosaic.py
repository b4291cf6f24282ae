"""Backend for Hopper GPUs: one kernel in which each device reads the others' arrays over NVLink and adds them up.

NCCL's all-reduce, and XLA's own, are separate thunks of XLA, at which a CUDA graph ends. This kernel is a custom call,
which is recorded in the graph, so that a whole decoding step is one graph.

XLA puts a barrier of all devices of the mesh before the kernel; from then on every device may read what the others have
computed before. In one shot, each device reads the whole arrays of all others. In two shots, which send less with more
than two devices, it reads and adds up its own share of the rows, and writes the sums into the memory of all others. The
parts are always added in the order of the devices and in float32, and rounded once, so that all devices get equal bits.

No device waits forever. Programs read without waiting, because the barrier is over, and then tell every other device
that they are done. One program of each device waits for that before it ends: until then its device must not reuse the
arrays. Should other collective operations keep some programs of a peer from starting, this device's other programs end
nevertheless and leave it room for its part in those operations.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.all_reduce.request import AllReduceRequest, NormSettings
from pallas_kernels.hopper.peers import unmeasured_peers, unsupported_peers
from pallas_kernels.hopper.scheduler import deal
from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.mosaic_api import Index, Ref, load_vectors, pl, plgpu, speed_up_lowering, store_vectors
from pallas_kernels.target import multiprocessors

_THREADS = 128
_VECTOR = 8
"""Values that a thread loads at once: 16 bytes of bfloat16."""
_UNIT = _THREADS * _VECTOR
_WIDEST = 8 * _UNIT
"""Widest row, whose parts fit the registers of a program."""
_TILE = 4 * _UNIT
"""Values that a program adds up at a time, if rows need not stay whole."""
_PROGRAMS_EACH = 2
"""Programs for each multiprocessor, whose loads are in flight at the same time."""
_ONE_SHOT_BYTES = 2**18
"""Most bytes of an array that more than two devices add up in one shot."""
_MOST_TRIED = 2
"""Most devices for which the kernel is the automatic choice: on so many GPUs its sums were compared with float32."""
_MOST_BYTES = 2**22
"""Most bytes of an array for which the kernel is the automatic choice, as for the small all-reduces of XLA."""
# Tests set this to run the kernel on a CPU, on one device.
INTERPRET = False


@dataclass(frozen=True)
class Reduction:
    """Compile-time description of the kernel.

    Attributes:
        rows: Number of rows, which the programs share.
        width: Size of a row.
        devices: Number of devices of the axis.
        axis_name: The axis.
        others: (name, size) of the other axes of the mesh.
        two_shots: True if each device adds up a share of the rows for all.
        norm: Settings of the norm after the sum; None: the sum alone.
        interpret: True to interpret the kernel on a CPU.
    """

    rows: int
    width: int
    devices: int
    axis_name: str
    others: tuple[tuple[str, int], ...] = ()
    two_shots: bool = False
    norm: NormSettings | None = None
    interpret: bool = False

    @property
    def own_rows(self) -> int:
        """Number of rows that one device adds up."""
        return self.rows // self.devices if self.two_shots else self.rows

    @property
    def programs(self) -> int:
        """Number of programs of a device."""
        most = 2 if self.interpret else _PROGRAMS_EACH * multiprocessors()
        return min(self.own_rows, most)

    def peer(self, place: Index) -> dict[str, Index]:
        """Return the id by which Pallas addresses the device at index `place` along the axis."""
        # Pallas would ask for the coordinates on all other axes, but a `shard_map` need not be over those of size 1.
        others = {name: lax.axis_index(name) if size > 1 else 0 for name, size in self.others}
        return {self.axis_name: place, **others}

    def part_of(self, array: Ref, place: Index) -> Ref:
        """Return a reference to an array in the memory of the device at index `place` along the axis."""
        return array if self.devices == 1 else plgpu.remote_ref(array, self.peer(place))


def unsupported_reason(request: AllReduceRequest) -> str | None:
    """Return the first reason why the kernel cannot compute this all-reduce, or None if it can."""
    return (
        unsupported_target(request.target, INTERPRET)
        or unsupported_peers(request.target, request.devices)
        or _unsupported_shape(request)
    )


def _unsupported_shape(request: AllReduceRequest) -> str | None:
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.dtype}"
    if request.norm is None:
        size = request.rows * request.width
        return f"takes a multiple of {_UNIT} values, got {size}" if size % _UNIT or not size else None
    if request.width % _UNIT or request.width > _WIDEST or not request.rows:
        return f"takes at least one row of a multiple of {_UNIT} and at most {_WIDEST} values, got {request.width}"
    return None


def lower_priority_reason(request: AllReduceRequest) -> str | None:
    """Return why XLA's all-reduce is preferred, or None."""
    if request.devices == 1:
        return "on one device there is nothing to add"
    if reason := unmeasured_peers(request.target):
        return reason
    if request.devices > _MOST_TRIED:
        return f"it has not run on more than {_MOST_TRIED} devices yet, the axis has {request.devices}"
    size = request.rows * request.width * jnp.dtype(request.dtype).itemsize
    if size > _MOST_BYTES:
        return f"{size} bytes are more than the {_MOST_BYTES} up to which latency matters most"
    return None


@dataclass(frozen=True)
class KernelReducer:
    """All-reduces by the Hopper kernel.

    Attributes:
        request: The checked arguments.
    """

    request: AllReduceRequest

    def add_up(self, x: jax.Array) -> jax.Array:
        """Return the sum of x over the devices of the axis, in the dtype of x."""
        width = next(width for width in (_TILE, _TILE // 2, _UNIT) if x.size % width == 0)
        rows = x.size // width
        # Two devices send the same in one shot as in two.
        large = self.request.devices > 2 and x.size * x.dtype.itemsize > _ONE_SHOT_BYTES
        reduction = self._reduction(rows, width, two_shots=large and rows % self.request.devices == 0)
        return _all_reduce(reduction, x.reshape(rows, width)).reshape(x.shape)

    def add_up_and_normalize(self, x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (RMS norm of residual + sum, residual + sum), each in the dtype of x."""
        rows = (self.request.rows, self.request.width)
        reduction = self._reduction(*rows)
        results = _all_reduce_norm(reduction, x.reshape(rows), residual.reshape(rows), weight.astype(jnp.float32))
        normalized, total = (result.reshape(x.shape) for result in results)
        return normalized, total

    def _reduction(self, rows: int, width: int, two_shots: bool = False) -> Reduction:
        request = self.request
        axes = jax.sharding.get_abstract_mesh().shape
        others = tuple((name, size) for name, size in axes.items() if name != request.axis_name)
        return Reduction(rows, width, request.devices, request.axis_name, others, two_shots, request.norm, INTERPRET)


@functools.partial(jax.jit, static_argnums=0)  # Equal calls, two a layer, are traced and lowered once.
def _all_reduce(reduction: Reduction, x: jax.Array) -> jax.Array:
    (out,) = _kernel("all_reduce", functools.partial(_sum_body, reduction), reduction, x, outputs=1)(x)
    return out


@functools.partial(jax.jit, static_argnums=0)
def _all_reduce_norm(
    reduction: Reduction, x: jax.Array, residual: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    body = functools.partial(_norm_body, reduction)
    return _kernel("all_reduce_rms_norm", body, reduction, x, outputs=2)(x, residual, weight)


def _kernel(name: str, body: Any, reduction: Reduction, x: jax.Array, *, outputs: int) -> Any:
    if not reduction.interpret:
        speed_up_lowering()
    return plgpu.kernel(
        body,
        kernel_name=name,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _ in range(outputs)),
        grid=(reduction.programs,),
        grid_names=("program",),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if reduction.interpret else None,
    )


def _sum_body(reduction: Reduction, x: Ref, out: Ref) -> None:
    me = lax.axis_index(reduction.axis_name) if reduction.devices > 1 else jnp.int32(0)
    first = me * reduction.own_rows if reduction.two_shots else 0

    def add_row(row: Index) -> None:
        total = _sum_of_row(reduction, x, first + row).astype(x.dtype)
        for distance in range(reduction.devices if reduction.two_shots else 1):
            there = lax.rem(me + distance, reduction.devices)
            target = out if distance == 0 else reduction.part_of(out, there)
            _store(reduction, total, target.at[first + row])

    _visit_rows(reduction, add_row)
    _wait_for_readers(reduction, me)


def _norm_body(reduction: Reduction, x: Ref, residual: Ref, weight: Ref, normalized: Ref, out: Ref) -> None:
    assert reduction.norm is not None
    norm = reduction.norm
    me = lax.axis_index(reduction.axis_name) if reduction.devices > 1 else jnp.int32(0)

    def add_row(row: Index) -> None:
        before = _load(reduction, residual.at[row])
        gain = _load(reduction, weight) + norm.offset
        # Rounded as if the sum and the addition were operations of their own.
        update = _sum_of_row(reduction, x, row).astype(x.dtype).astype(jnp.float32)
        total = (before + update).astype(x.dtype)
        _store(reduction, total, out.at[row])
        wide = total.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) * (1 / reduction.width) + norm.epsilon)
        _store(reduction, (wide * scale * gain).astype(x.dtype), normalized.at[row])

    _visit_rows(reduction, add_row)
    _wait_for_readers(reduction, me)


def _visit_rows(reduction: Reduction, visit: Any) -> None:
    """Call visit(row) for this program's share of the rows."""
    deal(reduction.own_rows, reduction.programs, lambda _, row, state: visit(row), None)


def _sum_of_row(reduction: Reduction, x: Ref, row: Index) -> jax.Array:
    """Return the sum of a row over the devices, float32, added in the order of the devices."""
    parts = [_load(reduction, reduction.part_of(x, place).at[row]) for place in range(reduction.devices)]
    return functools.reduce(jnp.add, parts)


def _load(reduction: Reduction, row: Ref) -> jax.Array:
    """Load a row as float32."""
    return load_vectors(row, _VECTOR, reduction.interpret).astype(jnp.float32)


def _store(reduction: Reduction, value: jax.Array, row: Ref) -> None:
    store_vectors(value, row, _VECTOR, reduction.interpret)


def _wait_for_readers(reduction: Reduction, me: jax.Array) -> None:
    """Tell the other devices that this program has read and written what it has to; one program waits for theirs."""
    if reduction.devices == 1:
        return
    # Of two semaphores one is not used: XLA clears pairs for all calls of a program in one kernel, scalars one by one.
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((2,))).at[0]
    for distance in range(1, reduction.devices):
        there = lax.rem(me + distance, reduction.devices)
        pl.semaphore_signal(done, device_id=reduction.peer(there))

    @pl.when(lax.axis_index("program") == 0)
    def _():
        plgpu.semaphore_wait(done, reduction.programs * (reduction.devices - 1), decrement=False)
