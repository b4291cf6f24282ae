"""XLA's options of a compiled train step on a GPU: data, each row with what it is for."""

import functools
from typing import Any, NamedTuple

import jax


class Option(NamedTuple):
    """One option of XLA and why it is set."""

    name: str
    value: bool | int
    reason: str


ALWAYS = (
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "cuBLAS takes biases and activations into the matmul, and nothing is "
        "tuned. For FP8: Triton's rewrite comes before XLA recognises an FP8 matmul.",
    ),
    Option(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "Small weights with one input would be merged into one matmul: for that they are copied side by side, the "
        "results apart, and the gradients together again. For FP8: it would be of their bfloat16 values.",
    ),
)
PIPELINE = (
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        8,
        "Else permutes between stages wait for collectives of other axes that run within a stage.",
    ),
)


def step_options(*, pipeline: bool = False) -> dict[str, bool | int]:
    """Name -> value of the options that the installed jaxlib knows."""
    wanted = (*ALWAYS, *(PIPELINE if pipeline else ()))
    return {option.name: option.value for option in wanted if is_known(option.name, option.value)}


@functools.cache
def is_known(name: str, value: Any) -> bool:
    """Whether the installed jaxlib takes this option; it is asked by compiling a program of one addition."""
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options={name: value})
    except Exception as error:
        if name not in str(error):
            raise
        return False
    return True
