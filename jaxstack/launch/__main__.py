"""The command `python -m jaxstack.launch [options] -- COMMAND ...`: run a training command and keep it running."""

import argparse
import dataclasses
import math
import os
import re
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.distributed.cluster import (
    Nodes,
    add_tls_arguments,
    check_tls_files,
    find_nodes,
    split_address,
    tls_variables,
)
from jaxstack.errors import ConfigError
from jaxstack.heartbeat import doing
from jaxstack.launch.child import Limits
from jaxstack.launch.supervisor import Job, Supervisor


def make_parser() -> CommandParser:
    """Return the command-line parser of `python -m jaxstack.launch`."""
    parser = CommandParser(
        prog="jaxstack launch",
        description="Start the processes of this node, watch their progress, end all of them when one fails or is "
        "stuck, and restart them from the newest checkpoint.",
        usage="%(prog)s [options] -- COMMAND ...",
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the command of each process")
    parser.add_argument(
        "--processes", type=_count, default=1, metavar="N", help="processes on this node, which share its GPUs (1)"
    )
    parser.add_argument(
        "--max-restarts", type=_natural, default=3, metavar="N", help="restarts in a row without a new checkpoint (3)"
    )
    parser.add_argument("--preflight", action="store_true", help="only check devices, links, clocks and versions")
    limits = parser.add_argument_group("limits", "seconds without a sign of life until a process counts as stuck")
    for name, what in (("step", "between two steps"), ("start", "until the first step"), ("save", "while saving")):
        default = getattr(Limits, name)
        limits.add_argument(
            f"--{name}-seconds", type=_seconds, default=default, metavar="S", help=f"{what} ({default:g})"
        )
    limits.add_argument(
        "--grace-seconds", type=_seconds, default=120.0, metavar="S", help="time for the last save after SIGTERM (120)"
    )
    nodes = parser.add_argument_group("several nodes", "detected under srun and in an indexed Kubernetes job")
    nodes.add_argument(
        "--nodes", type=_node_range, metavar="N|MIN:MAX",
        help="number of nodes, one launcher on each; MIN:MAX: go on with fewer after a loss, and with more again",
    )  # fmt: skip
    nodes.add_argument("--node-rank", type=int, metavar="I", help="index of this node, from 0")
    nodes.add_argument(
        "--coordinator", metavar="HOST:PORT", help="an address of node 0 that all can reach; with MIN:MAX of this node"
    )
    nodes.add_argument("--rendezvous", metavar="DIR", help="folder that all nodes share, for MIN:MAX")
    add_tls_arguments(nodes)
    return add_examples(
        parser,
        "launch -- python -m jaxstack.train --config configs/llama3-1b.yaml",
        "launch --preflight",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher for the given command-line arguments, and return its exit code."""
    args = make_parser().parse_args(argv)
    return run_command("jaxstack launch", lambda: _supervise(args))


def _supervise(args: argparse.Namespace) -> int:
    with doing(None):  # the processes print
        return Supervisor(make_job(args)).run()


def make_job(args: argparse.Namespace) -> Job:
    """Return the job that the parsed command line describes: command, processes, nodes, timeouts and restarts.

    Raises:
      ConfigError: there is no command to run, it would import something else than jaxstack, or the coordinator of
        several nodes is not given.
    """
    os.environ |= tls_variables(args)
    nodes, fewest = _find_nodes(args)
    if not 0 <= nodes.rank < nodes.count:
        raise ConfigError(f"the node's rank ({nodes.rank}) must be in 0..{nodes.count - 1}.")
    if nodes.coordinator is not None:
        split_address(nodes.coordinator)
        check_tls_files(nodes.coordinator)
    limits = Limits(args.step_seconds, args.start_seconds, args.save_seconds)
    if args.preflight:
        command = (sys.executable, "-m", "jaxstack.resilience.preflight")
        restarts = 0
        limits = Limits(start=min(args.start_seconds, 600.0))
    else:
        command = tuple(args.command)
        restarts = args.max_restarts
        if not command:
            raise ConfigError("there is no command to run: jaxstack launch -- python -m jaxstack.train --config FILE")
        if command[0].endswith((".yaml", ".yml")):
            right = " ".join(["jaxstack launch -- python -m jaxstack.train --config", *command])
            raise ConfigError(f"{command[0]} is a file, not a command; give the whole command: {right}")
    check_shadowing(command)
    job = Job(command, args.processes, nodes, limits, restarts, args.grace_seconds)
    if args.rendezvous is None or args.preflight:
        return job
    _check_together(command)
    return dataclasses.replace(job, fewest_nodes=fewest, rendezvous=Path(args.rendezvous).expanduser().absolute())


def _find_nodes(args: argparse.Namespace) -> tuple[Nodes, int]:
    """Return the nodes of the command line or of the scheduler, and the least number that the run may use."""
    fewest, count = args.nodes or (1, None)
    changing = args.rendezvous is not None
    if changing != (count is not None and fewest < count):
        raise ConfigError("--nodes MIN:MAX and --rendezvous DIR must be given together.")
    nodes = find_nodes()
    given = args.node_rank is not None or args.coordinator is not None
    if nodes.coordinator is not None and changing and not given:
        if count != nodes.count:
            raise ConfigError(f"--nodes {fewest}:{count}: the scheduler started {nodes.count} nodes; MAX must be that.")
        port = split_address(nodes.coordinator)[1]
        return Nodes(nodes.count, nodes.rank, f"{socket.gethostname()}:{port}"), fewest
    if not given and count is None:
        return nodes, nodes.count
    if count is None or args.node_rank is None or args.coordinator is None:
        raise ConfigError("--nodes, --node-rank and --coordinator must be given together.")
    return Nodes(count, args.node_rank, args.coordinator), fewest


def _node_range(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of nodes of `N` or `MIN:MAX`."""
    fewest, colon, most = text.partition(":")
    bounds = _count(fewest), _count(most if colon else fewest)
    if bounds[0] > bounds[1] or (colon and bounds[0] == bounds[1]):
        raise argparse.ArgumentTypeError(f"must be a number, or MIN:MAX with MIN below MAX; got {text!r}")
    return bounds


def _count(text: str) -> int:
    return _whole(text, 1)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:  # nan must be refused too
        raise argparse.ArgumentTypeError(f"must be a number of seconds, more than 0; got {text!r}")
    return number


_APART = ("convert", "compress", "export", "prepare", "plan", "tune", "serve")
"""Commands whose processes do not compute together."""


def _check_together(command: Sequence[str]) -> None:
    """Check that the processes of all nodes end together, as those of a run whose nodes may change have to.

    If one node has nothing left to do, the others would take that for the end of the run.
    """
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name = following if os.path.basename(word) == "jaxstack" else word.removeprefix("jaxstack.")
        if name in _APART and name != word:
            raise ConfigError(
                f"--nodes MIN:MAX is for commands whose nodes compute together (train, reinforce, evaluate, generate), "
                f"which {name} does not; give --nodes N, so that a lost node leaves the others alone."
            )


_PACKAGE = Path(__file__).resolve().parents[1]
_PYTHON = re.compile(r"python[\d.]*")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def check_shadowing(command: Sequence[str], directory: Path | None = None) -> None:
    """Check that a command `python -m jaxstack...` imports this jaxstack, not a file in the current directory.

    A folder `jaxstack` with an `__init__.py`, or a file `jaxstack.py`, in the current directory would be imported
    instead; every start would fail in the same way.

    Args:
      command: program and arguments.
      directory: where it will run; default: the current directory.

    Raises:
      ConfigError: something else is imported; the message names it and the command that works.
    """
    module = _module_of(command)
    if module is None or module.split(".")[0] != "jaxstack" or os.environ.get("PYTHONSAFEPATH"):
        return
    place = (directory or Path.cwd()).resolve()
    spec = PathFinder.find_spec("jaxstack", [str(place), *sys.path])
    if spec is None:
        return
    if spec.origin is not None:
        found = Path(spec.origin).resolve()
        hidden = found.parent != _PACKAGE and found.is_relative_to(place)
        found = found.parent if found.name == "__init__.py" else found
    else:  # a folder without __init__.py, and no jaxstack on the path: an import hook would come too late
        found = place / "jaxstack"
        hidden = found.is_dir() and found != _PACKAGE
    if hidden:
        name = module.removeprefix("jaxstack").removeprefix(".")
        instead = f"use `jaxstack {name} ...` or " if name in ("train", "generate", "evaluate", "prepare") else ""
        raise ConfigError(
            f"{found} hides jaxstack from `python -m {module}`, which imports from the current directory first; "
            f"{instead}start from another directory."
        )


def _module_of(command: Sequence[str]) -> str | None:
    """Return MODULE of a command `python [options] -m MODULE`; None for other commands, and with -I or -P."""
    start = next((i for i, word in enumerate(command) if _PYTHON.fullmatch(os.path.basename(word))), None)
    if start is None:
        return None
    words = iter(command[start + 1 :])
    for word in words:
        if word == "-m":
            return next(words, None)
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-") or re.fullmatch(r"-\w*[cPI]\w*", word):
            return None
    return None


if __name__ == "__main__":
    sys.exit(main())
