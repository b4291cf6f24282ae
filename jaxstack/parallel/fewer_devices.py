"""Layout of a run that goes on with fewer devices: fewer replicas, more microbatches, the same global batch."""

import math

from jaxstack.config.sections import TrainConfig
from jaxstack.errors import ConfigError
from jaxstack.parallel.config import ParallelConfig
from jaxstack.parallel.pipeline.plan import fitting_microbatches, plan_pipeline


def fit_fewer_devices(parallel: ParallelConfig, train: TrainConfig, devices: int) -> tuple[ParallelConfig, TrainConfig]:
    """Return the layout and batch of a run on `devices` devices, fewer than its layout is for.

    `fsdp` keeps the largest degree that it can, and `data` takes the rest; the other axes stay. The global batch is the
    same, and no microbatch of a device is larger than before.

    Args:
      parallel: the layout on all devices, with its degrees filled in.
      train: batch sizes on all devices.
      devices: number of devices that are left.

    Raises:
      ConfigError: the devices cannot be divided in this way, or do not divide the global batch.
    """
    before = parallel.data * parallel.fsdp
    fixed = math.prod(parallel.degrees.values()) // before * parallel.workers
    replicas = devices // fixed
    others = f"axes other than data and fsdp take {fixed} devices"
    if devices % fixed:
        raise ConfigError(
            f"the run cannot go on with {devices} devices, because its {others}; give a multiple of them."
        )
    fsdp = max(degree for degree in range(1, parallel.fsdp + 1) if replicas % degree == 0)
    data = replicas // fsdp
    rows = train.global_batch_size // (parallel.workers * parallel.expert)
    if rows % replicas:
        raise ConfigError(
            f"the run cannot go on with data x fsdp = {data} x {fsdp}, which must divide the {rows} sequences of "
            f"train.global_batch_size ({train.global_batch_size}); use a number of devices that does."
        )
    fewer = parallel.model_copy(update={"data": data, "fsdp": fsdp, "zero": parallel.zero if data > 1 else 0})
    evaluated = train.eval_batch_size or train.global_batch_size // train.gradient_accumulation
    sizes = {"eval_batch_size": evaluated // before * replicas}
    if parallel.pipeline > 1:
        plan = plan_pipeline(parallel, train.global_batch_size, train.gradient_accumulation)
        fits = fitting_microbatches(fewer, train.global_batch_size)
        pieces = _first_fitting(fits, plan.microbatches * before / replicas)
        fewer = fewer.model_copy(update={"microbatches": pieces})
        sizes["gradient_accumulation"] = 1
    else:
        fits = [count for count in range(1, rows // replicas + 1) if rows // replicas % count == 0]
        sizes["gradient_accumulation"] = _first_fitting(fits, train.gradient_accumulation * before / replicas)
    return fewer, train.model_copy(update=sizes)


def _first_fitting(fits: list[int], least: float) -> int:
    """Return the smallest number of microbatches of at least `least`, or else the largest that there is."""
    return next((count for count in fits if count >= least), fits[-1])


def describe_change(before: tuple[ParallelConfig, TrainConfig], after: tuple[ParallelConfig, TrainConfig]) -> str:
    """Return in words what differs between two layouts, such as `data 4 -> 2, train.gradient_accumulation 1 -> 2`."""
    values = []
    for parallel, train in (before, after):
        values.append(
            {
                **parallel.degrees,
                "parallel.microbatches": parallel.microbatches,
                "train.gradient_accumulation": train.gradient_accumulation,
            }
        )
    old, new = values
    return ", ".join(f"{name} {value} -> {new[name]}" for name, value in old.items() if new[name] != value)
