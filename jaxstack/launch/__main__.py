"""`python -m jaxstack.launch [options] -- COMMAND ...`: runs a training command on this node, and keeps it running."""

import argparse
import os
import sys
from collections.abc import Sequence

from jaxstack.cli import add_examples, run_command
from jaxstack.distributed.cluster import (
    Nodes,
    add_trust_arguments,
    check_trust,
    find_nodes,
    split_address,
    trust_variables,
)
from jaxstack.errors import ConfigError
from jaxstack.launch.health import Limits
from jaxstack.launch.supervisor import Job, Supervisor


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="jaxstack launch",
        description="Starts the processes of this node, watches their progress, ends them together when one fails or "
        "is stuck, and starts them again from the newest checkpoint.",
        usage="%(prog)s [options] -- COMMAND ...",
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what each process runs")
    parser.add_argument(
        "--processes", type=_count, default=1, metavar="N", help="on this node; they divide its GPUs (1)"
    )
    parser.add_argument(
        "--max-restarts", type=_natural, default=3, metavar="N", help="in a row without a new checkpoint (3)"
    )
    parser.add_argument("--preflight", action="store_true", help="only check devices, links, clocks and versions")
    limits = parser.add_argument_group("limits", "seconds without a sign of life after which a process is stuck")
    for name, what in (("step", "between two steps"), ("start", "until the first step"), ("save", "in a save")):
        default = getattr(Limits, name)
        limits.add_argument(
            f"--{name}-seconds", type=_seconds, default=default, metavar="S", help=f"{what} ({default:g})"
        )
    limits.add_argument(
        "--grace-seconds", type=_seconds, default=120.0, metavar="S", help="for the last save after SIGTERM (120)"
    )
    nodes = parser.add_argument_group("several nodes", "found by itself under srun and in an indexed Kubernetes job")
    nodes.add_argument("--nodes", type=_count, metavar="N", help="nodes of the run, one launcher each")
    nodes.add_argument("--node-rank", type=int, metavar="I", help="which node this is, from 0 on")
    nodes.add_argument("--coordinator", metavar="HOST:PORT", help="an address of node 0 that all nodes reach")
    add_trust_arguments(nodes)
    return add_examples(
        parser,
        "launch -- python -m jaxstack.train --config configs/llama3-1b.yaml",
        "launch --preflight",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = make_parser().parse_args(argv)
    return run_command("jaxstack launch", lambda: Supervisor(make_job(args)).run())


def make_job(args: argparse.Namespace) -> Job:
    """Return the job of a command line, checked.

    Raises:
      ConfigError: there is nothing to run, or it is not known where several nodes meet.
    """
    os.environ |= trust_variables(args)
    nodes = find_nodes()
    if args.nodes is not None or args.node_rank is not None or args.coordinator is not None:
        if args.nodes is None or args.node_rank is None or args.coordinator is None:
            raise ConfigError("--nodes, --node-rank and --coordinator are given together.")
        nodes = Nodes(args.nodes, args.node_rank, args.coordinator)
    if not 0 <= nodes.rank < nodes.count:
        raise ConfigError(f"the node's rank ({nodes.rank}) must lie in 0..{nodes.count - 1}.")
    if nodes.coordinator is not None:
        split_address(nodes.coordinator)
        check_trust(nodes.coordinator)
    limits = Limits(args.step_seconds, args.start_seconds, args.save_seconds)
    if args.preflight:
        command, restarts = (sys.executable, "-m", "jaxstack.launch.check"), 0
        limits = Limits(start=min(args.start_seconds, 600.0))
    else:
        command, restarts = tuple(args.command), args.max_restarts
        if not command:
            raise ConfigError("what to run is missing: jaxstack launch -- python -m jaxstack.train --config FILE")
    return Job(command, args.processes, nodes, limits, restarts, args.grace_seconds)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not number > 0:  # nor is nan
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
