"""The command `python -m jaxstack.compress --run DIR --recipe NAME|FILE --out DIR`: makes a trained model smaller."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.distributed.cluster import on_first_process
from jaxstack.errors import ConfigError

_OVERRIDE = re.compile(r"(layers|calibration|store|vectors|parallel)(\.\w+)*=")
"""Override of a recipe's value."""

_LESS_MEMORY = (
    "calibration.sequences or calibration.batch_size, add --from-disk or parallel.tensor, or set JAX_PLATFORMS=cpu, as "
    "the host may have more memory"
)
"""Ways to need less device memory, for the message that there is too little."""


def make_parser() -> CommandParser:
    """Return the argument parser of `jaxstack compress`."""
    parser = CommandParser(
        prog="jaxstack compress",
        description="Compress the model of a run or a Hugging Face checkpoint: quantize, prune, factorize. A recipe "
        "chooses the method of each layer. The result is a run directory for generate, evaluate, serve and convert, "
        "with a report of bytes and held-out perplexity before and after.",
        epilog="The model is compressed in float32, on one device unless parallel.tensor, parallel.fsdp or "
        "parallel.data are given.",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument(
        "--recipe", metavar="NAME|FILE", required=True, help="recipe by name (such as int8) or YAML file"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="directory to write; must not exist, or be empty (default: RUN-RECIPE)"
    )
    parser.add_argument(
        "--from-disk",
        action="store_true",
        help="read, compress and write one layer at a time, for a Hugging Face checkpoint larger than the memory; no "
        "loss is measured",
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to compress (default: the newest)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="values that replace the recipe's, e.g. calibration.sequences=32; or several devices to compress on, "
        "without a loss, e.g. parallel.tensor=4",
    )
    text = parser.add_argument_group("held-out text, which the perplexity is measured on")
    text.add_argument("--data", metavar="PATH", nargs="+", help="files, directories or globs (default: the run's own)")
    text.add_argument("--text-key", metavar="KEY", default="text", help="JSON key or column with the text (text)")
    text.add_argument("--max-tokens", type=int, metavar="N", help="tokens of the perplexity before and after (all)")
    text.add_argument(
        "--layer-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of the perplexity with one layer alone compressed (8192); 0 leaves it out",
    )
    return add_examples(
        parser,
        "compress --run runs/quickstart --recipe int8 --out runs/quickstart-int8",
        "compress --run runs/quickstart --recipe RECIPE.yaml --out runs/small --max-tokens 100000",
        "compress --run models/qwen --recipe int4-gptq 'calibration.data=[texts/*.txt]'",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxstack compress` with command-line arguments and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    # --data, which takes several words, would take overrides that follow it too.
    args = make_parser().parse_intermixed_args(sorted(words, key=lambda word: not _OVERRIDE.match(word)))
    return run_command("jaxstack compress", on_first_process(lambda: _compress(args)), _LESS_MEMORY)


def _compress(args: argparse.Namespace) -> None:
    for name, least in (("max_tokens", 1), ("layer_tokens", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}; found {value}.")
    from jaxstack.compress.after_training.report import summary_lines
    from jaxstack.compress.after_training.run import CompressOptions, compress
    from jaxstack.compress.config import load_recipe
    from jaxstack.run.evaluate import TextOptions

    out = args.out or f"{Path(args.run)}-{Path(args.recipe).stem}"
    text = TextOptions(args.data or (), args.text_key, args.max_tokens)
    layout = [word for word in args.overrides if word.startswith("parallel.")]
    result = compress(
        args.run,
        load_recipe(args.recipe, [word for word in args.overrides if word not in layout]),
        out,
        CompressOptions(args.step, text, args.layer_tokens, args.from_disk, layout),
        report=lambda line: print(line, file=sys.stderr),
    )
    print("\n".join(summary_lines(result)))
    print(f"written to {out}; its report is {os.path.join(out, 'report.html')}")


if __name__ == "__main__":
    sys.exit(main())
