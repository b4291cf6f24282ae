"""The command `python -m jaxstack.reinforce --config FILE [section.key=value ...]`: train on rewards of answers."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxstack.cli import CommandParser
from jaxstack.train import run_training_command, training_parser

if TYPE_CHECKING:
    from jaxstack.run_config import RunConfig


def make_parser() -> CommandParser:
    """Return the parser of the command line, without heavy imports, so that --help answers at once."""
    return training_parser(
        "jaxstack reinforce",
        "Train a language model on the rewards of answers that it samples. If the run directory holds a checkpoint, "
        "resume from it.",
        "reinforce --config configs/reinforce-brackets.yaml",
        "reinforce --config configs/reinforce-brackets.yaml run.name=gspo policy.loss=gspo",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.reinforce` with the arguments `argv`; return its exit code."""
    return run_training_command(make_parser(), argv, _load)


def _load() -> Callable[["RunConfig"], object]:
    from jaxstack.reinforce.task import reinforce

    return reinforce


if __name__ == "__main__":
    sys.exit(main())
