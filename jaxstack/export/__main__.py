"""The command `python -m jaxstack.export --run DIR --to TARGET --out DIR`: export a model to other programs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.distributed.cluster import on_first_process
from jaxstack.errors import ConfigError, nearest
from jaxstack.files import check_new, new_directory
from jaxstack.heartbeat import doing

_MOST_CONTEXT = 2**24
"""Limit of --context, sixteen times the longest context that a published model was trained with."""
_DEFAULT_PORT = 8000

_LESS_MEMORY = "--context, or set JAX_PLATFORMS=cpu, as the host may have more memory"
"""Ways to need less device memory, for the message that there is too little."""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack export",
        description="Write a trained run or a Hugging Face checkpoint for other programs: as StableHLO that runs with "
        "jax alone, as an ONNX graph with a KV cache, or as a folder with a page that generates text in a browser.",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument("--to", metavar="TARGET", required=True, help="stablehlo, onnx or web")
    parser.add_argument(
        "--out", metavar="DIR", help="directory to write; must not exist, or be empty (default: RUN-TARGET)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to export (default: the newest)")
    parser.add_argument("--dtype", metavar="NAME", help="float32 (default), or for stablehlo bfloat16")
    parser.add_argument(
        "--context", type=int, metavar="N", help="longest text in tokens (default: the model's, or 1024)"
    )
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=_DEFAULT_PORT,
        metavar="PORT",
        help=f"then show the page of web at http://127.0.0.1:PORT (default {_DEFAULT_PORT}) until Ctrl-C",
    )
    return add_examples(
        parser,
        "export --run runs/quickstart --to web --out exported/web --serve",
        "export --run runs/quickstart --to onnx --out exported/onnx",
        "export --run runs/quickstart --to stablehlo --out exported/stablehlo",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.export` with the arguments `argv`; return its exit code."""
    args = make_parser().parse_args(argv)
    return run_command("jaxstack export", on_first_process(lambda: _export(args)), _LESS_MEMORY)


def _export(args: argparse.Namespace) -> None:
    args.out = args.out or f"{Path(args.run)}-{args.to}"
    _check(args)
    from jaxstack.export.source import load_source
    from jaxstack.export.targets import TARGETS

    target = TARGETS.get(args.to)
    if target is None:
        raise ConfigError(f"--to: there is no target {args.to!r}; {nearest(args.to, TARGETS)}")
    dtype = args.dtype or target.dtypes[0]
    if dtype not in target.dtypes:
        raise ConfigError(f"--dtype: {args.to} cannot have {dtype!r}; {nearest(dtype, target.dtypes)}.")
    if missing := target.missing():
        raise ConfigError(f"--to {args.to}: {missing}")
    with doing("loading the model"):
        source = load_source(args.run, step=args.step, dtype=dtype, context=args.context, report=_warn)
    if problem := target.problem(source):
        raise ConfigError(f"--to {args.to} cannot hold this model: {problem}.")
    with new_directory(Path(args.out)) as folder, doing(f"writing {args.to}"):
        how_to_run = target.write(source, folder)
    size = sum(path.stat().st_size for path in Path(args.out).rglob("*") if path.is_file())
    print(f"{args.out}: {args.to}, {size / 1e6:,.1f} MB; next: {how_to_run.format(folder=args.out)}", flush=True)
    if args.serve is not None:
        from jaxstack.export.web import serve_until_interrupted

        with doing(None):
            serve_until_interrupted(Path(args.out), args.serve)


def _check(args: argparse.Namespace) -> None:
    """Check those command-line arguments that can be checked before the model is loaded.

    Raises:
      ConfigError: one of them is wrong.
    """
    if args.context is not None and args.context < 2:
        raise ConfigError(f"--context must be at least 2; found {args.context}.")
    if args.context is not None and args.context > _MOST_CONTEXT:
        raise ConfigError(f"--context must be at most {_MOST_CONTEXT:,}; found {args.context:,}.")
    if args.serve is not None and args.to != "web":
        raise ConfigError(f"--serve shows the page of --to web; {args.to} has none.")
    if args.serve is not None and not 0 <= args.serve < 2**16:
        raise ConfigError(f"--serve must be a port below 65536; found {args.serve}.")
    check_new(Path(args.out))


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
