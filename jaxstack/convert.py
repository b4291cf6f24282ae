"""The command `python -m jaxstack.convert SOURCE --output DIR`: convert between run and Hugging Face checkpoint."""

import argparse
import sys
from collections.abc import Sequence

from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.distributed.cluster import on_first_process
from jaxstack.errors import ConfigError


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack convert",
        description="Convert a Hugging Face checkpoint (config.json, safetensors) into a run directory, or a run "
        "directory into a Hugging Face checkpoint.",
    )
    parser.add_argument("source", metavar="SOURCE", help="directory of a Hugging Face checkpoint, or run directory")
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="directory to write; must not exist, or be empty"
    )
    parser.add_argument(
        "--ignore-key", metavar="KEY", action="append", default=[], help="unknown key of config.json to ignore"
    )
    export = parser.add_argument_group("from a run")
    export.add_argument("--step", type=int, metavar="N", help="checkpoint to convert (default: the newest)")
    export.add_argument(
        "--dtype", default="float32", metavar="NAME", help="dtype of the files: float32 (default), bfloat16, float16"
    )
    export.add_argument(
        "--format",
        default="dense",
        metavar="NAME",
        help="form of packed weights: dense (default), or for vLLM, by compressed-tensors: pack-quantized (integers), "
        "int-quantized (8 bits, activations too), float-quantized (FP8, activations too); fp8 (blocks, as DeepSeek) or "
        "mxfp4 (experts, as gpt-oss) of weights that were read so",
    )
    export.add_argument("--model-type", metavar="NAME", help="e.g. llama (default: the simplest that fits the model)")
    export.add_argument("--max-shard-gb", type=float, default=5.0, metavar="N", help="size limit of a file (5 GB)")
    return add_examples(
        parser,
        "convert path/of/Llama-3.2-1B --output runs/llama",
        "convert runs/llama --output exported --dtype bfloat16",
        "convert runs/llama-int4 --output exported --dtype bfloat16 --format pack-quantized",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.convert` with the arguments `argv`; return its exit code."""
    args = make_parser().parse_args(argv)
    return run_command("jaxstack convert", on_first_process(lambda: _convert(args)))


def _convert(args: argparse.Namespace) -> None:
    from jaxstack.run.convert import export_checkpoint, import_checkpoint
    from jaxstack.stored import StoredModel

    if StoredModel.open(args.source).exported:
        run = import_checkpoint(args.source, args.output, args.ignore_key, warn=_warn)
        print(f"{run.directory}: {run.parameters:,} parameters of {args.source}")
        return
    if not args.max_shard_gb > 0:
        raise ConfigError(f"--max-shard-gb must be above 0; found {args.max_shard_gb}.")
    written = export_checkpoint(
        args.source,
        args.output,
        step=args.step,
        dtype=args.dtype,
        format=args.format,
        model_type=args.model_type,
        max_shard_bytes=int(args.max_shard_gb * 10**9),
        warn=_warn,
    )
    print(f"{written.directory}: {written.model_type}, {written.dtype}, {args.source} at step {written.step}")


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
