"""The command `python -m jaxstack.evaluate --run DIR`: loss on held-out text, and lm-evaluation-harness tasks."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxstack.cli import CommandParser, add_examples, fill_option_from_overrides, run_command
from jaxstack.errors import ConfigError
from jaxstack.heartbeat import doing, silence

if TYPE_CHECKING:
    from jaxstack.run.evaluate import Evaluation, TextLoss

_OVERRIDE = re.compile(r"(parallel|precision)\.\w+=")

_LESS_MEMORY = "--batch-size or --max-length of tasks, or use more devices (parallel.fsdp)"
"""Ways to need less device memory, for the message that there is too little."""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack evaluate",
        description="Compute loss, perplexity and bits per byte of a trained run or a Hugging Face checkpoint, by "
        "default on the run's own held-out text. With --tasks, run multiple-choice and generation tasks of the "
        "lm-evaluation-harness.",
        epilog="Devices: the loss uses the run's own layout if it fits this machine; tasks shard the weights over as "
        "many devices as divide the model's key/value heads. Choose another layout with parallel.data=2 "
        "parallel.tensor=4 and the like.",
    )
    parser.add_argument("--run", metavar="DIR", help="run directory, or Hugging Face checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="parallel.key=value", help="layout of the devices, precision")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to evaluate (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    text = parser.add_argument_group("held-out text")
    text.add_argument("--data", metavar="PATH", nargs="+", help="files, directories or globs to evaluate on instead")
    text.add_argument("--text-key", metavar="KEY", default="text", help="JSON key or column with the text (text)")
    text.add_argument("--max-tokens", type=int, metavar="N", help="stop after N tokens")
    tasks = parser.add_argument_group("tasks (pip install 'jaxstack[eval]')")
    tasks.add_argument("--tasks", metavar="TASK", nargs="+", help="names, e.g. hellaswag arc_easy, or task files")
    tasks.add_argument("--include-path", metavar="DIR", help="directory with additional task files")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples per question (default: the task's)")
    tasks.add_argument("--limit", type=int, metavar="N", help="maximum number of questions per task")
    tasks.add_argument("--batch-size", type=int, default=16, metavar="N", help="sequences per batch (default 16)")
    tasks.add_argument(
        "--max-length", type=int, metavar="N", help="tokens per sequence (default: the model's, or as in training)"
    )
    tasks.add_argument(
        "--no-document-start", action="store_true", help="do not begin texts with the tokenizer's document-start id"
    )
    tasks.add_argument("--output", metavar="FILE", help="write everything that the harness reports to a JSON file")
    return add_examples(
        parser,
        "evaluate --run runs/quickstart",
        "evaluate --run runs/quickstart --data README.md --json",
        "evaluate --run runs/quickstart --tasks arc_easy --limit 100",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.evaluate` with the arguments `argv`; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    # An option that takes several words would take overrides that follow it too.
    parser = make_parser()
    args = parser.parse_intermixed_args(sorted(words, key=lambda word: not _OVERRIDE.match(word)))
    fill_option_from_overrides(parser, args, "run", os.path.isdir)
    return run_command("jaxstack evaluate", lambda: _evaluate(args), _LESS_MEMORY)


def _evaluate(args: argparse.Namespace) -> None:
    for name, least in (("max_tokens", 1), ("num_fewshot", 0), ("limit", 1), ("batch_size", 1), ("max_length", 2)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}; found {value}.")
    from pathlib import Path

    from jaxstack.distributed.coordination import is_first
    from jaxstack.files import write_file
    from jaxstack.run.evaluate import TaskOptions, TextOptions, evaluate
    from jaxstack.run.join import join_job

    for warning in join_job(vars(args)):
        _say(f"warning: {warning}")
    if not is_first():
        silence()

    tasks = TaskOptions(
        args.tasks,
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        batch_size=args.batch_size,
        max_length=args.max_length,
        document_start=not args.no_document_start,
    )
    with doing("evaluating"):
        result = evaluate(
            args.run,
            args.overrides,
            step=args.step,
            text=TextOptions(args.data or (), args.text_key, args.max_tokens) if args.data or not args.tasks else None,
            tasks=tasks if args.tasks else None,
            report=_say if is_first() else lambda line: None,
        )
    if not is_first():
        return
    if args.output is not None and args.tasks:
        write_file(Path(args.output), (json.dumps(result.harness_results, indent=2, default=str) + "\n").encode())
    print(json.dumps(_as_json(result)) if args.json else "\n".join(_as_lines(args.run, result)))


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _as_json(result: "Evaluation") -> dict[str, object]:
    values: dict[str, object] = {"step": result.step}
    if (text := result.text) is not None:
        values |= {"eval_loss": text.loss, "eval_items": text.tokens, "eval_seconds": text.seconds}
        values["eval_perplexity"] = text.perplexity
        if text.bits_per_byte is not None:
            values["eval_bits_per_byte"] = text.bits_per_byte
        values["bytes"] = text.bytes
        values["row_length"] = text.row_length
    return values if result.tasks is None else {**values, "tasks": result.tasks}


def _as_lines(run: str, result: "Evaluation") -> list[str]:
    lines = [f"{run}, step {result.step}"]
    if result.text is not None:
        lines += _text_lines(result.text)
    for task, metrics in (result.tasks or {}).items():
        lines.append(f"{task}:")
        for name in metrics:
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr", math.nan)
                lines.append(f"  {name:<16}{metrics[name]:.4f}" + (f" +- {error:.4f}" if math.isfinite(error) else ""))
    return lines


def _text_lines(text: "TextLoss") -> list[str]:
    lines = [
        f"held-out text: {int(text.tokens):,} tokens, {text.bytes:,} bytes, in rows of {text.row_length:,} tokens",
        f"  {'loss':<16}{text.loss:.4f} nats per token",
        f"  {'perplexity':<16}{text.perplexity:.4f}",
    ]
    if text.bits_per_byte is not None:
        lines.append(f"  {'bits per byte':<16}{text.bits_per_byte:.4f}")
    return lines


class _Command(ModuleType):
    """Makes this module callable, as `jaxstack.evaluate` is the name of a library function too."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from jaxstack.run.evaluate import evaluate

        return evaluate(*arguments, **settings)


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    sys.exit(main())
