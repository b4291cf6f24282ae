"""`python -m jaxstack.generate --run DIR --prompt TEXT`: samples from a trained run, streaming to the terminal."""

import argparse
import io
import sys
from collections.abc import Sequence

from jaxstack.cli import add_examples, run_command
from jaxstack.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxstack generate",
        description="Sample text from a trained run or a Hugging Face checkpoint. One text is shown as it comes.",
        epilog="Devices: by default the weights are sharded over as many as divide the model's key/value heads. "
        "parallel.data=2 parallel.tensor=4 and the like choose a layout, precision.compute=float32 a dtype.",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="parallel.key=value", help="layout of the devices, precision")
    text = parser.add_argument_group("prompts")
    text.add_argument(
        "--prompt", metavar="TEXT", action="append", help="text to go on from, repeatable (default: a new document)"
    )
    text.add_argument("--prompts", metavar="FILE", help='prompts, one JSON object a line: {"prompt": "Once"}')
    text.add_argument("--samples", type=int, default=1, metavar="N", help="texts for each prompt (default 1)")
    text.add_argument("--chat", action="store_true", help="ask the prompts by the tokenizer's chat template")
    text.add_argument(
        "--no-document-start", action="store_true", help="do not put the tokenizer's document-start id before a prompt"
    )
    draw = parser.add_argument_group("drawing tokens")
    draw.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest (default 0.8)")
    draw.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    draw.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that sum to P")
    draw.add_argument("--min-p", type=float, metavar="P", help="draw among tokens P times as likely as the likeliest")
    draw.add_argument("--seed", type=int, default=0, metavar="N", help="of the first sample; the next has N + 1")
    end = parser.add_argument_group("end")
    end.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate (default 200, or what fits)")
    end.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text, repeatable")
    more = parser.add_argument_group("more")
    more.add_argument("--batch-size", type=int, default=16, metavar="N", help="texts at a time (default 16)")
    more.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    more.add_argument("--json", action="store_true", help="print one JSON object a text")
    return add_examples(
        parser,
        'generate --run runs/quickstart --prompt "def "',
        'generate --run runs/quickstart --prompt "import " --temperature 0 --max-tokens 20',
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = make_parser().parse_intermixed_args(argv)

    def body() -> None:
        for name in ("max_tokens", "samples", "batch_size"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; found {value}.")
        if not 0 <= args.seed < 2**32 - args.samples:
            raise ConfigError(f"--seed must be at least 0 and below 2^32 - samples; found {args.seed}.")
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character shows another
            sys.stdout.reconfigure(errors="replace")
        from jaxstack.run.generate import generate_text

        generate_text(args)

    return run_command("jaxstack generate", body)


if __name__ == "__main__":
    sys.exit(main())
