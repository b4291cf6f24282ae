"""Starts a run from a checkpoint of another run, by hard-linking or copying its files into the new run's directory."""

import os
import shutil
from pathlib import Path

from jaxstack.checkpoint import directory, manifest
from jaxstack.errors import ConfigError, JaxstackError, cannot_write


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
