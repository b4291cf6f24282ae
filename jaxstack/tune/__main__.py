"""The command `python -m jaxstack.tune`: hyperparameter search, learning-rate finder, or check of muP."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxstack.cli import CommandParser, add_examples, run_command, tolerate_broken_pipe
from jaxstack.errors import ConfigError

if TYPE_CHECKING:
    from jaxstack.tune.search import StudyResult


class Subcommand(NamedTuple):
    """A subcommand of `jaxstack tune`, such as the learning-rate finder.

    Attributes:
      make_parser: returns the parser of its arguments.
      run: does its work with the parsed arguments.
    """

    make_parser: Callable[[], CommandParser]
    run: Callable[[argparse.Namespace], int | None]


def make_parser(arguments: Sequence[str] = ()) -> CommandParser:
    """Return the parser of the command line.

    Args:
      arguments: the arguments to parse; the first of them may name a subcommand, which has its own parser.
    """
    if arguments and arguments[0] in SUBCOMMANDS:
        return SUBCOMMANDS[arguments[0]].make_parser()
    parser = CommandParser(
        prog="jaxstack tune",
        description="Search the values of a configuration by Bayesian optimization (pip install 'jaxstack[tune]'). "
        "Each trial is a training run in a separate process; the held-out loss decides. A study that was stopped goes "
        "on with the same command, which several hosts may run at once.",
        epilog="Subcommands: " + "; ".join(f"`jaxstack tune {name} --help`" for name in SUBCOMMANDS) + ".",
    )
    _add_config(parser)
    parser.add_argument("--study", metavar="FILE", required=True, help="YAML file: trials, space; see docs/tuning.md")
    return add_examples(
        parser,
        "tune --config configs/quickstart.yaml --study configs/studies/quickstart.yaml",
        "tune --config configs/quickstart.yaml --study STUDY.yaml train.steps=200",
        "tune learning-rate --config configs/quickstart.yaml",
    )


def _add_config(parser: CommandParser) -> None:
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.tune` with the arguments `argv`; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(words)
    command = SUBCOMMANDS[words.pop(0)].run if words and words[0] in SUBCOMMANDS else _study
    arguments = parser.parse_intermixed_args(words)
    with tolerate_broken_pipe("jaxstack tune"):
        return run_command("jaxstack tune", lambda: command(arguments))


def _study(arguments: argparse.Namespace) -> None:
    from jaxstack.config.loader import load_yaml
    from jaxstack.tune.space import load_study

    load_study(arguments.study)  # reports a missing or wrong file before jax is imported, which takes seconds
    load_yaml(arguments.config)
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("studies need Optuna, which is not installed: pip install 'jaxstack[tune]'.")
    from jaxstack.tune.search import run_study

    def say(line):
        return print(line, flush=True)

    result = run_study(arguments.config, arguments.study, arguments.overrides, report=say)
    print("\n".join(_summary(result)))


def _summary(result: "StudyResult") -> list[str]:
    running = sum(record.state == "running" for record in result.records)
    lines = [f"trials that still run elsewhere: {running}"] if running else []
    best = result.best
    if best is None:
        lines.append("no trial is complete: see the notes in the report")
    else:
        lines += [f"best: trial {best.number}, held-out {best.value:.4f}"]
        lines += [f"  {key}: {value}" for key, value in best.values.items()]
        lines += [f"next: python -m jaxstack.train --config {result.directory / 'best.yaml'}"]
    return [*lines, f"report: {result.directory / 'report.html'}"]


def _learning_rate_parser() -> CommandParser:
    parser = CommandParser(
        prog="jaxstack tune learning-rate",
        description="Find a learning rate: train for some steps while it rises exponentially, and look where the loss "
        "falls fastest (Smith 2017). Nothing of the run itself is touched.",
    )
    _add_config(parser)
    parser.add_argument("--low", type=float, default=1e-7, metavar="RATE", help="first learning rate (1e-7)")
    parser.add_argument("--high", type=float, default=1.0, metavar="RATE", help="last learning rate (1)")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="number of steps (150)")
    return add_examples(
        parser,
        "tune learning-rate --config configs/quickstart.yaml",
        "tune learning-rate --config configs/quickstart.yaml optimizer.name=lion --steps 100",
    )


def _find_learning_rate(arguments: argparse.Namespace) -> None:
    from jaxstack.config.loader import load_yaml

    load_yaml(arguments.config)
    from jaxstack.run_config import load_config
    from jaxstack.tune.learning_rate import RateRange, find_learning_rate

    rates = RateRange(arguments.low, arguments.high, arguments.steps)
    config = load_config(arguments.config, arguments.overrides)
    found = find_learning_rate(config, rates, report=lambda line: print(line, flush=True))
    print(f"steepest descent of the loss: {found.steepest:.3g}")
    print(f"a tenth of the rate with the smallest loss: {found.tenth_of_minimum:.3g}")
    print(f"try: optimizer.learning_rate={found.suggestion:.2g}")
    print(f"report: {found.page}")


def _coordinates_parser() -> CommandParser:
    from jaxstack.tune.coordinate_check import make_parser as make_coordinates_parser

    return make_coordinates_parser()


def _check_coordinates(arguments: argparse.Namespace) -> None:
    from jaxstack.tune.coordinate_check import run

    run(arguments)


SUBCOMMANDS = {
    "learning-rate": Subcommand(_learning_rate_parser, _find_learning_rate),
    "coordinates": Subcommand(_coordinates_parser, _check_coordinates),
}
"""Name -> subcommand; without one of these names the command runs a study."""


if __name__ == "__main__":
    sys.exit(main())
