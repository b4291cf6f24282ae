"""When to save and which checkpoints to delete: plain functions of step numbers."""

from collections.abc import Collection, Iterable


def should_save(step: int, every_steps: int, last_step: int | None = None) -> bool:
    """Whether `step` (steps done so far) is to be saved: multiples of `every_steps`, and the last step.

    Step 0 is never saved: it holds nothing that the configuration does not give again.
    """
    return step > 0 and (step % every_steps == 0 or step == last_step)


def steps_to_delete(
    steps: Iterable[int], keep: int, keep_every_steps: int | None = None, protected: Collection[int] = ()
) -> tuple[int, ...]:
    """The steps to delete, oldest first, out of the committed `steps`.

    Kept are the newest `keep`, the multiples of `keep_every_steps`, and those in `protected`.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    ordered = sorted(set(steps))
    kept = set(ordered[-keep:]) | set(protected)
    if keep_every_steps:
        kept |= {step for step in ordered if step % keep_every_steps == 0}
    return tuple(step for step in ordered if step not in kept)
