"""The command `python -m jaxstack.train --config FILE [section.key=value ...]`: train or resume a run."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxstack.cli import CommandParser, add_examples, fill_option_from_overrides, run_command, tolerate_broken_pipe
from jaxstack.distributed.cluster import COORDINATOR, COUNT, INDEX, add_tls_arguments, tls_variables
from jaxstack.errors import ConfigError
from jaxstack.resilience.exit_on_signal import ExitOnSignal

if TYPE_CHECKING:
    from jaxstack.run_config import RunConfig

_LESS_MEMORY = (
    "train.global_batch_size or raise train.gradient_accumulation, set model.remat (full saves most), or shard more "
    "(parallel.fsdp)"
)
"""Ways to need less device memory, for the message that there is too little."""


def make_parser() -> CommandParser:
    """Return the parser of the command line, without heavy imports, so that --help answers at once."""
    return training_parser(
        "jaxstack train",
        "Train a language model. If the run directory holds a checkpoint, resume from it.",
        "train --config configs/quickstart.yaml",
        "train --config configs/quickstart.yaml run.name=short train.steps=500",
        "train --config configs/quickstart.yaml parallel.fsdp=4 parallel.simulate_devices=4",
    )


def training_parser(name: str, description: str, *examples: str) -> CommandParser:
    """Return the parser of a command that trains a run.

    Args:
      name: the command.
      description: what it does.
      examples: command lines, without the beginning that all commands have.
    """
    parser = CommandParser(prog=name, description=description)
    parser.add_argument("--config", metavar="FILE", help="YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    group = parser.add_argument_group("several processes", "set by `jaxstack launch`; detected under srun")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address at which process 0 listens")
    group.add_argument("--processes", type=int, metavar="N", help="number of processes of the run")
    group.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")
    add_tls_arguments(group)
    return add_examples(parser, *examples)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.train` with the arguments `argv`; return its exit code."""
    return run_training_command(make_parser(), argv, _load)


def _load() -> Callable[["RunConfig"], object]:
    from jaxstack.run.train import train

    return train


def run_training_command(
    parser: CommandParser, argv: Sequence[str] | None, load: Callable[[], Callable[["RunConfig"], object]]
) -> int:
    """Run a command that trains a run; return its exit code.

    Args:
      parser: from `training_parser`.
      argv: the arguments.
      load: imports the function that trains a run from its configuration.
    """
    arguments = fill_option_from_overrides(parser, parser.parse_intermixed_args(argv), "config", lambda word: True)
    with tolerate_broken_pipe(parser.prog), ExitOnSignal(parser.prog):
        return _run(arguments, parser.prog, load)


def _check_place(file: Path, config: "RunConfig", overrides: Sequence[str]) -> None:
    """Raise ConfigError if a run directory's configuration names another directory, as after a rename or a copy.

    Raises:
      ConfigError: it would train another one; the message has the overrides that go on here.
    """
    here = file.resolve().parent
    chosen = any(override.partition("=")[0].strip() in ("run", "run.name", "run.dir") for override in overrides)
    moved = file.name == "config.yaml" and (here / "checkpoints").is_dir() and here != config.directory.resolve()
    if moved and not chosen:
        raise ConfigError(
            f"{file} is the configuration of the run {here}, but it says that the run is {config.directory}: the "
            "directory was renamed or copied, or this is another current directory. To go on with it add "
            f"run.dir={here.parent} run.name={here.name}; for a new run add another run.name."
        )


def _run(args: argparse.Namespace, name: str, load: Callable[[], Callable[["RunConfig"], object]]) -> int:
    names = {COORDINATOR: args.coordinator, COUNT: args.processes, INDEX: args.process_id}
    os.environ |= {name: str(value) for name, value in names.items() if value is not None} | tls_variables(args)

    def body() -> None:
        from jaxstack.config.loader import dump_yaml, load_yaml

        load_yaml(args.config)  # reports a missing or malformed file before jax is imported, which takes seconds
        from jaxstack.run_config import load_config

        config = load_config(args.config, args.overrides)
        _check_place(Path(args.config), config, args.overrides)
        if args.print_config:
            print(dump_yaml(config), end="")
            return
        load()(config)

    return run_command(name, body, _LESS_MEMORY)


class _Command(ModuleType):
    """Makes this module callable, as `jaxstack.train` is the name of a library function too."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from jaxstack.run.train import train

        return train(*arguments, **settings)


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    sys.exit(main())
