"""`python -m jaxstack.evaluate --run DIR`: loss and bits per byte on held-out text; tasks of the evaluation harness."""

import argparse
import re
import sys
from collections.abc import Sequence

from jaxstack.cli import add_examples, run_command
from jaxstack.errors import ConfigError

_OVERRIDE = re.compile(r"(parallel|precision)\.\w+=")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxstack evaluate",
        description="Loss, perplexity and bits per byte of a trained run or a Hugging Face checkpoint, by default on "
        "the run's own held-out text; with --tasks, multiple-choice and generation tasks of the lm-evaluation-harness.",
        epilog="Devices: the loss uses the run's own layout where it fits the machine, tasks shard the weights over as "
        "many as divide the model's key/value heads. parallel.data=2 parallel.tensor=4 and the like choose a layout.",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="parallel.key=value", help="layout of the devices, precision")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    text = parser.add_argument_group("held-out text")
    text.add_argument("--data", metavar="PATH", nargs="+", help="files, directories or globs to evaluate on instead")
    text.add_argument("--text-key", metavar="KEY", default="text", help="key or column of the text (default: text)")
    text.add_argument("--max-tokens", type=int, metavar="N", help="stop after N tokens")
    tasks = parser.add_argument_group("tasks (pip install 'jaxstack[eval]')")
    tasks.add_argument("--tasks", metavar="TASK", nargs="+", help="names, e.g. hellaswag arc_easy, or task files")
    tasks.add_argument("--include-path", metavar="DIR", help="directory with further task files")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples before a question (default: the task's)")
    tasks.add_argument("--limit", type=int, metavar="N", help="questions of each task at most")
    tasks.add_argument("--batch-size", type=int, default=16, metavar="N", help="rows at a time (default 16)")
    tasks.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a sequence (default: the model's, or as in training)"
    )
    tasks.add_argument(
        "--no-document-start", action="store_true", help="do not put the tokenizer's document-start id before a text"
    )
    tasks.add_argument("--output", metavar="FILE", help="write all that the harness reports there, as JSON")
    return add_examples(
        parser,
        "evaluate --run runs/quickstart",
        "evaluate --run runs/quickstart --data README.md --json",
        "evaluate --run runs/quickstart --tasks arc_easy --limit 100",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    # An option that takes several words would take these too.
    args = make_parser().parse_intermixed_args(sorted(words, key=lambda word: not _OVERRIDE.match(word)))

    def body() -> None:
        for name, least in (("max_tokens", 1), ("num_fewshot", 0), ("limit", 1), ("batch_size", 1), ("max_length", 2)):
            value = getattr(args, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}; found {value}.")
        from jaxstack.run.evaluate import evaluate

        evaluate(args)

    return run_command("jaxstack evaluate", body)


if __name__ == "__main__":
    sys.exit(main())
