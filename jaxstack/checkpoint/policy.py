"""Decides when to save and which checkpoints to delete: plain functions of step numbers."""

from collections.abc import Collection, Iterable


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
