"""`python -m jaxstack.generate --run DIR --prompt TEXT`: samples from a trained run, streaming to the terminal."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxstack.cli import run_command
from jaxstack.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="jaxstack generate", description="Sample text from a trained run.")
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, e.g. runs/quickstart")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="text to go on from (default: a new document)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to generate (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that sum to P")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts to generate (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    parser.add_argument("--tensor", type=int, metavar="N", help="devices to shard the weights over (default: all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_args(argv)

    def body() -> None:
        for name in ("max_tokens", "samples"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; found {getattr(args, name)}.")
        opened = importlib.import_module("jaxstack.opened_run")
        opened.stream_samples(args)

    return run_command("jaxstack generate", body)


if __name__ == "__main__":
    sys.exit(main())
