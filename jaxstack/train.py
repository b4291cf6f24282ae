"""`python -m jaxstack.train --config FILE [section.key=value ...]`: trains, and resumes where the run left off."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxstack.cli import run_command


def make_parser() -> argparse.ArgumentParser:
    """The command line. Nothing heavy is imported before it is parsed, so that --help answers at once."""
    parser = argparse.ArgumentParser(
        prog="jaxstack train",
        description="Train a language model. Resumes by itself where the run directory holds a checkpoint.",
        epilog="example: python -m jaxstack.train --config configs/quickstart.yaml train.steps=500 run.name=short",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set single values over the file's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_intermixed_args(argv)

    def body() -> None:
        language = importlib.import_module("jaxstack.language_run")
        if args.print_config:
            print(language.describe_config(args.config, args.overrides), end="")
        else:
            language.train_language_model(args.config, args.overrides)

    return run_command("jaxstack train", body)


if __name__ == "__main__":
    sys.exit(main())
