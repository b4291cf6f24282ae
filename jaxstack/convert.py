"""`python -m jaxstack.convert SOURCE --output DIR`: Hugging Face checkpoint -> run directory, and back."""

import argparse
import sys
from collections.abc import Sequence

from jaxstack.cli import add_examples, run_command


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxstack convert",
        description="Turns a Hugging Face checkpoint (config.json, safetensors) into a run directory, or a run back.",
    )
    parser.add_argument("source", metavar="SOURCE", help="directory of a Hugging Face checkpoint, or run directory")
    parser.add_argument("--output", metavar="DIR", required=True, help="directory to write; without a checkpoint in it")
    parser.add_argument(
        "--ignore-key", metavar="KEY", action="append", default=[], help="key of config.json that does not matter"
    )
    back = parser.add_argument_group("from a run")
    back.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    back.add_argument(
        "--dtype", default="float32", metavar="NAME", help="of the files: float32 (default), bfloat16, float16"
    )
    back.add_argument("--model-type", metavar="NAME", help="e.g. llama (default: the plainest that fits the model)")
    back.add_argument("--max-shard-gb", type=float, default=5.0, metavar="N", help="largest file (default 5 GB)")
    return add_examples(
        parser,
        "convert path/of/Llama-3.2-1B --output runs/llama",
        "convert runs/llama --output exported --dtype bfloat16",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_args(argv)

    def body() -> None:
        from jaxstack.run.convert import convert

        convert(args)

    return run_command("jaxstack convert", body)


if __name__ == "__main__":
    sys.exit(main())
