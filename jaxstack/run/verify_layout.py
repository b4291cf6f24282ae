"""Check of a parallel layout at the start of a run: one step of a small model in it, compared with one device.

A layout that sums or splits a gradient wrongly trains to a worse model in silence. So a copy of the run's model, narrow
and with few layers, takes a step on random tokens in the run's layout, with its features and precision, and the same
step on one device. Loss and gradients must agree up to rounding.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxstack.config.loader import build_component
from jaxstack.data.config import DataConfig
from jaxstack.distill import DistillConfig
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.heartbeat import doing
from jaxstack.models import ModelConfig
from jaxstack.module_arrays.module import Dict
from jaxstack.optim.optimizers import SGD
from jaxstack.optim.schedules import Constant
from jaxstack.parallel import ParallelConfig
from jaxstack.parameter_paths import path_name
from jaxstack.preference import PreferenceConfig
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.run.build import make_trainer
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer

_WIDTH = 256
"""Largest width of the small model and of its feed-forward sublayers."""
_VOCABULARY = 512
_LENGTH = 128
"""Tokens of a row, or more if the layout needs them."""
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Compute dtype -> largest relative difference of the loss, and of each parameter's gradient by its norm, that counts
as rounding. A gradient without the share of some devices differs by more."""
_FP8_TOLERANCE = 0.3
_SMALLEST_GRADIENT = 1e-3
"""Share of the largest gradient norm of a parameter below which a gradient counts as zero up to rounding."""


def verify_layout(config: RunConfig, say: Callable[[str], None]) -> None:
    """Compare a step of a small copy of a run's model in the run's layout with the step of one device.

    All processes call it. Distillation, preferences and rewards are left out: the loss is that of a language model.

    Args:
      config: configuration of the run, with its degrees and vocabulary filled in.
      say: called with the result.

    Raises:
      ConfigError: there is no small copy that the layout fits.
      JaxstackError: the results differ; the message names the parameter and the mesh axes.
    """
    if config.parallel.workers > 1 and jax.process_count() > 1:
        raise ConfigError(
            "resilience.verify_layout compares one worker's layout, which several processes do not share; with "
            f"parallel.workers ({config.parallel.workers}) set it to false."
        )
    config = config.one_worker
    devices = math.prod(config.parallel.degrees.values())
    if devices == 1:
        return
    with doing("comparing a small model in the run's layout with one device"):
        small = small_copy(config)
        single = _on_one_device(small)
        # Parameters are made once: a layout must not decide on the initial values either.
        reference = make_trainer(single, _batch_of(single), jax.local_devices()[:1])
        many = make_trainer(small, _batch_of(small), jax.devices()[:devices])
        start = jax.tree.map(_whole, reference.stored_state)
        many.stored_state = jax.tree.map(_place, start, many.abstract_stored_state)
        wanted, found = (_loss_and_gradients(trainer) for trainer in (reference, many))
    difference, where = _largest_difference(found, wanted)
    dtype = str(Setting(small, many.rules.mesh).dtype)
    tolerance = _FP8_TOLERANCE if small.precision.fp8 != "none" else _TOLERANCES[dtype]
    split = " x ".join(f"{axis} {degree}" for axis, degree in small.parallel.degrees.items() if degree > 1)
    if not difference <= tolerance:
        raise JaxstackError(
            f"the layout {split} computes another {where} than one device, by {difference:.2g} of its norm (at most "
            f"{tolerance:g} is rounding in {dtype}). The run would train on wrong gradients: leave out one axis or "
            "feature after the other to find which of them it is, and please report it; resilience.verify_layout=false "
            "trains all the same."
        )
    say(
        f"layout {split}: a small copy of the model has the loss and gradients of one device "
        f"(largest relative difference {difference:.1e}, {where})"
    )


def small_copy(config: RunConfig) -> RunConfig:
    """Return a configuration with the same layout, features and kinds of layers, and a model of few parameters.

    Raises:
      ConfigError: there is none that the layout fits.
    """
    problems: list[str] = []
    for layers in range(1, config.model.num_layers + 1):
        model = _small_model(config, layers)
        if model is None or set(model.layers()) != set(config.model.layers()):
            continue
        for factor, length in itertools.product((1, 2, 4, 8), (_LENGTH, 4 * _LENGTH, 16 * _LENGTH)):
            small = _with_small_batch(config.model_copy(update={"model": model}), factor, length)
            problems = small.layout_problems()
            if not problems:
                return small
    reason = f": {problems[0]}" if problems else "."
    raise ConfigError(
        f"resilience.verify_layout found no small copy of the model for this layout; set it to false{reason}"
    )


def _small_model(config: RunConfig, layers: int) -> ModelConfig | None:
    """Return a narrow model with so many layers; None if the model's settings allow none."""
    model = config.model
    unit = config.parallel.tensor * config.parallel.context
    key_heads = _least_divisor(model.kv_heads, unit)
    changes: dict[str, Any] = {
        "preset": None,
        "num_layers": layers,
        "hidden_size": min(model.hidden_size, _WIDTH),
        "head_dim": model.width_per_head,
        "num_kv_heads": key_heads,
        "num_heads": key_heads * (model.num_heads // model.kv_heads),
        "intermediate_size": min(model.feed_forward_size, _WIDTH),
        "vocab_size": min(model.vocab_size or _VOCABULARY, _VOCABULARY),
    }
    if model.parametrization == "mup":
        changes["base_width"] = changes["hidden_size"]
    if model.moe is not None:
        moe = model.moe
        kept = max(2 * moe.num_experts_per_tok, moe.n_group)
        experts = _least_divisor(moe.num_experts, math.lcm(config.parallel.expert, moe.n_group), kept)
        changes["moe"] = {
            **moe.model_dump(),
            "num_experts": experts,
            "moe_intermediate_size": min(model.expert_size, _WIDTH),
        }
    try:
        return build_component(ModelConfig, {**model.model_dump(), **changes})
    except ConfigError:
        return None


def _least_divisor(count: int, unit: int, least: int = 1) -> int:
    """Return the smallest divisor of `count` from `least` on that is a multiple of `unit`; `count` if none is."""
    return next((n for n in range(max(1, least), count + 1) if count % n == 0 and n % unit == 0), count)


def _with_small_batch(config: RunConfig, factor: int, length: int) -> RunConfig:
    """Return the configuration with a batch of few rows, SGD without a schedule, and no other models than the run's."""
    parallel = config.parallel
    accumulation = config.train.gradient_accumulation
    rows = parallel.data * parallel.fsdp * parallel.expert * accumulation * factor
    train = {"steps": 1, "global_batch_size": rows, "sequence_length": length, "batch_ramp": None, "xla_options": {}}
    frozen = tuple(group for group in config.optimizer.groups if group.frozen is not None)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "optimizer": SGD(clip_norm=None, groups=frozen),
            "schedule": Constant(),
            "data": DataConfig(),
            "distill": DistillConfig(),
            "preference": PreferenceConfig(),
            "policy": PolicyConfig(),
            "run": config.run.model_copy(update={"init_from": None}),
        }
    )


def _on_one_device(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"parallel": ParallelConfig()})


def _batch_of(config: RunConfig) -> Callable[[int], Mapping[str, np.ndarray]]:
    """Return a function that makes a batch of random tokens, in two documents a row, whose labels count differently."""
    rows = config.train.global_batch_size
    length = config.train.sequence_length
    random = np.random.default_rng(0)
    tokens = (config.model.vocab_size or _VOCABULARY) * random.random((rows, length + 1)) ** 3
    tokens = tokens.astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[random.random((rows, length)) < np.linspace(0, 0.9, rows)[:, None]] = -100
    documents = np.broadcast_to(np.arange(length) >= length // 3, (rows, length)).astype(np.int32) + 1
    batch = {"tokens": tokens[:, :-1], "labels": labels, "segment_ids": documents}
    return lambda step: batch


def _loss_and_gradients(trainer: Trainer) -> tuple[float, Dict]:
    """Take a step; return its loss, and by path the momentum of SGD after it, which is the gradient."""
    batch = next(trainer.batches(0))[0]
    metrics = trainer.train_step(batch)
    gradients = jax.tree.map(_whole, trainer.stored_state.optimizer)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return trainer.read(metrics)["loss"], {path_name(path): x for path, x in leaves}


def _whole(x: jax.Array) -> np.ndarray:
    """Return an array, of which each process may have a part, as a NumPy array; random keys as their numbers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def _place(x: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        return jax.jit(jax.random.wrap_key_data, out_shardings=wanted.sharding)(x)
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: x[index])


def _largest_difference(found: tuple[float, Dict], wanted: tuple[float, Dict]) -> tuple[float, str]:
    """Return the largest relative difference, and of what it is."""
    loss = abs(found[0] - wanted[0]) / abs(wanted[0])
    norms = {path: float(np.linalg.norm(x)) for path, x in wanted[1].items()}
    least = _SMALLEST_GRADIENT * max(norms.values())
    differences = {
        path: float(np.linalg.norm(found[1][path] - x)) / max(norms[path], least) for path, x in wanted[1].items()
    }
    worst = max(differences, key=lambda path: (not math.isfinite(differences[path]), differences[path]))
    named = f"gradient of {worst}"
    return (loss, "loss") if not loss <= differences[worst] else (differences[worst], named)
