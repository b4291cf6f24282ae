"""Launches Triton kernels from JAX, and tells why that is not possible for a device."""

import functools
import importlib.util
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax.interpreters import mlir

from pallas_kernels.target import Target

_TYPED_CALL = "triton_kernel_call_ffi"
"""jaxlib's call of a Triton kernel that XLA can record in a CUDA graph. jax-triton 0.3 lowers to an older one, which
XLA launches by itself between two graphs."""


def triton_call(*arrays: jax.Array, kernel: Any, **options: Any) -> Any:
    """Call a Triton kernel, in a form that XLA can record in a CUDA graph.

    Args:
        arrays: The kernel's inputs, and Python numbers.
        kernel: A `triton.jit` function.
        options: As in `jax_triton.triton_call`: `out_shape`, `grid`, `name`, `num_warps`, `num_stages`,
            `compute_capability`, and the kernel's constants.

    Returns:
        Arrays of the shapes and dtypes of `out_shape`.
    """
    import jax_triton

    _register_typed_call()
    return jax_triton.triton_call(*arrays, kernel=kernel, custom_call_target_name=_TYPED_CALL, **options)


@functools.cache
def _register_typed_call() -> None:
    """Lower the calls of `triton_call` to jaxlib's typed call; other users of jax-triton keep their lowering."""
    from jax_triton import triton_lib

    _leave_out_torch(triton_lib)
    lower = functools.partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend)

    def lower_typed(context: mlir.LoweringRuleContext, *operands: Any, **options: Any) -> Sequence[Any]:
        results: Any = lower(context, *operands, **options)
        if options["custom_call_target_name"] == _TYPED_CALL:
            attributes = results[0].owner.attributes
            attributes["backend_config"] = mlir.ir.DictAttr.get({"opaque": attributes["backend_config"]})
            attributes["api_version"] = mlir.i32_attr(4)
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower_typed, platform="cuda")


def _leave_out_torch(triton_lib: Any) -> None:
    """Let Triton look for PyTorch's types now, and find none unless the program has imported PyTorch.

    It looks for them once, when it first compiles a kernel, and imports PyTorch where it is installed, for seconds. A
    program that imports PyTorch later cannot call Triton's kernels on its tensors by their types; an import in another
    thread at this moment fails.
    """
    from triton._C.libtriton import native_specialize_impl

    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        backend = triton_lib.get_cuda_backend(0, 90)
        argument = SimpleNamespace(data_ptr=lambda: 16, dtype="fp32")
        native_specialize_impl(backend, argument, False, True, True)
    finally:
        del sys.modules["torch"]


def unsupported_target(target: Target, least: tuple[int, int]) -> str | None:
    """Return why Triton kernels cannot be compiled for a target device, or None if they can.

    Args:
        target: the device.
        least: smallest compute capability that the kernel supports.
    """
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}: pip install 'jaxstack[cuda]'"
    capability = target.compute_capability
    if capability is None or capability < least:
        return f"needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or more; the target is {target}"
    return None
