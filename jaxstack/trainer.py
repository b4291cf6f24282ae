"""Trains any Flax module with any loss: the trainer that users make, whose `fit` runs the training loop."""

from pathlib import Path
from typing import Any

from jaxstack.data.batch_source import numpy_batches as numpy_batches
from jaxstack.loop import Loop, LoopSettings
from jaxstack.step import StepSettings
from jaxstack.training import StepWrapper as StepWrapper
from jaxstack.training import Training


class Trainer(Training):
    """Trains a Flax module on a device mesh, given data, loss, optimizer and parallel layout.

    Args:
      module: a `flax.nnx.Module`; or a function `rngs -> nnx.Module` (created sharded, for large models), such as
        `jaxstack.module_arrays.linen.from_linen` makes of a `flax.linen.Module`; or a `ModuleArrays`, such as
        `jaxstack.compress.during_training.compress_in_training` makes.
      loss_fn: `loss_fn(module, batch)`, which may also have parameters `key` and `train`; returns the mean over the
        batch or a `LossSum`, or a pair of either and a dict of further values for the metrics. See `jaxstack.loss`.
      data: batches as dicts of arrays whose first dim is the global batch: an iterable, a function of the step, or an
        object with `batches(...)` such as `jaxstack.data.loader.open_data` returns.
      optimizer: an optax transformation, which is used as it is; or one of `jaxstack.optim`, without clipping unless
        its `clip_norm` is given; or a `StepWrapper` of either, such as `jaxstack.worker_steps.Workers`, which averages
        over groups of devices now and then; default: AdamW with gradients clipped to a global norm of 1.
      schedule: of the learning rate, for an optimizer of `jaxstack.optim`; default: a constant rate, or a cosine decay
        to 0 for the default optimizer.
      mesh: any mesh whose axes are some of `pipeline, data, fsdp, expert, context, tensor`; default: all devices on
        `data`.
      layout: the other choices of parallelism, such as the ZeRO stage and rules for logical axes; default:
        `StepLayout()`. A pipeline is for `jaxstack.models.Transformer` only, and is 1F1B by default if the mesh has
        stages.
      train: number of steps, batch size, accumulation.
      eval_data: held-out batches, an iterable of dicts; default: those of `data`, if it has any.
      seed: of the initial weights and of the loss function's keys.

    Raises:
      TypeError: the module, the loss or the data is of a kind that cannot be used.
    """

    def fit(self, run_dir: str | Path | None = None, settings: LoopSettings | None = None) -> dict[str, Any]:
        """Train until step `train.steps`, resuming from the newest checkpoint in `run_dir`.

        Args:
          run_dir: directory of checkpoints, metrics and the report; None: nothing is written.
          settings: how often to save, log and evaluate, and what to report.

        Returns:
          The last logged values, with `eval_loss` if there is held-out data.

        Raises:
          JaxstackError: the run cannot go on, or was stopped by a signal after saving (`exit_code` 143 or 130).
        """
        if not isinstance(settings, LoopSettings | None):
            raise TypeError(f"settings must be jaxstack.loop.LoopSettings; found {settings!r}.")
        settings = settings or LoopSettings()
        self.set_step(StepSettings(settings.resilience.spike_threshold, settings.observe.noise_scale))
        return Loop(self, run_dir, settings).run()
