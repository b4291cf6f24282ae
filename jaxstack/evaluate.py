"""`python -m jaxstack.evaluate --run DIR`: loss, perplexity and bits per byte of a trained run on held-out data."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxstack.cli import run_command


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxstack evaluate",
        description="Loss, perplexity and bits per byte of a trained run, by default on its own held-out text.",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, e.g. runs/quickstart")
    parser.add_argument("--data", metavar="PATH", nargs="+", help="files, directories or globs to evaluate on instead")
    parser.add_argument("--text-key", metavar="KEY", default="text", help="key or column of the text (default: text)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="stop after N tokens")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_args(argv)

    def body() -> None:
        importlib.import_module("jaxstack.opened_run").evaluate_run(args)

    return run_command("jaxstack evaluate", body)


if __name__ == "__main__":
    sys.exit(main())
