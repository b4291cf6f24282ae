"""Shape and type checks of function signatures during the tests.

`install` makes Python's import system check the jaxtyping annotations of the modules in `CHECKED` at every call, by
beartype. Users never pay for this: outside of the tests annotations are only read by people and by type checkers.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

CHECKED = (
    "jaxstack.models.activations",
    "jaxstack.models.attention",
    "jaxstack.models.mixers",
    "jaxstack.models.dropout",
    "jaxstack.models.mlp",
    "jaxstack.models.moe",
    "jaxstack.models.moe_layer",
    "jaxstack.models.norm",
    "jaxstack.models.block",
    "jaxstack.models.rope",
    "pallas_kernels.attention.api",
    "pallas_kernels.attention.context",
    "pallas_kernels.attention.patterns",
    "pallas_kernels.attention.reference",
    "pallas_kernels.attention.sparse",
    "pallas_kernels.attention.ulysses",
    "pallas_kernels.cross_entropy.api",
    "pallas_kernels.cross_entropy.reference",
    "pallas_kernels.delta_rule.api",
    "pallas_kernels.delta_rule.recurrent",
    "pallas_kernels.delta_rule.request",
    "pallas_kernels.delta_rule.xla",
    "pallas_kernels.fp8.api",
    "pallas_kernels.fp8.state",
    "pallas_kernels.fused_mlp.api",
    "pallas_kernels.grouped_gemm.api",
    "pallas_kernels.grouped_gemm.reference",
    "pallas_kernels.kv_cache_update.api",
    "pallas_kernels.linear_time_attention.api",
    "pallas_kernels.linear_time_attention.favor",
    "pallas_kernels.linear_time_attention.features",
    "pallas_kernels.linear_time_attention.reference",
    "pallas_kernels.linear_time_attention.state",
    "pallas_kernels.normalization.api",
    "pallas_kernels.low_bits.bipolar",
    "pallas_kernels.low_bits.block_float",
    "pallas_kernels.low_bits.codecs",
    "pallas_kernels.low_bits.mixed_blocks",
    "pallas_kernels.page_copies.api",
    "pallas_kernels.paged_attention.api",
    "pallas_kernels.pointwise",
    "pallas_kernels.ssd.api",
    "pallas_kernels.ssd.recurrent",
    "pallas_kernels.ssd.request",
    "pallas_kernels.ssd.xla",
    "pallas_kernels.weight_only.api",
)
"""Modules, or packages with all of their modules, whose annotations are checked.

Of `jaxstack.models` these are the parts of a layer; `transformer` and `embedding` accept numpy arrays of tokens too,
and `linear` casts quantized kernels to arrays where no kernel reads them.

`pallas_kernels.collective_matmul.api` and `host_table.api` explain wrong shapes and dtypes themselves, and their tests
give them such.
Modules with kernels that Triton or Mosaic compiles from their source are left out: a decorated function is not that
source any more.
"""


def install() -> None:
    """Check the modules in `CHECKED`. Must be called before any of them is imported."""
    from jaxtyping import install_import_hook

    install_import_hook(CHECKED, "tests.shapes.check_types")


def check_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function with beartype; an int is accepted for a float, as in PEP 484."""
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Switch the checks off, to see what a function itself says about wrong arguments."""
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
