"""Describes how a configuration is laid out on a mesh, without its devices: memory, FLOPs, shardings, schedule."""

import math
from typing import Any, NotRequired, TypedDict

from jax.sharding import AbstractMesh, AxisType

from jaxstack.models import count_parameters, model_flops_per_token
from jaxstack.parallel import AXES
from jaxstack.plan.rehearsal import Rehearsal
from jaxstack.plan.resolve import resolve_plan
from jaxstack.run.build import make_trainer
from jaxstack.run_config import RunConfig


class LayoutPlan(TypedDict):
    """Description of a run's parameters, FLOPs, shardings and pipeline on a cluster, as plain JSON.

    Attributes:
      name: name of the run.
      devices: number of devices.
      parameters_total: number of parameters.
      vocabulary_assumed: True if the vocabulary is that of a tokenizer that the run would train first.
      tokens_per_step: tokens of a global batch.
      model_flops_per_step: model FLOPs of a step, over all devices.
      model_flops_per_step_and_device: model FLOPs of a step on each device.
      sharding: mesh, parameters and bytes per device; see `jaxstack.module_arrays.shardings.describe_shardings`.
      pipeline: schedule of the pipeline, if there is one.
      rehearsal: memory of the compiled step, if it was compiled.
      roofline: operators of the step, if they were drawn; see `jaxstack.cost_model.roofline.describe_roofline`.
    """

    name: str
    devices: int
    parameters_total: int
    vocabulary_assumed: bool
    tokens_per_step: int
    model_flops_per_step: float
    model_flops_per_step_and_device: float
    sharding: dict[str, Any]
    pipeline: NotRequired[dict[str, Any]]
    rehearsal: NotRequired[Rehearsal]
    roofline: NotRequired[dict[str, Any]]


def describe_plan(config: RunConfig, devices: int | None = None) -> LayoutPlan:
    """Describe how a run is laid out on `devices` devices: parameters, FLOPs, shardings and pipeline.

    Args:
      config: configuration of the run.
      devices: number of devices; default: `parallel.simulate_devices`, or the product of the degrees.

    Raises:
      ConfigError: the degrees, the model or the batch do not fit, or the number of devices is not known.
    """
    config, assumed = resolve_plan(config, devices)
    degrees = config.parallel.degrees
    mesh = AbstractMesh(tuple(degrees.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    trainer = make_trainer(config, lambda step: {}, mesh=mesh)
    count = count_parameters(config.model)
    train = config.train
    tokens = train.global_batch_size * train.sequence_length
    flops = model_flops_per_token(config.model, train.sequence_length) * tokens
    plan: LayoutPlan = {
        "name": config.run.name,
        "devices": math.prod(degrees.values()),
        "parameters_total": count.total,
        "vocabulary_assumed": assumed,
        "tokens_per_step": tokens,
        "model_flops_per_step": flops,
        "model_flops_per_step_and_device": flops / math.prod(degrees.values()),
        "sharding": trainer.describe_sharding(),
    }
    if trainer.pipeline is not None:
        plan["pipeline"] = trainer.describe_pipeline()
    return plan
