"""Begin a run from another run's checkpoint, with its whole train state: the configuration key `run.branch_from`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxstack.checkpoint import directory, manifest
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.config.loader import load_yaml
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.run_config import RunConfig, config_from_tree


def link_checkpoint(source: Path, step: int | None, target: Path, steps: int | None = None) -> int:
    """Copy a checkpoint to another run's checkpoint directory, by hard links where possible.

    Files are hard links where the file system has them, so that they take no space and outlive the source's; copies
    elsewhere.

    Args:
      source: directory of checkpoints to take it from.
      step: step of the checkpoint; None: the newest one.
      target: directory of checkpoints to put it into, made if missing.
      steps: `train.steps` of the other run, which has to go on beyond the checkpoint; None: any.

    Returns:
      The step of the checkpoint.

    Raises:
      ConfigError: the source has no such checkpoint, nothing would be left to train, or the target cannot be written.
      JaxstackError: the checkpoint is damaged or was deleted meanwhile, or the disk is full.
    """
    found = {entry.step: entry for entry in directory.scan(source) if entry.kind == "committed"}
    if not found:
        raise ConfigError(f"there is no checkpoint in {source} to branch from.")
    chosen = max(found) if step is None else step
    if chosen not in found:
        kept = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"run.branch_step ({chosen}) is not a checkpoint in {source}; kept there: {kept}. "
            "checkpoint.keep_every_steps keeps more of them."
        )
    if steps is not None and chosen >= steps:
        raise ConfigError(
            f"the checkpoint in {source} is of step {chosen}, and this run ends at train.steps ({steps}): raise "
            "train.steps, or lower run.branch_step."
        )
    entry = found[chosen]
    staging = target / f".saving-{chosen}-branch"
    try:
        manifest.check(entry.path, chosen, hashes=False)
        target.mkdir(parents=True, exist_ok=True)
        directory.remove_tree(staging)
        shutil.copytree(entry.path, staging, copy_function=_link)
        directory.put_in_place(staging, target / str(chosen))
    except manifest.Damaged as damage:
        raise JaxstackError(f"checkpoint {chosen} in {source} is damaged: {damage}") from None
    except shutil.Error as error:
        raise JaxstackError(f"checkpoint {chosen} in {source} cannot be copied: {error.args[0][0][-1]}") from None
    except OSError as error:
        raise cannot_write(target, error) from None
    return chosen


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


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
