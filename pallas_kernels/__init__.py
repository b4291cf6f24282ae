"""Attention, loss, FP8 and grouped products, and pointwise operations for JAX on NVIDIA GPUs, for any JAX or Flax code.

Every operation is a plain function with an ordered table of backends (see `pallas_kernels.dispatch`). The package
imports jax and nothing of jaxstack; a name is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.attention.api import flash_attention as flash_attention
    from pallas_kernels.attention.context import context_attention as context_attention
    from pallas_kernels.attention.context import ring_attention as ring_attention
    from pallas_kernels.attention.context_layout import sequence_order as sequence_order
    from pallas_kernels.attention.remat import save_attention as save_attention
    from pallas_kernels.attention.sparse import block_sparse_attention as block_sparse_attention
    from pallas_kernels.attention.sparse import longformer_attention as longformer_attention
    from pallas_kernels.attention.ulysses import with_whole_sequences as with_whole_sequences
    from pallas_kernels.collective_matmul.api import all_gather_matmul as all_gather_matmul
    from pallas_kernels.collective_matmul.api import matmul_reduce_scatter as matmul_reduce_scatter
    from pallas_kernels.cross_entropy.api import linear_cross_entropy as linear_cross_entropy
    from pallas_kernels.cross_entropy.api import linear_cross_entropy_sum as linear_cross_entropy_sum
    from pallas_kernels.dispatch import Choice as Choice
    from pallas_kernels.dispatch import NotSupported as NotSupported
    from pallas_kernels.dispatch import record_choices as record_choices
    from pallas_kernels.fp8.api import NormalisedInput as NormalisedInput
    from pallas_kernels.fp8.api import QuantizedWeight as QuantizedWeight
    from pallas_kernels.fp8.api import fp8_dot_general as fp8_dot_general
    from pallas_kernels.fp8.api import fp8_multiply as fp8_multiply
    from pallas_kernels.fp8.api import fp8_swiglu_mlp as fp8_swiglu_mlp
    from pallas_kernels.fp8.state import empty_fp8_state as empty_fp8_state
    from pallas_kernels.fp8.state import updated_fp8_state as updated_fp8_state
    from pallas_kernels.fused_mlp.api import activated_matmul as activated_matmul
    from pallas_kernels.grouped_gemm.api import grouped_matmul as grouped_matmul
    from pallas_kernels.grouped_gemm.api import grouped_matmul_alignment as grouped_matmul_alignment
    from pallas_kernels.linear_time_attention.api import linear_attention as linear_attention
    from pallas_kernels.linear_time_attention.api import performer_attention as performer_attention
    from pallas_kernels.linear_time_attention.favor import random_projection as random_projection
    from pallas_kernels.linear_time_attention.state import LinearState as LinearState
    from pallas_kernels.linear_time_attention.state import empty_linear_state as empty_linear_state
    from pallas_kernels.normalization.api import layer_norm as layer_norm
    from pallas_kernels.normalization.api import rms_norm as rms_norm
    from pallas_kernels.pointwise.gated import swiglu as swiglu
    from pallas_kernels.pointwise.rotary import apply_rotary as apply_rotary
    from pallas_kernels.target import Target as Target
    from pallas_kernels.target import current_target as current_target
    from pallas_kernels.target import lowering_platform as lowering_platform

_MODULES = {
    "Choice": "dispatch",
    "LinearState": "linear_time_attention.state",
    "NormalisedInput": "fp8.api",
    "NotSupported": "dispatch",
    "QuantizedWeight": "fp8.api",
    "Target": "target",
    "activated_matmul": "fused_mlp.api",
    "all_gather_matmul": "collective_matmul.api",
    "apply_rotary": "pointwise.rotary",
    "block_sparse_attention": "attention.sparse",
    "context_attention": "attention.context",
    "current_target": "target",
    "empty_fp8_state": "fp8.state",
    "empty_linear_state": "linear_time_attention.state",
    "flash_attention": "attention.api",
    "fp8_dot_general": "fp8.api",
    "fp8_multiply": "fp8.api",
    "fp8_swiglu_mlp": "fp8.api",
    "grouped_matmul": "grouped_gemm.api",
    "grouped_matmul_alignment": "grouped_gemm.api",
    "linear_attention": "linear_time_attention.api",
    "linear_cross_entropy": "cross_entropy.api",
    "linear_cross_entropy_sum": "cross_entropy.api",
    "longformer_attention": "attention.sparse",
    "lowering_platform": "target",
    "matmul_reduce_scatter": "collective_matmul.api",
    "performer_attention": "linear_time_attention.api",
    "random_projection": "linear_time_attention.favor",
    "record_choices": "dispatch",
    "ring_attention": "attention.context",
    "layer_norm": "normalization.api",
    "rms_norm": "normalization.api",
    "save_attention": "attention.remat",
    "sequence_order": "attention.context_layout",
    "swiglu": "pointwise.gated",
    "updated_fp8_state": "fp8.state",
    "with_whole_sequences": "attention.ulysses",
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
