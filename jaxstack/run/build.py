"""Build the parts of a language-model run from its configuration: model, trainer, and its step for one node fewer."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxstack.compress.during_training import compress_in_training
from jaxstack.data.batch_source import BatchSource as OwnSource
from jaxstack.data.device_batches import BatchShardings
from jaxstack.data.loader import Data
from jaxstack.distill import distillation_loss
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError
from jaxstack.local_sgd.folder import FolderDiLoCo
from jaxstack.loss import LossFunction, language_model_loss
from jaxstack.models import (
    ModelConfig,
    Transformer,
    in_fp8,
)
from jaxstack.module_arrays.packed_base import PackedBase
from jaxstack.module_arrays.views import with_views
from jaxstack.optim.base import GroupRule, Optimizer
from jaxstack.parallel import make_mesh
from jaxstack.preference import preference_loss
from jaxstack.reinforce.policy import policy_loss
from jaxstack.run.build_model import build_model
from jaxstack.run.companions import companions
from jaxstack.run.setting import Setting, after_loss
from jaxstack.run_config import RunConfig
from jaxstack.step import StepSettings
from jaxstack.stored.packed_base import PackedModel
from jaxstack.trainer import StepWrapper, Trainer
from jaxstack.worker_steps import FolderWorker, Workers

Batch = Mapping[str, np.ndarray]
BatchSource: TypeAlias = Data | OwnSource | Callable[[int], Batch] | Iterable[Batch]
_VOCABULARY_MULTIPLE = 64
_LEAST_PRIORITY = 19
"""Nice value of the thread of `CompileAhead`."""
T = TypeVar("T", bound=Trainer)


def resolve_model(model: ModelConfig, tokenizer_size: int) -> ModelConfig:
    """Return the model configuration, with an unset vocabulary size taken from the tokenizer.

    Args:
      model: without `vocab_size` it gets the tokenizer's size, rounded up to a multiple of 64.
      tokenizer_size: number of ids of the tokenizer.

    Raises:
      ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    padded = -(-tokenizer_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if model.vocab_size is None:
        return model.model_copy(update={"vocab_size": padded})
    if model.vocab_size < tokenizer_size:
        faster = f", or {padded}, a multiple of {_VOCABULARY_MULTIPLE}, which runs faster" * (padded > tokenizer_size)
        raise ConfigError(
            f"model.vocab_size ({model.vocab_size}) must be at least the tokenizer's {tokenizer_size} ids; "
            f"nearest: {tokenizer_size}{faster}."
        )
    return model


def _optimizer(config: RunConfig) -> Optimizer:
    """Return the optimizer of a run, which leaves out the layers for multi-token prediction if nothing trains them."""
    groups = config.optimizer.groups
    answers = config.preference.loss is not None or config.policy.loss is not None
    untrained = not config.train.mtp_loss_weight or answers
    if config.model.num_nextn_predict_layers and untrained:
        groups = (GroupRule(path="^mtp/", frozen=True), *groups)
    # A configuration's clipping holds even where it is the default: an optimizer in Python has it only if given.
    return config.optimizer.model_copy(update={"clip_norm": config.optimizer.clip_norm, "groups": groups})


def make_trainer(
    config: RunConfig,
    data: BatchSource,
    devices: Sequence[Any] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    kind: type[T] = Trainer,
    base: PackedModel | None = None,
) -> T:
    """Build the trainer of a run from its configuration, whose layout and vocabulary size must be resolved.

    Args:
      data: batches, in any form that `Trainer` takes.
      devices: devices to build the mesh of; default: all.
      mesh: mesh to use instead. With an `AbstractMesh` the trainer can be described, but cannot run.
      kind: class of the trainer.
      base: model whose weights stay packed beside the adapters; `run.train` loads them.
    """
    if config.precision.kv_cache != "none" and config.parallel.pipeline > 1:
        raise ConfigError(
            f"precision.kv_cache ({config.precision.kv_cache}) does not support a pipeline; set parallel.pipeline=1 "
            f"({config.parallel.pipeline})."
        )
    setting = Setting(config, mesh or make_mesh(config.parallel, devices))
    dtype = setting.dtype

    def student(rngs: nnx.Rngs) -> Transformer:
        model = in_fp8(build_model(config, dtype)(rngs), config.precision)
        if config.preference.loss is not None and config.preference.method.has_head:
            model.add_reward_head()
        return model

    make: Callable[[nnx.Rngs], Transformer] = student
    terms = {"z_loss": config.train.z_loss, "mtp_weight": config.train.mtp_loss_weight}
    loss: LossFunction = functools.partial(language_model_loss, **terms)
    for companion in companions(config):
        make = companion.attached_to(make, config.model, dtype)
    if config.distill.teacher is not None:
        loss = functools.partial(distillation_loss, **terms, settings=config.distill)
    if config.preference.loss is not None:
        loss = functools.partial(preference_loss, settings=config.preference)
    if config.policy.loss is not None:
        rollout = config.rollout
        loss = functools.partial(
            policy_loss,
            settings=config.policy,
            temperature=rollout.temperature,
            length=rollout.max_tokens,
            exact=rollout.engine.exact,
        )
    optimizer: Optimizer | StepWrapper = _optimizer(config)
    if isinstance(config.local_sgd, FolderDiLoCo):
        optimizer = FolderWorker(config.local_sgd, optimizer)
    elif config.parallel.workers > 1:
        optimizer = Workers(config.local_sgd, optimizer)
    views = () if base is None else (PackedBase(base.weights),)
    return kind(
        with_views(compress_in_training(make, config.compression.rules), views),
        loss,
        data,
        optimizer=optimizer,
        schedule=config.schedule,
        mesh=setting.mesh,
        layout=setting.layout,
        train=setting.train,
        seed=config.run.seed,
    )


class CompileAhead:
    """Compiles a run's train step for one node fewer in a thread of low priority, so that a later start need not.

    The program is compiled for the devices of the first nodes of the present start: its key in JAX's compilation cache
    is that of a start with only these nodes, because it has the same devices' indices, options and HLO.

    Args:
      asked: configuration of the run as given, whose layout is for all nodes; its vocabulary must be set.
      data: batches of the run.
      say: reports a message.
    """

    def __init__(self, asked: RunConfig, data: OwnSource, say: Callable[[str], None]):
        self._asked = asked
        self._data = data
        self._say = say
        self._thread: threading.Thread | None = None

    def start(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Begin to compile for global batches of these shapes, if the run may go on with fewer nodes.

        The first process writes the cache. On GPUs all compile, as XLA divides the timing of kernels between them.
        """
        try:
            found = after_loss(self._asked)
        except ConfigError as error:
            return self._say(f"nothing is compiled for a lost node: {error}")
        if found is None:
            return
        if jax.process_index() and jax.local_devices()[0].platform == "cpu":
            return
        self._thread = threading.Thread(target=self._compile, args=(*found, batch), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the process end without what is still compiled."""
        if self._thread is not None and self._thread.is_alive():
            coordination.abandon_thread()

    def _compile(
        self, config: RunConfig, devices: Sequence[Any], change: str, batch: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        began = time.monotonic()
        try:
            trainer = make_trainer(config, self._data, devices, base=config.packed_base())
            trainer.set_step(StepSettings(config.resilience.spike_threshold, config.observe.noise_scale))
            rows = config.train.global_batch_size
            shardings = BatchShardings(trainer.rules, rows)
            shapes = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings.of(name, x.ndim))
                for name, x in batch.items()
            }
            trainer.program.compile(trainer.program.lower(shapes))
        except Exception as error:  # the run does not depend on it
            return self._say(f"warning: the step for a lost node could not be compiled: {error}")
        self._say(f"compiled the step for a lost node ({change}) in {time.monotonic() - began:.1f} s")
