"""The command `python -m jaxstack.checkpoint list|verify|prune DIR`: manage checkpoints without loading them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxstack.checkpoint import directory, manifest
from jaxstack.checkpoint.directory import steps_to_delete
from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.observe.number_format import byte_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 1 if a checkpoint is damaged or there is none."""
    options = make_parser().parse_args(argv)

    def body() -> int:
        try:
            return options.action(_find_directory(options.directory), options)
        except OSError as error:
            raise JaxstackError(f"{error.filename or options.directory}: {error.strerror or error}") from None

    return run_command("jaxstack checkpoint", body)


def make_parser() -> CommandParser:
    """Return the command-line parser of `python -m jaxstack.checkpoint`."""
    parser = CommandParser(prog="jaxstack checkpoint", description="Verify, list or prune the checkpoints of a run.")
    commands = parser.add_subparsers(required=True, metavar="list|verify|prune")
    for name, action, text in (
        ("list", _list, "list the checkpoints; file sizes are checked, contents are not read"),
        ("verify", _verify, "read every file and compare it with its SHA-256"),
        ("prune", _prune, "delete damaged, unfinished and old checkpoints; the newest are verified first"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("directory", type=Path, help="a run directory, or its checkpoints/")
        command.set_defaults(action=action)
        if name == "verify":
            command.add_argument("--step", type=int, metavar="N", help="verify only this checkpoint")
        if name == "prune":
            command.add_argument(
                "--keep", type=int, default=3, metavar="N", help="number of newest checkpoints to keep (3)"
            )
            command.add_argument(
                "--keep-every-steps", type=int, metavar="M", help="also keep steps that are multiples of this"
            )
            command.add_argument("--dry-run", action="store_true", help="show what would be deleted")
    return add_examples(
        parser,
        "checkpoint list runs/quickstart",
        "checkpoint verify runs/quickstart",
        "checkpoint prune runs/quickstart --keep 1 --dry-run",
    )


def _find_directory(given: Path) -> Path:
    if not given.is_dir():
        raise ConfigError(f"{given} is not a directory: give a run directory or its checkpoints/")
    if (given / "checkpoints").is_dir():
        return given / "checkpoints"
    if runs := sorted(path.parent.name for path in given.glob("*/checkpoints") if path.is_dir()):
        raise ConfigError(f"{given} holds runs ({', '.join(runs[:8])}{', ...' * (len(runs) > 8)}): give one of them")
    for name, kind in (("compressed", "a compressed run"), ("config.json", "a Hugging Face checkpoint")):
        if (given / name).exists():
            raise ConfigError(
                f"{given} is {kind}, which holds one set of weights and no checkpoints of steps: give the directory of "
                "a training run"
            )
    return given


def _committed(entries: list[directory.Entry]) -> list[directory.Entry]:
    return [entry for entry in entries if entry.kind == "committed"]


def _damage(entry: directory.Entry, hashes: bool) -> str | None:
    try:
        manifest.check(entry.path, entry.step, hashes=hashes)
    except manifest.Damaged as damage:
        return str(damage)
    return None


def _list(folder: Path, options: argparse.Namespace) -> int:
    entries = directory.scan(folder)
    if not entries:
        raise JaxstackError(f"no checkpoint in {folder}")
    print(f"{'step':>10}  {'saved at':25}  {'leaves':>6}  {'size':>10}  state")
    for entry in reversed(_committed(entries)):
        damage = _damage(entry, hashes=False)
        if damage is None:
            index = manifest.read_index(entry.path)
            size = byte_size(sum(index["files"].values()))
            print(f"{entry.step:10}  {index['saved_at']:25}  {len(index['leaves']):6}  {size:>10}  right sizes")
        else:
            print(f"{entry.step:10}  {'':25}  {'':6}  {'':10}  damaged: {damage}")
    saving = directory.saving_process(folder)
    for entry in entries:
        if entry.kind == "half-written" and saving is not None:
            print(f"{entry.path.name}: being written by {saving}")
        elif entry.kind != "committed":
            print(f"{entry.path.name}: {entry.reason or entry.kind}, not a checkpoint")
    print(f"contents are not read here: python -m jaxstack.checkpoint verify {options.directory}")
    return 0


def _verify(folder: Path, options: argparse.Namespace) -> int:
    entries = _committed(directory.scan(folder))
    if options.step is not None:
        entries = [entry for entry in entries if entry.step == options.step]
    if not entries:
        which = "" if options.step is None else f" of step {options.step}"
        raise JaxstackError(f"no checkpoint{which} in {folder}")
    damaged = 0
    for entry in reversed(entries):
        damage = _damage(entry, hashes=True)
        damaged += damage is not None
        print(f"step {entry.step}: " + ("every file is intact" if damage is None else f"damaged: {damage}"))
    return 1 if damaged else 0


def _prune(folder: Path, options: argparse.Namespace) -> int:
    if options.keep < 1 or (options.keep_every_steps or 1) < 1:
        raise ConfigError("--keep and --keep-every-steps must be at least 1")
    lock = None if options.dry_run else directory.lock_directory(folder)
    entries = directory.scan(folder)
    intact = []
    damaged = []
    older = []
    for entry in _committed(entries):
        if len(intact) >= options.keep:
            older.append(entry)
        elif damage := _damage(entry, hashes=True):
            print(f"step {entry.step}: damaged: {damage}")
            damaged.append(entry)
        else:
            intact.append(entry)
    if damaged and not intact:
        raise JaxstackError(f"every checkpoint in {folder} is damaged: nothing was deleted")
    steps = [entry.step for entry in intact + older]
    doomed = set(steps_to_delete(steps, options.keep, options.keep_every_steps)) if steps else set()
    unfinished = [entry for entry in entries if entry.kind in ("half-written", "deleting")]
    for entry in damaged + [old for old in older if old.step in doomed] + unfinished:
        print(f"{'would delete' if options.dry_run else 'deleting'} {entry.path}")
        if not options.dry_run:
            directory.delete(entry.path)
    if lock is not None:
        lock.release()
    kept = sorted(set(steps) - doomed)
    print(f"kept: {', '.join(map(str, kept)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
