"""XLA compiler options for training steps, each with its reason, and their names in different versions of jaxlib."""

import contextlib
import ctypes
import functools
import importlib.metadata
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax

from jaxstack.errors import ConfigError
from pallas_kernels import PackedWeight
from pallas_kernels.weight_only.api import many_row_options
from pallas_kernels.weight_only.xla import COMPILER_OPTIONS

_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


class Option(NamedTuple):
    """An XLA compiler option, its value, and the reason for this value."""

    name: str
    value: bool | int | str
    reason: str


ALWAYS = (
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "cuBLAS fuses biases and activations into the matmul and needs no autotuning. For FP8: Triton's rewrite would "
        "run before XLA recognizes an FP8 matmul.",
    ),
    Option(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "XLA would merge matmuls of one input with small weights into one, which copies the weights into one array, "
        "splits the results, and concatenates the gradients. For FP8: it would merge them in bfloat16.",
    ),
    Option(
        "xla_gpu_enable_dynamic_slice_fusion",
        False,
        "XLA would write the result of a matmul or of a kernel directly into the stack of activations that a scan of "
        "layers saves. Where the layer uses the result too, XLA computes it twice for that: llama3-1b's attention and "
        "four matmuls of each layer.",
    ),
)
PIPELINE = (
    Option(
        _OVERLAP_LIMIT,
        8,
        "Otherwise permutes between stages wait for collectives of other axes within a stage.",
    ),
)
PEER_COPIES = (
    Option(
        "xla_gpu_collective_permute_mode",
        "COLLECTIVES_PEER_MEMORY",
        "Compiles permutes between the GPUs of one process to copies by the copy engines; NCCL's kernels would take "
        "multiprocessors from matmuls.",
    ),
    Option(
        _OVERLAP_LIMIT,
        8,
        "Otherwise a permute starts only after the previous one has ended and its result was used.",
    ),
)
"""Options of steps whose weights travel by peer-to-peer copies, see `jaxstack.parallel.weight_gather`."""
COPIES_BETWEEN_PROCESSES = (
    PEER_COPIES[0]._replace(
        value="COLLECTIVES_SYMMETRIC_MEMORY",
        reason="Compiles permutes between the GPUs of one host to NCCL's one-sided transfers, which the copy engines "
        "carry out; a process cannot read the memory of another one's GPU by its address.",
    ),
    *PEER_COPIES[1:],
)
"""The same where the GPUs belong to several processes."""
ONE_SIDED_NCCL = (2, 29)
"""The first version of NCCL whose one-sided transfers a host starts."""
HALF_BATCHES = (
    Option(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "XLA would merge the matmuls of both halves with the same weights into one, so that no matmul is left to run "
        "while devices sum their outputs.",
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        0,
        "XLA would combine the all-reduces of both halves into one, for which both halves wait.",
    ),
)
"""Options of inference programs that run a model on two halves of a batch, see `jaxstack.decoding.rows`."""
WITHOUT_GRAPH = (
    Option(
        "xla_gpu_enable_command_buffer",
        "",
        "XLA would record all kernels of the program in a CUDA graph before the first one runs. Where kernels take "
        "longer than their launch, it is faster to launch them one by one while the device computes.",
    ),
)
"""Options of inference programs of many tokens, see `jaxstack.decoding.step`."""
LOOP_IN_GRAPH = (
    Option(
        "xla_gpu_enable_command_buffer",
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
        "The defaults, and loops and branches: one CUDA graph then has the whole loop of decode steps. Otherwise the "
        "host reads the loop's condition and the branch from the device in every step, which waits for it meanwhile.",
    ),
)
"""Options of inference programs of several decode steps whose number is an argument, see `jaxstack.decoding.step`."""
NARROW_ON_CPU = (
    Option(
        "xla_cpu_experimental_ynn_fusion_type",
        "",
        "On CPUs with bfloat16 instructions XLA leaves products to a library that does not support all of them: the "
        "step would fail with `Unsupported element type for DotThunk`.",
    ),
)
"""Options of steps on CPUs that compute in less than 32 bits."""

OptionValue: TypeAlias = bool | int | float | str
Setting: TypeAlias = tuple[str, OptionValue]
"""Name and value of an option."""
_MODES = {True: "COLLECTIVE_PIPELINING_MODE_ON", False: "COLLECTIVE_PIPELINING_MODE_OFF"}
_SPELLINGS = {True: "on", False: "off"}  # as in XLA_FLAGS; YAML reads them as true and false
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
EQUIVALENT: tuple[tuple[Setting, ...], ...] = (
    *(
        (
            (f"xla_gpu_pipeline_{name}", _MODES[on]),
            (f"xla_gpu_pipeline_{name}", _SPELLINGS[on]),
            (f"xla_gpu_pipeline_{name}", on),
            (f"xla_gpu_enable_pipelined_{name}", on),
        )
        for name, on in itertools.product(_COLLECTIVES, (True, False))
    ),
    # An earlier option for CUDA graphs, which gave a level.
    (("xla_gpu_enable_command_buffer", ""), ("xla_gpu_graph_level", 0)),
)
"""Groups of settings that mean the same in different versions of jaxlib; the first that is supported is used."""


def step_options(
    *, pipeline: bool = False, peer_copies: bool = False, several_processes: bool = False
) -> dict[str, OptionValue]:
    """Return jaxstack's XLA options for a GPU training step, as far as the installed jaxlib supports them."""
    return translate_options(
        builtin_step_options(pipeline=pipeline, peer_copies=peer_copies, several_processes=several_processes)
    )[0]


def low_precision_cpu_options() -> dict[str, OptionValue]:
    """Return the supported XLA options for CPU training steps that compute in fewer than 32 bits."""
    return {option.name: option.value for option in NARROW_ON_CPU if is_supported(option.name, option.value)}


def packed_weight_options() -> dict[str, OptionValue]:
    """Return the supported XLA options for GPU programs that multiply with compressed (packed) weights.

    Triton's matmuls, which training switches off, read the weights as they are stored.
    """
    return translate_options(COMPILER_OPTIONS)[0]


def packed_many_row_options(
    weights: Sequence[PackedWeight], dtype: jax.typing.DTypeLike, *, partitioned: bool
) -> dict[str, OptionValue]:
    """Return the supported XLA options that such programs have too if their products have many rows.

    Args:
      weights, dtype, partitioned: as in `pallas_kernels.weight_only.api.many_row_options`.
    """
    return translate_options(many_row_options(weights, dtype, partitioned=partitioned))[0]


def without_graph_options() -> dict[str, OptionValue]:
    """Return the supported XLA options for GPU programs that launch their kernels one by one, without a CUDA graph."""
    return translate_options({option.name: option.value for option in WITHOUT_GRAPH})[0]


def loop_in_graph_options() -> dict[str, OptionValue]:
    """Return the supported XLA options for GPU programs whose loops and branches belong into a CUDA graph."""
    return {option.name: option.value for option in LOOP_IN_GRAPH if is_supported(option.name, option.value)}


def half_batch_options() -> dict[str, OptionValue]:
    """Return the supported XLA options for GPU programs that run a model on two halves of a batch at a time."""
    return translate_options({option.name: option.value for option in HALF_BATCHES})[0]


def supports_peer_copies() -> bool:
    """Return True if the installed jaxlib can compile collective permutes to copies between a process's GPUs."""
    return all(is_supported(option.name, option.value) for option in PEER_COPIES)


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that is loaded or installed, such as (2, 29, 7); () if there is none."""
    with contextlib.suppress(OSError, AttributeError):
        found = ctypes.c_int()
        # Loading one here would decide which of several installed ones XLA gets.
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(found))
        return found.value // 10_000, found.value // 100 % 100, found.value % 100
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(package))[:3])
    return ()


def builtin_step_options(
    *, pipeline: bool = False, peer_copies: bool = False, several_processes: bool = False
) -> dict[str, OptionValue]:
    """Return jaxstack's XLA options for a GPU training step, supported by the installed jaxlib or not.

    Args:
      pipeline: the step is a pipeline's.
      peer_copies: weights travel by peer-to-peer copies.
      several_processes: the devices are of several processes of one host.
    """
    chosen = (*ALWAYS, *(PIPELINE if pipeline else ()), *(_peer_copies(several_processes) if peer_copies else ()))
    return {option.name: option.value for option in chosen}


def _peer_copies(several_processes: bool) -> tuple[Option, ...]:
    # With an older NCCL its kernels send what `parallel.copy_engines: always` asks for.
    return COPIES_BETWEEN_PROCESSES if several_processes and nccl_version() >= ONE_SIDED_NCCL else PEER_COPIES


def overlap_options(step: Mapping[str, OptionValue], collectives: int) -> dict[str, OptionValue]:
    """Return the XLA option that lets further collectives be in flight during a whole GPU step.

    By default XLA's scheduler keeps one in flight: each would start when the previous one has ended, and the step's own
    collectives would wait.

    Args:
      step: XLA options of the step.
      collectives: number of further collectives.
    """
    return {_OVERLAP_LIMIT: int(step.get(_OVERLAP_LIMIT, 1)) + collectives}


def translate_options(wanted: Mapping[str, OptionValue]) -> tuple[dict[str, OptionValue], list[str]]:
    """Translate XLA options to their names in the installed jaxlib, and leave out those that it lacks.

    An unknown compiler option fails the compilation; in `XLA_FLAGS` it aborts the process.

    Args:
      wanted: name -> value.

    Returns:
      The options, name -> value, and a sentence for each that was translated or left out.

    Raises:
      ConfigError: a known option cannot have its value.
    """
    chosen = {}
    notes = []
    for name, value in wanted.items():
        if is_supported(name, value):
            chosen[name] = value
            continue
        same = next((row for row in EQUIVALENT if any(_equal(setting, (name, value)) for setting in row)), ())
        found = next((setting for setting in same if is_supported(*setting)), None)
        if found is not None:
            chosen[found[0]] = found[1]
            notes.append(f"XLA's option {name}={value} is {found[0]}={found[1]} in {_version()}")
        elif has_option(name):
            raise ConfigError(f"train.xla_options: {name}={value!r}: {_refusal(name, value)}")
        else:
            notes.append(f"XLA's option {name}={value} is left out: {_version()} has no option of this name")
    return chosen, notes


def is_supported(name: str, value: OptionValue) -> bool:
    """Return True if the installed jaxlib accepts this XLA option with this value."""
    return _refusal(name, value) is None


def has_option(name: str) -> bool:
    """Return True if the installed jaxlib has an XLA option of this name."""
    return "No such compile option" not in (_refusal(name, "") or "")


@functools.lru_cache(maxsize=None, typed=True)  # distinguishes True from 1
def _refusal(name: str, value: OptionValue) -> str | None:
    """Return XLA's error for a compiler option, found by compiling a one-line program; None if it is accepted."""
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options={name: value})
    except Exception as error:
        if name not in str(error):
            raise
        return str(error).removeprefix("INVALID_ARGUMENT: ")
    return None


def _equal(one: Setting, other: Setting) -> bool:
    return one[0] == other[0] and type(one[1]) is type(other[1]) and one[1] == other[1]


def _version() -> str:
    return "jaxlib " + importlib.metadata.version("jaxlib")
