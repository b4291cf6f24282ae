"""Rules of parallel layouts: which degrees a model and a batch allow, and the nearest ones that they do.

They need no device. Configuration, planner and commands all use them. A model is seen through the protocol `ModelDims`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxstack.config.sections import TrainConfig
from jaxstack.errors import ConfigError
from jaxstack.parallel.config import ParallelConfig, nearest_degrees
from jaxstack.parallel.pipeline.plan import StageLayout, plan_pipeline


class MixerLimits(Protocol):
    """Limits that a token mixer sets to context parallelism; see `jaxstack.models.layer`."""

    @property
    def title(self) -> str: ...
    @property
    def described(self) -> str: ...
    @property
    def own_heads(self) -> int | None: ...
    def length_problem(self, chunk: int) -> str | None: ...
    def context_parallel_problem(self, method: str | None) -> str | None: ...
    def exchanges_heads(self, method: str | None) -> bool: ...


class ExpertDims(Protocol):
    """Numbers of a mixture of experts that limit its layouts."""

    @property
    def num_experts(self) -> int: ...


class ModelDims(Protocol):
    """Dimensions of a model that limit its layouts; `jaxstack.models.ModelConfig` has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def feed_forward_size(self) -> int: ...
    @property
    def expert_size(self) -> int: ...
    @property
    def layer_pattern(self) -> tuple[int, int]: ...
    @property
    def moe(self) -> ExpertDims | None: ...
    @property
    def dense_layers(self) -> int: ...
    def mixers(self) -> Sequence[MixerLimits]: ...


def layout_problems(model: ModelDims, parallel: ParallelConfig, train: TrainConfig) -> list[str]:
    """Return a message for each validity rule that a layout breaks, with the nearest valid values.

    Args:
      model: the dimensions that the degrees must divide.
      parallel: its degrees must all be given, without -1.
      train: batch size, sequence length and microbatches.
    """
    problems = [
        *_tensor_problems(model, parallel),
        *_expert_problems(model, parallel),
        *_batch_problems(parallel, train),
        *_sequence_problems(model, parallel, train),
    ]
    return problems or (_pipeline_problems(model, parallel, train) if parallel.pipeline > 1 else [])


def serving_problems(model: ModelDims, parallel: ParallelConfig) -> list[str]:
    """Return a message for each validity rule that a server's layout breaks, in which axes are joined to `tensor`.

    Args:
      model: the dimensions that the degrees must divide.
      parallel: as the user gives it, see `serving_degrees`.
    """
    joined = serving_degrees(parallel)
    problems = _tensor_problems(model, joined)
    if parallel.expert == 1:
        problems += _expert_problems(model, joined)
    elif model.moe is not None and model.moe.num_experts % joined.tensor:
        problems.append(
            f"model.moe.num_experts ({model.moe.num_experts}) must be divisible by their number; numbers that fit: "
            f"{_show(_divisors(model.moe.num_experts))}."
        )
    prefix = f"a server splits layers over all {joined.tensor} devices of parallel.tensor, fsdp and expert: "
    return [prefix + problem for problem in problems]


def serving_degrees(parallel: ParallelConfig) -> ParallelConfig:
    """Return the degrees of a server, whose devices of `fsdp` and `expert` split all layers as those of `tensor` do.

    Every step needs all weights, so that gathering them would take longer than the step; and its few tokens are on all
    devices. What `expert` above 1 changes is that experts stay whole.
    """
    devices = parallel.tensor * parallel.fsdp * parallel.expert
    return parallel.model_copy(update={"tensor": devices, "fsdp": 1, "expert": 1})


def suggest_layout(
    parallel: ParallelConfig, problems: Callable[[ParallelConfig], Sequence[str]], devices: int | None = None
) -> str | None:
    """Return a sentence that suggests the valid layout nearest to `parallel`; None if there is none.

    Args:
      parallel: a layout that is not valid.
      problems: returns the messages of the rules that a layout breaks.
      devices: number of devices to lay out over; default: the product of the degrees.
    """
    devices = devices or math.prod(parallel.degrees.values())

    def fits(degrees: dict[str, int]) -> bool:
        try:
            return not problems(ParallelConfig.model_validate(parallel.model_dump() | degrees))
        except ValueError:
            return False

    found = nearest_degrees(parallel.degrees, devices, fits)
    return f"On {devices} devices this model and batch fit with parallel {found}." if found else None


def near_multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` just below and above `number` as text, such as `6 or 9`."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _tensor_problems(model: ModelDims, parallel: ParallelConfig) -> list[str]:
    """Return messages on what the degree `tensor` does not divide: attention heads, feed-forward width."""
    problems = []
    tensor = parallel.tensor
    mixers = model.mixers()
    problems += [
        f"model.{mixer.title}.num_heads ({mixer.own_heads}) must be divisible by parallel.tensor ({tensor}); tensor "
        f"degrees that fit: {_show(_divisors(mixer.own_heads))}."
        for mixer in mixers
        if mixer.own_heads is not None and mixer.own_heads % tensor
    ]
    if all(mixer.own_heads is not None for mixer in mixers):
        pass  # no layer has the model's heads
    elif model.num_heads % tensor:
        problems.append(
            f"model.num_heads ({model.num_heads}) must be divisible by parallel.tensor ({tensor}); "
            f"tensor degrees that fit: {_show(_divisors(model.num_heads))}."
        )
    elif model.kv_heads % tensor and tensor % model.kv_heads:
        fits = [d for d in _divisors(model.num_heads) if model.kv_heads % d == 0 or d % model.kv_heads == 0]
        problems.append(
            f"model.num_kv_heads ({model.kv_heads}) must be divisible by parallel.tensor ({tensor}), or divide it; "
            f"tensor degrees that fit: {_show(fits)}."
        )
    if model.feed_forward_size % tensor and model.dense_layers:
        problems.append(
            f"model.intermediate_size ({model.feed_forward_size}) must be divisible by parallel.tensor ({tensor}); "
            f"nearest: {near_multiples(model.feed_forward_size, tensor)}."
        )
    return problems


def _expert_problems(model: ModelDims, parallel: ParallelConfig) -> list[str]:
    """Return why a layout does not fit a mixture of experts, e.g. degrees that do not divide the experts."""
    moe = model.moe
    expert = parallel.expert
    tensor = parallel.tensor
    if moe is None:
        reason = f"parallel.expert ({expert}) splits the experts of model.moe, but this model has none"
        return [f"{reason}; use data or fsdp."] if expert > 1 else []
    problems = []
    if moe.num_experts % expert:
        problems.append(
            f"model.moe.num_experts ({moe.num_experts}) must be divisible by parallel.expert ({expert}); expert "
            f"degrees that fit: {_show(_divisors(moe.num_experts))}."
        )
    if model.expert_size % tensor:
        problems.append(
            f"model.moe.moe_intermediate_size ({model.expert_size}) must be divisible by parallel.tensor ({tensor}); "
            f"nearest: {near_multiples(model.expert_size, tensor)}."
        )
    return problems


def _batch_problems(parallel: ParallelConfig, train: TrainConfig) -> list[str]:
    """Return a message for each batch size that data parallelism and gradient accumulation do not divide."""
    problems = []
    shards = parallel.workers * parallel.data * parallel.fsdp * parallel.expert
    unit = shards * train.gradient_accumulation
    used = ["workers"] * (parallel.workers > 1) + ["data", "fsdp"] + ["expert"] * (parallel.expert > 1)
    axes = " x ".join(used)
    degrees = " x ".join(str(getattr(parallel, axis)) for axis in used)
    if train.global_batch_size % unit:
        problems.append(
            f"train.global_batch_size ({train.global_batch_size}) must be divisible by {axes} x "
            f"gradient_accumulation ({degrees} x {train.gradient_accumulation} = {unit}); "
            f"nearest: {near_multiples(train.global_batch_size, unit)}."
        )
    evaluated = train.eval_batch_size
    if evaluated is not None and evaluated % shards:
        problems.append(
            f"train.eval_batch_size ({evaluated}) must be divisible by {axes} ({shards}); "
            f"nearest: {near_multiples(evaluated, shards)}."
        )
    return problems


def _sequence_problems(model: ModelDims, parallel: ParallelConfig, train: TrainConfig) -> list[str]:
    """Return why the sequence length does not fit context or sequence parallelism, which must divide it."""
    length = train.sequence_length
    problems = _context_problems(model, parallel, train) if parallel.context > 1 else []
    unit = parallel.context * parallel.tensor
    if parallel.sequence and length % unit:
        context = f" x parallel.context ({parallel.context})" if parallel.context > 1 else ""
        problems.append(
            f"train.sequence_length ({length}) must be divisible by parallel.tensor ({parallel.tensor}){context} with "
            f"parallel.sequence; nearest: {near_multiples(length, unit)}."
        )
    return problems


def _context_problems(model: ModelDims, parallel: ParallelConfig, train: TrainConfig) -> list[str]:
    """Return why a model's attention cannot compute sequences that are split over the devices of `context`."""
    length = train.sequence_length
    problems = []
    context = parallel.context
    unit = 2 * context
    method = None if parallel.context_method == "auto" else parallel.context_method
    if length % unit:
        problems.append(
            f"sequence_length {length} must be divisible by 2 x context parallel degree ({context}), because each "
            f"device holds an early and a late chunk; nearest: {near_multiples(length, unit)}."
        )
    for mixer in model.mixers():
        if length % unit == 0 and (reason := mixer.length_problem(length // unit)):
            problems.append(f"{reason} (train.sequence_length {length} / (2 x parallel.context {context})).")
        if reason := mixer.context_parallel_problem(method):
            problems.append(reason)
            continue
        name = "model.num_heads" if mixer.own_heads is None else f"model.{mixer.title}.num_heads"
        heads = mixer.own_heads or model.num_heads
        own = heads // parallel.tensor
        # `_tensor_problems` reports heads that parallel.tensor does not divide.
        if heads % parallel.tensor == 0 and mixer.exchanges_heads(method) and own % context:
            tensor = f" / parallel.tensor ({parallel.tensor})" if parallel.tensor > 1 else ""
            problems.append(
                f"{name} ({heads}){tensor} must be divisible by parallel.context ({context}), because "
                f"{mixer.described} with context_method {parallel.context_method} exchanges heads; context degrees "
                f"that fit: {_show(_divisors(own))}."
            )
    return problems


def _pipeline_problems(model: ModelDims, parallel: ParallelConfig, train: TrainConfig) -> list[str]:
    """Return why a pipeline is not possible: microbatches or a number of layers that do not suit it."""
    try:
        plan = plan_pipeline(parallel, train.global_batch_size, train.gradient_accumulation)
        lead, period = model.layer_pattern
        StageLayout((model.num_layers - lead) // period, plan.stages, plan.chunks)
    except ConfigError as error:
        return [str(error)]
    return []


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _show(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
