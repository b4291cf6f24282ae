"""Configuration of a run's parallelism: the degree of each mesh axis, with the checks that need no device."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.features import Excludes, Feature, Remark
from jaxstack.errors import ConfigError

_PREFERENCE = ("data", "fsdp", "tensor", "context", "expert", "pipeline")
"""Axes in the order in which they are changed, among changes of the same size."""
_MAX_TRIES = 1000


def nearest_degrees(
    wanted: Mapping[str, int], devices: int, fits: Callable[[dict[str, int]], bool] = lambda _: True
) -> str | None:
    """Return as text the parallel degrees nearest to `wanted` whose product is `devices` and that satisfy `fits`.

    Args:
      wanted: axis -> degree; -1 accepts any degree.
      devices: number of devices that the degrees must multiply to.
      fits: returns True if degrees, axis -> degree, can be used.

    Returns:
      The degrees above 1 as text, such as `data=2, tensor=4`; None if none of the nearest thousand fits.
    """
    axes = [axis for axis in _PREFERENCE if axis in wanted]
    candidates = [dict(zip(axes, degrees, strict=True)) for degrees in factorizations(devices, len(axes))]
    candidates.sort(key=lambda degrees: _distance(wanted, degrees, axes))
    chosen = next(filter(fits, itertools.islice(candidates, _MAX_TRIES)), None)
    if chosen is None:
        return None
    return ", ".join(f"{axis}={chosen[axis]}" for axis in wanted if chosen[axis] > 1) or "all degrees 1"


def _distance(wanted: Mapping[str, int], degrees: Mapping[str, int], axes: Sequence[str]) -> tuple[float, ...]:
    """Return a sort key for degrees: the distance from `wanted`, then the number of changed axes, then their indices.

    The distance sums, over changed axes, the logarithm of the ratio, plus one for an axis that is added or removed.
    `data` and `fsdp` count a quarter, because other numbers of devices usually mean other numbers of replicas.
    """
    total = 0.0
    changed = []
    for index, axis in enumerate(axes):
        if wanted[axis] in (-1, degrees[axis]):
            continue
        weight = 0.25 if axis in ("data", "fsdp") else 1.0
        added_or_removed = (wanted[axis] > 1) != (degrees[axis] > 1)
        total += weight * (added_or_removed + abs(math.log(degrees[axis] / wanted[axis])))
        changed.append(index)
    return round(total, 6), len(changed), *changed


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `parts` positive integers whose product is `number`."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        yield from ((first, *others) for others in factorizations(number // first, parts - 1))


@functools.cache
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, slowest first: neighbours on `tensor` are the devices with the fastest links."""
MIXTURE = ("model.moe={num_experts: 4, num_experts_per_tok: 2}",)
"""Overrides that turn on a small mixture of experts."""
WORKERS = "workers"
"""Mesh axis of a run with workers, before all others; other runs' meshes do not have it."""


class ParallelConfig(Component):
    """Degrees of parallelism, whose product is the number of devices; one may be -1 (all remaining devices).

    `parallel: auto` in place of the section lets the planner choose them.
    """

    auto: bool = False
    """The planner chooses degrees, ZeRO stage, pipeline and microbatches, and `model.remat`, when the run starts;
    written `parallel: auto`, or `auto: true` next to settings other than degrees."""
    data: int = 1
    """Replicas that each see their own part of the batch."""
    fsdp: int = 1
    """ZeRO-3: parameters, gradients and optimizer state sharded; each layer's weights gathered when used."""
    tensor: int = 1
    """Megatron's tensor parallelism: heads, feed-forward and vocabulary split."""
    context: int = 1
    """Devices that one sequence is split over, in every layer; attention passes keys and values between them."""
    context_method: Literal["auto", "ring", "all_gather", "all_to_all"] = "auto"
    """Method by which attention exchanges keys and values between devices; auto: by the shape of each layer."""
    pipeline: int = 1
    """Stages, each with its own layers; the batch goes through in microbatches."""
    expert: int = 1
    """The batch, and the experts of each layer (`model.moe`); tokens travel to their experts by all-to-all."""
    sequence: bool = False
    """Megatron's sequence parallelism: between the matmuls, activations are split along the sequence on `tensor`."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """Overlap of communication and matmuls with `sequence`. auto: if measured faster; always: by XLA's collectives if
    the kernels do not fit, also between processes of a host; never. In generation and serving with `tensor`: never
    leaves small all-reduces to XLA, auto lets a kernel of jaxstack compute those that it can."""
    prefetch: bool = False
    """True gathers the next layer's weights, and scatters the last one's gradients, while a scanned layer computes;
    needs `fsdp` or `context`, and `model.scan_layers`. Two layers' weights and gradients are in memory; a step of
    llama3-8b on two H200s took 3 % less time."""
    copy_engines: Literal["auto", "always", "never"] = "auto"
    """Peer-to-peer copies of weights and gradients between the GPUs of one host by their copy engines, which leave
    the multiprocessors to matmuls, in place of NCCL's kernels. auto: if measured no slower, which is with unrolled
    layers over `data`, `fsdp` and `context` alone; always: by permutes, whatever the layers, axes and devices."""
    zero: Literal[0, 1, 2] = 0
    """ZeRO over the data axis: 1 shards optimizer state and float32 weights, 2 the gradients too. (ZeRO-3 is fsdp.)"""
    workers: int = Field(default=1, ge=1)
    """Groups of devices joined by slow links. Each trains its own copy of the model, and the section `local_sgd` says
    how the copies are kept together; all other degrees are those of one worker."""
    microbatches: int | None = Field(default=None, ge=1)
    """Pieces that a pipeline cuts each replica's batch into; left out: train.gradient_accumulation, or up to twice the
    stages."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None = None
    """Order of work of the stages; left out: 1f1b, or interleaved with several virtual stages."""
    pipeline_virtual_stages: int | None = Field(default=None, ge=1)
    """Pieces of the model on each device (interleaved); left out: 2 with the interleaved schedule, otherwise 1."""
    simulate_devices: int | None = Field(default=None, ge=1, le=1024)
    """Run on this many simulated CPU devices."""

    @model_validator(mode="after")
    def _check(self) -> "ParallelConfig":
        degrees = self.degrees
        bad = {a: d for a, d in degrees.items() if d != -1 and d < 1}
        if bad:
            raise ValueError(f"a degree must be at least 1, or -1 for the rest of the devices; found {_show(bad)}.")
        free = [a for a, d in degrees.items() if d == -1]
        if len(free) > 1:
            raise ValueError(f"only one degree may be -1; found {' and '.join(free)}.")
        if self.zero and self.data == 1:
            raise ValueError(
                f"zero: {self.zero} shards over the data axis, but data is 1; set data to 2 or more (or -1), use fsdp, "
                "which is ZeRO-3 over its own axis, or set zero to 0."
            )
        if self.context == 1 and self.context_method != "auto":
            raise ValueError(
                f"context_method ({self.context_method}) needs a sequence that is split, but context is 1; set context "
                "to 2 or more, or leave context_method out."
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence: true splits activations over the tensor axis, but tensor is 1; "
                "set tensor to 2 or more, or sequence to false."
            )
        chosen = {a: d for a, d in degrees.items() if d != 1}
        if self.auto and chosen:
            raise ValueError(f"auto: true chooses the degrees, but {_show(chosen)} is given; remove one of the two.")
        self._check_pipeline()
        return self

    def _check_pipeline(self) -> None:
        if self.pipeline == 1:
            names = ("microbatches", "pipeline_schedule", "pipeline_virtual_stages")
            given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
            if given:
                raise ValueError(f"{_show(given)} needs pipeline of 2 or more; set it, or leave this out.")
        chunks = self.pipeline_virtual_stages
        if self.pipeline_schedule == "interleaved" and chunks == 1:
            raise ValueError("pipeline_schedule=interleaved needs pipeline_virtual_stages of 2 or more; or use 1f1b.")
        if self.pipeline_schedule not in (None, "interleaved") and (chunks or 1) > 1:
            raise ValueError(
                f"pipeline_virtual_stages={chunks} needs pipeline_schedule=interleaved; found {self.pipeline_schedule}."
            )

    @property
    def schedule(self) -> str:
        """The pipeline schedule in use: `pipeline_schedule`, or its default if that is not set."""
        several = (self.pipeline_virtual_stages or 1) > 1
        return self.pipeline_schedule or ("interleaved" if several else "1f1b")

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages per device: `pipeline_virtual_stages`, or its default if that is not set."""
        return self.pipeline_virtual_stages or (2 if self.schedule == "interleaved" else 1)

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each mesh axis as configured, in mesh order; -1 means all remaining devices."""
        return {axis: getattr(self, axis) for axis in AXES}

    def resolve(self, devices: int) -> "ParallelConfig":
        """Return a copy with a degree of -1 filled in, so that the degrees multiply to the number of devices.

        With several workers, groups of devices that train a copy of the model each, it is the number of devices of one.

        Raises:
          ConfigError: they cannot; the message names the nearest degrees that can.
        """
        if devices % self.workers:
            lower, upper = _nearest_divisors(devices, self.workers)
            raise ConfigError(
                f"parallel.workers ({self.workers}) must divide the number of devices ({devices}); nearest: "
                f"{lower}{f' or {upper}' if upper != lower else ''}."
            )
        devices = devices // self.workers
        degrees = self.degrees
        fixed = math.prod(d for d in degrees.values() if d != -1)
        free = [a for a, d in degrees.items() if d == -1]
        if free and devices % fixed == 0:
            return self.model_copy(update={free[0]: devices // fixed})
        if not free and fixed == devices:
            return self
        shown = _show({a: d for a, d in degrees.items() if d != 1}) or "all degrees 1"
        if free:
            lower, upper = _nearest_divisors(devices, fixed)
            raise ConfigError(
                f"parallel: the degrees other than {free[0]} ({shown}) multiply to {fixed}, which must divide the "
                f"number of devices ({devices}); nearest: {lower}{f' or {upper}' if upper != lower else ''}."
            )
        raise ConfigError(
            f"parallel: {shown} multiply to {fixed}, but must multiply to the number of devices ({devices}); "
            f"nearest: {nearest_degrees(degrees, devices)}, or parallel.simulate_devices={fixed} to try it on "
            "simulated CPU devices."
        )


def _show(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _nearest_divisors(number: int, near: int) -> tuple[int, int]:
    """Return the divisors of `number` nearest to `near`: (the next one at or below it, the next one at or above it).

    The second is `number` if that is below `near`.
    """
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return max(d for d in divisors if d <= near), min((d for d in divisors if d >= near), default=divisors[-1])


_PREFETCH = (
    "parallel.prefetch needs model.scan_layers=true ({model.scan_layers}), a model.remat without offload "
    "({model.remat}) and parallel.pipeline=1 ({parallel.pipeline}); or remove it: unrolled layers are gathered ahead "
    "without it."
)

FEATURES = (
    Feature("data parallelism", "parallel", lambda parallel: parallel.data > 1, ("parallel.data=2",)),
    Feature("ZeRO-1", "parallel", lambda parallel: parallel.zero == 1, ("parallel.data=2", "parallel.zero=1")),
    Feature(
        "ZeRO-2",
        "parallel",
        lambda parallel: parallel.zero == 2,
        ("parallel.data=2", "parallel.zero=2"),
    ),
    Feature("FSDP", "parallel", lambda parallel: parallel.fsdp > 1, ("parallel.fsdp=2",)),
    Feature("tensor parallelism", "parallel", lambda parallel: parallel.tensor > 1, ("parallel.tensor=2",)),
    Feature(
        "sequence parallelism",
        "parallel",
        lambda parallel: parallel.sequence,
        ("parallel.tensor=2", "parallel.sequence=true"),
        remarks=tuple(
            Remark(other, "XLA's collectives take the place of the kernels that communicate while they multiply")
            for other in ("pipeline", "FP8 (current)", "FP8 (delayed)", "FP8 (blockwise)")
        ),
    ),
    Feature("context parallelism", "parallel", lambda parallel: parallel.context > 1, ("parallel.context=2",)),
    Feature("expert parallelism", "parallel", lambda parallel: parallel.expert > 1, (*MIXTURE, "parallel.expert=2")),
    Feature(
        "pipeline",
        "parallel",
        lambda parallel: parallel.pipeline > 1,
        ("parallel.pipeline=2",),
        remarks=(
            Remark("FSDP", "the weights of a layer are gathered in each microbatch and direction, by NCCL's kernels"),
            Remark("unrolled layers", "stages are unrolled where they are even and not interleaved", slower=False),
            Remark(
                "gradient accumulation", "the microbatches of the pipeline are those of the accumulation", slower=False
            ),
        ),
    ),
    Feature(
        "prefetch",
        "parallel",
        lambda parallel: parallel.prefetch,
        ("parallel.fsdp=2", "parallel.prefetch=true"),
        excludes=(
            Excludes("pipeline", "the loop of a stage over its layers does not gather ahead", _PREFETCH),
            Excludes("unrolled layers", "XLA gathers the weights of unrolled layers ahead by itself", _PREFETCH),
            Excludes("offloading", "the loop that gathers ahead does not move activations to the host", _PREFETCH),
        ),
    ),
    Feature(
        "copy engines",
        "parallel",
        lambda parallel: parallel.copy_engines == "always",
        ("parallel.fsdp=2", "parallel.copy_engines=always"),
        excludes=(
            Excludes(
                "pipeline",
                "the step of a pipeline transfers weights and gradients by collectives only",
                "parallel.copy_engines=always does not support a pipeline: it needs parallel.pipeline=1 "
                "({parallel.pipeline}); or remove it.",
            ),
        ),
        remarks=(
            Remark(
                "bfloat16 reduction",
                "gradients are sent in the dtype in which they were computed and summed in float32, so that it saves "
                "nothing",
                slower=False,
            ),
        ),
    ),
)
"""Features of a parallel layout, see `jaxstack.config.features`."""
