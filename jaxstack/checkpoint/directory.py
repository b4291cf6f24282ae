"""Manages the checkpoint directory on disk, where every entry appears and disappears in one rename.

    1000/               a committed checkpoint (see manifest.py)
    .saving-2000-1/     half written; becomes 2000/ in one rename
    .replaced-1000/     the former 1000/, while a new save of the same step takes its place
    .deleting-500/      being deleted
    .lock               locked by the process that saves here

Anything else was put there by somebody else: it is named in a warning, never loaded and never deleted.

Functions of step numbers decide when a checkpoint is due, and which ones are deleted.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from jaxstack.checkpoint.manifest import INDEX, MANIFEST, Damaged, check
from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import FileLock, LockHeld, lock_holder, sync_directory

Kind = Literal["committed", "half-written", "deleting", "foreign"]
_STEP = re.compile(r"0|[1-9][0-9]{0,8}")  # the range of an int32, the type of a state's step
_REPLACED = re.compile(r"\.replaced-(0|[1-9][0-9]{0,8})")


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the checkpoint directory, with its kind: committed, unfinished, being deleted, or not a checkpoint.

    `step` is set if it is committed; `reason` says why it is not a checkpoint.
    """

    path: Path
    kind: Kind
    step: int = -1
    reason: str = ""


def scan(directory: Path) -> list[Entry]:
    """List the entries of a checkpoint directory: committed checkpoints first, newest first; none if it is missing.

    Raises:
      JaxstackError: `directory` is a file or cannot be read.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise JaxstackError(f"{directory} is a file: checkpoints need a directory of that name") from error
    except OSError as error:
        raise JaxstackError(f"the checkpoints in {directory} cannot be listed: {error.strerror or error}") from error
    entries = [_classify(directory / name) for name in names if name != ".lock"]
    steps = {entry.step for entry in entries if entry.kind == "committed"}
    for position, entry in enumerate(entries):
        match = _REPLACED.fullmatch(entry.path.name)
        if match and int(match[1]) not in steps:
            entries[position] = Entry(entry.path, "committed", int(match[1]))
    return sorted(entries, key=lambda entry: (-entry.step, entry.path.name))


def _classify(path: Path) -> Entry:
    name = path.name
    if name.startswith(".saving-"):
        return Entry(path, "half-written")
    if name.startswith((".deleting-", ".replaced-")):
        return Entry(path, "deleting")
    if not _STEP.fullmatch(name):
        return Entry(path, "foreign", reason="its name is not a step")
    if path.is_symlink():
        return Entry(path, "foreign", reason="a symbolic link")
    if not path.is_dir():
        return Entry(path, "foreign", reason="not a directory")
    try:
        names = os.listdir(path)
    except OSError as error:
        return Entry(path, "foreign", reason=f"it cannot be read: {error.strerror or error}")
    if MANIFEST not in names and INDEX not in names:
        return Entry(path, "foreign", reason=f"no commit marker ({MANIFEST}) in it")
    return Entry(path, "committed", int(name))


def put_in_place(staging: Path, final: Path) -> Path | None:
    """Rename the finished folder `staging` to the checkpoint `final`, replacing an earlier save of the same step.

    Anything else at `final` is moved aside, and its new path is returned.
    """
    moved = None
    if os.path.lexists(final):
        if _classify(final).kind == "committed":
            replaced = final.with_name(f".replaced-{final.name}")
            remove_tree(replaced)
            os.rename(final, replaced)
        else:
            moved = final.with_name(f"{final.name}.moved-aside-{time.time_ns()}")
            os.rename(final, moved)
    os.rename(staging, final)
    sync_directory(final.parent)
    shutil.rmtree(final.with_name(f".replaced-{final.name}"), ignore_errors=True)
    return moved


def delete(path: Path) -> None:
    """Delete a checkpoint, after renaming it so that it is never seen half deleted."""
    doomed = path.with_name(f".deleting-{path.name.lstrip('.').removeprefix('deleting-')}")
    if doomed != path:
        remove_tree(doomed)
        os.rename(path, doomed)
    remove_tree(doomed)


def remove_tree(path: Path) -> None:
    """Remove a folder or file as far as possible, with retries, as a failed writer may still be adding files."""
    for attempt in range(5):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
        if not os.path.lexists(path):
            return
        time.sleep(0.1 * 2**attempt)


def clear_unfinished(directory: Path) -> None:
    """Remove what interrupted saves and deletions have left. Only the process that holds the lock may call it."""
    for entry in scan(directory):
        if entry.kind in ("half-written", "deleting"):
            remove_tree(entry.path)


def saving_process(directory: Path) -> str | None:
    """Return which process saves in a checkpoint directory now (`process 17 on host a`); None if there is none."""
    return lock_holder(directory / ".lock")


def lock_directory(directory: Path) -> FileLock:
    """Lock a checkpoint directory against saves by other runs; the operating system unlocks it when this process ends.

    File systems without locks are accepted, without protection.

    Raises:
      JaxstackError: another process saves there.
    """
    lock = FileLock(directory / ".lock", per_process=True)
    try:
        lock.acquire()
    except LockHeld as holder:
        lock.release()
        raise JaxstackError(
            f"another process saves checkpoints in {directory} ({holder}): "
            "wait for it, stop it, or give this run another name"
        ) from holder
    except OSError:
        pass
    return lock


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
    found = {entry.step: entry for entry in scan(source) if entry.kind == "committed"}
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
    try:
        check(entry.path, chosen, hashes=False)
        link_files(entry.path, target / str(chosen), target / f".saving-{chosen}-branch")
    except Damaged as damage:
        raise JaxstackError(f"checkpoint {chosen} in {source} is damaged: {damage}") from None
    except shutil.Error as error:
        raise JaxstackError(f"checkpoint {chosen} in {source} cannot be copied: {error.args[0][0][-1]}") from None
    except OSError as error:
        raise cannot_write(target, error) from None
    return chosen


def link_files(source: Path, target: Path, staging: Path) -> None:
    """Copy a directory, by hard links where the file system has them.

    Args:
      source: the directory.
      target: its copy, which appears when it is complete.
      staging: directory in the same file system in which the copy is made; what it holds is deleted.

    Raises:
      OSError: the directory cannot be read, or the copy cannot be written.
    """
    remove_tree(staging)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, staging, copy_function=_link)
    put_in_place(staging, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
