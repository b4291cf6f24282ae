"""Backends of an FP8 matmul, for each way to scale operands: current, delayed or blockwise.

XLA compiles one scale per tensor to cuBLASLt's FP8 matmul. It has no such pattern for blockwise scales.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

import jax

from pallas_kernels.dispatch import Backend
from pallas_kernels.fp8 import blockwise, mosaic, per_tensor, triton
from pallas_kernels.fp8.formats import Quantized
from pallas_kernels.fp8.options import Fp8Options
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class Fp8Request:
    """Checked arguments of an FP8 matmul, as backends receive them: x [rows, D] times weights [D, outputs].

    Attributes:
        options: the static arguments.
        x: the input, with the contracted dims last.
        norm_inputs: x [rows, D] and gain [D] of the RMSNorm that makes the input, if a backend may compute it; else
        empty. weights: the weights, with the contracted dims first; with `mlp` gate, up and down.
        quantized: for each weight its FP8 form, or None to quantize it here.
        states: for each weight its state of delayed scaling, or None.
        mlp: True to compute swiglu(x @ gate, x @ up) @ down.
        target: the device that the call is lowered for.
    """

    options: Fp8Options
    x: jax.Array
    norm_inputs: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...]
    quantized: tuple[Quantized | None, ...]
    states: tuple[jax.Array | None, ...]
    mlp: bool = False
    target: Target = field(default_factory=current_target)

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Sizes (rows, contracted, outputs) of the matmul with each weight, with several dims merged into one."""
        contracted = self.options.contracted
        rows = math.prod(self.x.shape[: self.x.ndim - contracted])
        return [(rows, math.prod(w.shape[:contracted]), math.prod(w.shape[contracted:])) for w in self.weights]

    def __str__(self) -> str:
        shown = ", ".join(f"{m} x {k} x {n}" for m, k, n in self.sizes)
        return f"{shown} {self.options.dtype}, gradients {self.options.gradients} on {self.target}"


_ALIGNMENT = 16


def _cublas_unsupported_reason(request: Fp8Request) -> str | None:
    target = request.target
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability < (8, 9):
        return f"FP8 tensor cores are in NVIDIA GPUs from compute capability 8.9 on; lowered for {target}"
    uneven = [size for size in request.sizes if any(n % _ALIGNMENT for n in size)]
    if uneven:
        shown = " x ".join(map(str, uneven[0]))
        return f"rows, summed and output dims must be multiples of {_ALIGNMENT} for FP8 tensor cores; got {shown}"
    return None


def _per_tensor(request: Fp8Request) -> tuple[jax.Array, ...]:
    function = per_tensor.swiglu_mlp if request.mlp else per_tensor.multiply
    options, norm_inputs = _fuse_norm_if_possible(request)
    known = zip(request.weights, request.quantized, strict=True)
    values = tuple(jax.lax.stop_gradient(weight) if found is None else found for weight, found in known)
    carriers = tuple(weight.astype(request.options.dtype) for weight in request.weights)
    return function(options, request.x, norm_inputs, carriers, values, request.states)


def _fuse_norm_if_possible(request: Fp8Request) -> tuple[Fp8Options, tuple[jax.Array, ...]]:
    """Return the options and the RMSNorm's inputs; with epsilon None and no inputs if no kernel can fuse the norm."""
    if triton.kernel_applies(request.x.reshape(-1, request.x.shape[-1])):
        return request.options, request.norm_inputs
    return dataclasses.replace(request.options, epsilon=None), ()


def _mosaic_unsupported_reason(request: Fp8Request) -> str | None:
    dtypes = (request.options.dtype, request.options.output)
    return mosaic.unsupported_reason(request.target, dtypes, request.sizes)


def _blockwise(operations: blockwise.Operations, request: Fp8Request) -> tuple[jax.Array, ...]:
    options, norm_inputs = _fuse_norm_if_possible(request)
    return blockwise.multiply(
        operations, options, request.x, norm_inputs, request.weights, request.quantized, mlp=request.mlp
    )


_CUBLAS = Backend("cublas", "XLA compiles it to cuBLASLt's FP8 matmul", _cublas_unsupported_reason, _per_tensor)
_PLAIN = Backend(
    "xla", "the same quantized numbers, multiplied in bfloat16 or float32", lambda request: None, _per_tensor
)

BACKENDS: dict[str, tuple[Backend[Fp8Request], ...]] = {
    "current": (_CUBLAS, _PLAIN),
    "delayed": (_CUBLAS, _PLAIN),
    "blockwise": (
        Backend(
            "mosaic",
            "tensor cores at their FP8 rate, scales applied in registers",
            _mosaic_unsupported_reason,
            functools.partial(_blockwise, mosaic.MOSAIC),
            opaque=True,
        ),
        Backend(
            "xla",
            "the same quantized numbers, multiplied in bfloat16 or float32",
            lambda request: None,
            functools.partial(_blockwise, blockwise.XLA),
        ),
    ),
}
