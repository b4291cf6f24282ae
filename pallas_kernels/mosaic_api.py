"""Pallas, its Mosaic GPU interface and the other parts of jax that the kernels use beyond jax's stable public API.

These interfaces move between releases of jax; what differs between releases, is private, or has to be patched is
handled here and nowhere else in this package. The Mosaic kernels need jax 0.11 or newer; on an older release they are
refused before anything here is used.

Modules are imported at their first use: together they take a quarter of a second, which a process that runs no kernel
should not pay, and a release of jax that lacks one can still import the kernels.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

_ASSUMED_CUDNN_VERSION = 91900


class _LazyModule:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pl: Any = _LazyModule("jax.experimental.pallas")
plgpu: Any = _LazyModule("jax.experimental.pallas.mosaic_gpu")
_mosaic: Any = _LazyModule("jax.experimental.mosaic.gpu")
_utils: Any = _LazyModule("jax.experimental.mosaic.gpu.utils")
_constraints: Any = _LazyModule("jax.experimental.mosaic.gpu.constraints")
_mlir: Any = _LazyModule("jax._src.lib.mlir")
_arith: Any = _LazyModule("jaxlib.mlir.dialects.arith")
_llvm: Any = _LazyModule("jaxlib.mlir.dialects.llvm")
_vector: Any = _LazyModule("jaxlib.mlir.dialects.vector")

ScratchType: TypeAlias = Any
"""Argument `scratch_types` of `plgpu.kernel`: `plgpu.SMEM`, `plgpu.Barrier`, or a tree of them."""

Index: TypeAlias = int | jax.Array
"""A whole number inside a kernel: static, or an int32 scalar that is computed while the kernel runs."""


class Ref(Protocol):
    """A reference inside a kernel: to an array in global or shared memory, to an accumulator, or to barriers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the referenced array."""
        ...

    @property
    def dtype(self) -> Any:
        """Element type of the referenced array."""
        ...

    @property
    def at(self) -> Any:
        """Indexer: `ref.at[index]` is a reference to a part, without loading it."""
        ...

    def transpose(self, dims: tuple[int, ...], /) -> "Ref":
        """Return a reference with permuted dims, without copying."""
        ...

    def __getitem__(self, index: Any, /) -> jax.Array: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


@functools.cache
def speed_up_lowering() -> None:
    """Let jax 0.11 lower Mosaic kernels to the same code in less time, in this process; other releases are not changed.

    - jax sorts the values of a kernel that must have equal layouts by their text, for which it prints the operation of
      each. The order has no meaning; here they stay in the order of their first appearance.
    - jax parses the layout of an operation each time. A kernel has few different layouts; here the results are cached.
    """
    if jax.__version_info__[:2] != (0, 11):
        return
    for name, function, replacement in (
        ("constraints", "compute_transitively_equal_vars", lambda _: _equal_variables),
        ("layouts", "from_layout_attr", _cached_by_text),
    ):
        module = importlib.import_module(f"jax.experimental.mosaic.gpu.{name}")
        original = getattr(module, function, None)
        if original is not None:
            setattr(module, function, functools.wraps(original)(replacement(original)))


def _cached_by_text(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `parse` with a cache of its results, which must depend on the text of the argument alone."""
    known: dict[str, Any] = {}

    def parse_once(attribute: Any) -> Any:
        text = str(attribute)
        if text not in known:
            known[text] = parse(attribute)
        return known[text]

    return parse_once


def _equal_variables(system: Any) -> dict[Any, list[Any]]:
    """Map each variable of a constraint system to all others that chains of `Equals` make equal to it."""
    groups: dict[Any, list[Any]] = {}
    for constraint in system.constraints:
        if not isinstance(constraint, _constraints.Equals):
            continue
        sides = constraint.lhs, constraint.rhs
        if all(isinstance(side, _constraints.Variable) for side in sides):
            one, other = (groups.setdefault(side, [side]) for side in sides)
            if one is not other:
                one.extend(other)
                groups.update(dict.fromkeys(other, one))
    return {variable: [other for other in group if other != variable] for variable, group in groups.items()}


def fence_before_async_reads() -> None:
    """Make the writes that a semaphore has announced visible to the TMA reads of global memory that follow.

    TMA reads take another path to memory than ordinary loads (the asynchronous proxy), which the semaphore alone does
    not order.
    """

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        _utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


def fetch_and_increment(counter: Ref) -> jax.Array:
    """Increment a semaphore atomically and return its previous value, int32.

    For the code of a single warp, all lanes of which get the same value.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=None))
    def take(_: Any, ref: Any) -> Any:
        value = _utils.inline_ptx(
            "{.reg .pred first; .reg .u32 lane, old; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
            " mov.u32 old, 0; @first atom.relaxed.gpu.global.add.u32 old, [$1], 1;"
            " shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;}",
            _utils.memref_ptr(ref),
            result_types=_mlir.ir.IntegerType.get_signless(32),
            has_side_effects=True,
            convergent=True,
        )
        return _mosaic.FragmentedArray.splat(value, (), is_signed=True)

    return take(counter)


def load_vectors(row: Ref, vector: int, interpret: bool) -> jax.Array:
    """Load a row of global memory, of this device or another one, spread over the threads of a warpgroup.

    Pallas' own loads from another device are of one element each, because it knows no alignment of an address that the
    kernel looks up. Rows must be aligned to the size of a vector.

    Args:
        row: Reference to a row [n], of a multiple of 128 vectors.
        vector: Number of elements that a thread loads at once.
        interpret: True if the kernel is interpreted on a CPU.
    """
    if interpret:
        return row[...]
    (size,) = row.shape
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((size,), row.dtype, layout=layout)
    )
    def load(_: Any, ref: Any) -> Any:
        element = _mlir.ir.MemRefType(ref.type).element_type
        kind = _mlir.ir.VectorType.get((vector,), element)
        strided = _mosaic.WGStridedFragLayout((size,), vector)
        alignment = min(16, vector * jnp.dtype(row.dtype).itemsize)
        places = _vector_places(ref, strided, element)
        registers = np.array([_llvm.load(kind, place, alignment=alignment) for place in places], dtype=object)
        return _mosaic.FragmentedArray(_registers=registers, _layout=strided, _is_signed=None)

    return load(row)


def store_vectors(value: jax.Array, row: Ref, vector: int, interpret: bool) -> None:
    """Store a value [n] in a row of global memory, of this device or another one; see `load_vectors`."""
    if interpret:
        row[...] = value
        return
    (size,) = row.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_STRIDED((size,), vec_size=vector), plgpu.RefType()))
    def store(_: Any, array: Any, ref: Any) -> None:
        alignment = min(16, vector * jnp.dtype(row.dtype).itemsize)
        places = _vector_places(ref, array.layout, _mlir.ir.MemRefType(ref.type).element_type)
        for register, place in zip(array.registers, places, strict=True):
            _llvm.store(register, place, alignment=alignment)

    store(value, row)


def _vector_places(ref: Any, layout: Any, element: Any) -> list[Any]:
    """Return the addresses of the vectors of a row that this thread holds."""
    start = _utils.memref_ptr(ref)
    integer = _mlir.ir.IntegerType.get_signless(32)
    return [
        _utils.getelementptr(start, [_arith.index_cast(integer, index)], element)
        for index in layout.linear_thread_idxs()
    ]


WARPS = 4
"""Warps of a warpgroup; each holds 16 of the 64 rows of an accumulator."""


def store_warp_column_sums(value: jax.Array, target: Ref, interpret: bool) -> None:
    """Store the column sums of the 16 rows of an accumulator that each warp holds.

    Pallas' own sums over rows pass through shared memory that all warpgroups of a program have in common, so that two
    warpgroups may not sum at the same time. Here each warp sums what it holds by shuffles.

    Args:
        value: float32 [64, 64] in the register layout of an accumulator.
        target: float32 [4, 64] in global memory, one row for each warp.
        interpret: True if the kernel is interpreted on a CPU.
    """
    if interpret:
        target[...] = value.reshape(WARPS, -1, value.shape[1]).sum(axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_: Any, array: Any, ref: Any) -> None:
        (row_stride, _), _ = _mlir.ir.MemRefType(ref.type).get_strides_and_offset()
        _utils.inline_ptx(
            "{.reg .b32 lane, warp; .reg .b64 offset, address; and.b32 lane, $1, 31; shr.u32 warp, $1, 5;"
            " and.b32 warp, warp, 3; shl.b32 lane, lane, 3;"
            f" mad.lo.u32 lane, warp, {4 * row_stride}, lane; cvt.u64.u32 offset, lane; add.u64 address, $0, offset;"
            " st.global.v2.f32 [address], {$2, $3};}",
            _utils.memref_ptr(ref),
            _utils.thread_idx(),
            *_sum_over_lanes(_own_column_sums(array)),
            has_side_effects=True,
        )

    store(value, target)


def _own_column_sums(array: Any) -> list[Any]:
    """Return this thread's sums over its rows of an accumulator [64, 64], of columns 8 j + 2 (lane % 4) + {0, 1}.

    A thread holds these pairs of columns, for j from 0 to 7, in two rows, r and r + 8. The sums are in the order of the
    columns.
    """
    registers = array.registers.reshape(8, 2)
    return [
        _arith.addf(*(_vector.extract(register, [], [column]) for register in registers[j]))
        for j in range(8)
        for column in range(2)
    ]


def _sum_over_lanes(values: list[Any]) -> list[Any]:
    """Add up the sums of the eight lanes with the same lane % 4; return those of columns 2 lane and 2 lane + 1.

    In each of three exchanges a lane keeps half of its sums and passes on the other half.
    """
    integer = _mlir.ir.IntegerType.get_signless(32)
    lane = _arith.remui(_utils.thread_idx(), _utils.c(32, integer))
    for distance in (16, 8, 4):
        bit = _arith.andi(lane, _utils.c(distance, integer))
        upper = _arith.cmpi(_arith.CmpIPredicate.ne, bit, _utils.c(0, integer))
        half = len(values) // 2
        pairs = list(zip(values[:half], values[half:], strict=True))
        kept = [_arith.select(upper, high, low) for low, high in pairs]
        passed = [_arith.select(upper, low, high) for low, high in pairs]
        values = [_arith.addf(k, _utils.shfl_bfly(p, distance)) for k, p in zip(kept, passed, strict=True)]
    return values


def cudnn_problem() -> str | None:
    """Return why jax cannot use cuDNN's attention on this machine, or None if it can."""
    try:
        _cudnn_attention.check_cudnn_version()
    except RuntimeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def assume_cudnn(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Let a machine without a GPU trace cuDNN attention for a GPU of this compute capability.

    While jax traces cuDNN attention, it asks the machine that it runs on for cuDNN's version and the GPU's compute
    capability, even if it compiles for another machine. Both answers are replaced within this context.
    """
    module: Any = importlib.import_module(_CUDNN_ATTENTION)
    before = module.check_cudnn_version, module.check_compute_capability
    module.check_cudnn_version = lambda: _ASSUMED_CUDNN_VERSION
    module.check_compute_capability = lambda least: compute_capability >= tuple(map(int, least.split(".")))
    try:
        yield
    finally:
        module.check_cudnn_version, module.check_compute_capability = before


_CUDNN_ATTENTION = "jax._src.cudnn.fused_attention_stablehlo"
_cudnn_attention: Any = _LazyModule(_CUDNN_ATTENTION)
