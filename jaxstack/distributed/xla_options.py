"""XLA's options of a compiled train step: data, each row with what it is for, and those that have another name now."""

import functools
import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxstack.errors import ConfigError


class Option(NamedTuple):
    """One option of XLA and why it is set."""

    name: str
    value: bool | int | str
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
PEER_COPIES = (
    Option(
        "xla_gpu_collective_permute_mode",
        "COLLECTIVES_PEER_MEMORY",
        "Permutes between GPUs of one process are copies by the copy engines; NCCL's kernels would take "
        "multiprocessors from matmuls.",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        8,
        "Else a permute would begin only when the one before it has ended and was used.",
    ),
)
"""Options of steps whose weights travel by peer-to-peer copies, see `jaxstack.parallel.transfers`."""
NARROW_ON_CPU = (
    Option(
        "xla_cpu_experimental_ynn_fusion_type",
        "",
        "On CPUs with instructions for bfloat16 XLA leaves its products to a library, but for some, which then nothing "
        "computes: the step would end with `Unsupported element type for DotThunk`.",
    ),
)
"""Of steps that compute in less than 32 bits."""

Setting = tuple[str, bool | int | float | str]
_MODES = {True: "COLLECTIVE_PIPELINING_MODE_ON", False: "COLLECTIVE_PIPELINING_MODE_OFF"}
_SPELLINGS = {True: "on", False: "off"}  # of the mode in XLA_FLAGS; YAML reads them as true and false
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
ALIKE: tuple[tuple[Setting, ...], ...] = (
    *(
        (
            (f"xla_gpu_pipeline_{name}", _MODES[on]),
            (f"xla_gpu_pipeline_{name}", _SPELLINGS[on]),
            (f"xla_gpu_pipeline_{name}", on),
            (f"xla_gpu_enable_pipelined_{name}", on),
        )
        for name, on in itertools.product(_COLLECTIVES, (True, False))
    ),
    # Once a level of how much goes into CUDA graphs.
    (("xla_gpu_enable_command_buffer", ""), ("xla_gpu_graph_level", 0)),
)
"""Settings that mean the same in different versions of jaxlib; the first that is known is taken."""


def step_options(*, pipeline: bool = False, peer_copies: bool = False) -> dict[str, Any]:
    """Name -> value of our options that the installed jaxlib knows."""
    return installed_options(own_options(pipeline=pipeline, peer_copies=peer_copies))[0]


def narrow_cpu_options() -> dict[str, Any]:
    """Name -> value of our options of a step on CPUs in less than 32 bits that the installed jaxlib knows."""
    return {option.name: option.value for option in NARROW_ON_CPU if is_known(option.name, option.value)}


def supports_peer_copies() -> bool:
    """Return True if the installed jaxlib can compile permutes to peer-to-peer copies."""
    return all(is_known(option.name, option.value) for option in PEER_COPIES)


def own_options(*, pipeline: bool = False, peer_copies: bool = False) -> dict[str, Any]:
    """Name -> value of our options of a step for GPUs."""
    chosen = (*ALWAYS, *(PIPELINE if pipeline else ()), *(PEER_COPIES if peer_copies else ()))
    return {option.name: option.value for option in chosen}


def installed_options(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options as the installed jaxlib takes them, and a sentence for each that is translated or left out.

    An unknown option would end the compilation, in the variable XLA_FLAGS the process.

    Raises:
      ConfigError: a known option cannot have its value.
    """
    chosen, said = {}, []
    for name, value in wanted.items():
        if is_known(name, value):
            chosen[name] = value
            continue
        same = next((row for row in ALIKE if any(_equal(setting, (name, value)) for setting in row)), ())
        found = next((setting for setting in same if is_known(*setting)), None)
        if found is not None:
            chosen[found[0]] = found[1]
            said.append(f"XLA's option {name}={value} is {found[0]}={found[1]} in {_version()}")
        elif has_option(name):
            raise ConfigError(f"train.xla_options: {name}={value!r}: {_refusal(name, value)}")
        else:
            said.append(f"XLA's option {name}={value} is left out: {_version()} has none of this name")
    return chosen, said


def is_known(name: str, value: Any) -> bool:
    """Whether the installed jaxlib takes this option with this value."""
    return _refusal(name, value) is None


def has_option(name: str) -> bool:
    """Whether the installed jaxlib has an option of this name."""
    return "No such compile option" not in (_refusal(name, "") or "")


@functools.lru_cache(maxsize=None, typed=True)  # True is not 1 here
def _refusal(name: str, value: Any) -> str | None:
    """What XLA says against it, if anything; it is asked by compiling a program of one addition."""
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options={name: value})
    except Exception as error:
        if name not in str(error):
            raise
        return str(error).removeprefix("INVALID_ARGUMENT: ")
    return None


def _equal(one: Setting, other: Sequence[Any]) -> bool:
    return one[0] == other[0] and type(one[1]) is type(other[1]) and one[1] == other[1]


def _version() -> str:
    return "jaxlib " + importlib.metadata.version("jaxlib")
