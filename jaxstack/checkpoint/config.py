"""Configuration of checkpoints, and the functions of step numbers that decide when to save and what to delete."""

from collections.abc import Collection, Iterable

from pydantic import ConfigDict, Field

from jaxstack.config.base import Component


class CheckpointConfig(Component):
    """Configuration of checkpoints: when to save them, and how many to keep."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    every_steps: int = Field(default=1000, ge=1)
    """Save at every multiple of this many steps, and at the last one; never at step 0."""

    keep: int = Field(default=3, ge=1)
    """Number of newest checkpoints to keep. An older one is deleted only after a newer one is committed."""

    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this many steps are kept forever."""

    asynchronous: bool = Field(default=True, alias="async")
    """Write in the background. A step waits only for the copy from the devices to host memory."""

    save_on_exit: bool = True
    """Save once more when the run is asked to stop (SIGTERM, Ctrl-C)."""

    timeout_minutes: int = Field(default=120, ge=1, le=10_080)
    """Limit on the duration of a save; one that is not committed by then has failed."""


def should_save(step: int, every_steps: int, last_step: int | None = None) -> bool:
    """Return True if a checkpoint is due after `step` steps: at multiples of `every_steps`, and at the last step.

    Step 0 is never saved: the configuration alone gives that state again.
    """
    return step > 0 and (step % every_steps == 0 or step == last_step)


def steps_to_delete(
    steps: Iterable[int], keep: int, keep_every_steps: int | None = None, protected: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the steps of the checkpoints to delete, oldest first; the arguments after `steps` say which ones to keep.

    Args:
      steps: the committed steps.
      keep: number of newest checkpoints to keep.
      keep_every_steps: multiples of this are kept forever.
      protected: further steps to keep.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    ordered = sorted(set(steps))
    kept = set(ordered[-keep:]) | set(protected)
    if keep_every_steps:
        kept |= {step for step in ordered if step % keep_every_steps == 0}
    return tuple(step for step in ordered if step not in kept)
