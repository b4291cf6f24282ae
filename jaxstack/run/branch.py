"""Begin a run from another run's checkpoint, with its whole train state: the configuration key `run.branch_from`."""

from collections.abc import Callable
from pathlib import Path

from jaxstack.checkpoint.branch import link_checkpoint
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.config.loader import load_yaml
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.run_config import RunConfig, config_from_tree

_SAME_RATE = 0.01
"""Relative difference of two learning rates below which they count as equal."""


def branch(config: RunConfig, report: Callable[[str], None]) -> None:
    """Link the checkpoint that `run.branch_from` names as the first one of a new run; do nothing if the key is not set.

    Every process of the run calls it; the first one does the work.

    Args:
      config: the run's configuration.
      report: called with a line that names the checkpoint, and with one if the learning rate jumps there.

    Raises:
      ConfigError: there is no such checkpoint, or it is not before the run's last step.
      JaxstackError: it is damaged, or cannot be copied.
    """
    if config.run.branch_from is None:
        return
    failure: JaxstackError | None = None
    if coordination.is_first():
        try:
            _branch(config, Path(config.run.branch_from), report)
        except JaxstackError as error:
            failure = error
    if not coordination.all_true(failure is None):
        raise failure or ConfigError("the first process cannot branch from run.branch_from; it says why.")


def _branch(config: RunConfig, source: Path, report: Callable[[str], None]) -> None:
    target = config.directory / "checkpoints"
    if CheckpointManager(target).all_steps():
        return  # the run has begun: it goes on from its own checkpoints
    step = link_checkpoint(source / "checkpoints", config.run.branch_step, target, config.train.steps)
    report(f"branching from {source}, step {step}")
    before = config_from_tree(load_yaml(source / "config.yaml"), str(source / "config.yaml"))
    old = learning_rate_at(before, step)
    new = learning_rate_at(config, step)
    if abs(new - old) > _SAME_RATE * old:
        report(
            f"warning: the learning rate jumps at step {step}, from {old:.3g} to {new:.3g}: a decay that begins there "
            f"has schedule.decay_steps = train.steps - {step}"
        )


def learning_rate_at(config: RunConfig, step: int) -> float:
    """Return the learning rate that a run's configuration schedules for a step, counted from 0."""
    multiplier = config.schedule.make_multiplier(config.train.steps)
    return config.optimizer.learning_rate * float(multiplier(step))
