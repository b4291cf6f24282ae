"""The table of all subcommands of `jaxstack`, and its entry point, also run by `python -m jaxstack`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxstack import __version__
from jaxstack.errors import nearest


class CommandModule(Protocol):
    """Interface of a subcommand's module: its argument parser and its main function."""

    def make_parser(self) -> argparse.ArgumentParser:
        """Return the parser of the subcommand's arguments."""
        ...

    def main(self, argv: Sequence[str] | None = None, /) -> int:
        """Run the subcommand on the command-line arguments `argv`, and return its exit code."""
        ...


class Command(NamedTuple):
    """A subcommand of `jaxstack`: its one-line summary, and a function that imports its module.

    Attributes:
      summary: its line in the list of subcommands.
      load: imports its module, which is done only for the subcommand that runs.
    """

    summary: str
    load: Callable[[], CommandModule]


def _train() -> CommandModule:
    import jaxstack.train as module

    return module


def _launch() -> CommandModule:
    from jaxstack.launch import __main__ as launch

    return launch


def _generate() -> CommandModule:
    import jaxstack.generate as module

    return module


def _serve() -> CommandModule:
    from jaxstack.serve import __main__ as serve

    return serve


def _evaluate() -> CommandModule:
    import jaxstack.evaluate as module

    return module


def _plan() -> CommandModule:
    from jaxstack.plan import __main__ as plan

    return plan


def _convert() -> CommandModule:
    from jaxstack import convert

    return convert


def _export() -> CommandModule:
    from jaxstack.export import __main__ as export

    return export


def _prepare() -> CommandModule:
    from jaxstack import prepare

    return prepare


def _checkpoint() -> CommandModule:
    from jaxstack.checkpoint import __main__ as checkpoint

    return checkpoint


def _tune() -> CommandModule:
    from jaxstack.tune import __main__ as tune

    return tune


def _compress() -> CommandModule:
    from jaxstack.compress import __main__ as compress

    return compress


def _reinforce() -> CommandModule:
    from jaxstack.reinforce import __main__ as reinforce

    return reinforce


def _schema() -> CommandModule:
    from jaxstack import schema

    return schema


COMMANDS = {
    "train": Command("train a model from a configuration file", _train),
    "reinforce": Command("train a model on the rewards of answers that it samples", _reinforce),
    "launch": Command("start, watch and restart the processes of a node", _launch),
    "generate": Command("sample text from a trained run", _generate),
    "serve": Command("answer OpenAI's completion requests over HTTP with a trained run", _serve),
    "evaluate": Command("compute loss and bits per byte on held-out text, or run evaluation tasks", _evaluate),
    "plan": Command("show how a configuration is laid out on a mesh, without its devices", _plan),
    "tune": Command("search hyperparameters over many short runs, or find a learning rate", _tune),
    "compress": Command("quantize, prune or factorize a trained model, with a report of what it costs", _compress),
    "convert": Command("convert Hugging Face checkpoints to run directories, and back", _convert),
    "export": Command("write a trained model as StableHLO, as ONNX, or as a web page that runs it", _export),
    "prepare": Command("tokenize text into shards", _prepare),
    "checkpoint": Command("verify, list or prune the checkpoints of a run", _checkpoint),
    "schema": Command("print the JSON schema of configuration files, for editors", _schema),
}
"""All subcommands, in the order of the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxstack <subcommand> ...`, which is the same as `python -m jaxstack.<subcommand> ...`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: jaxstack <subcommand> [arguments]\n\nsubcommands:")
        print("\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()))
        print("\n`jaxstack <subcommand> --help` explains each.")
        return 0 if arguments else 2
    name = arguments[0]
    if name in ("--version", "-V", "version"):
        print(f"jaxstack {__version__}")
        return 0
    if name not in COMMANDS:
        file = name.endswith((".yaml", ".yml"))
        advice = f"to train from a file: jaxstack train --config {name}" if file else nearest(name.lower(), COMMANDS)
        print(f"jaxstack: there is no subcommand {name!r}; {advice}", file=sys.stderr)
        return 2
    return COMMANDS[name].load().main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
