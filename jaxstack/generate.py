"""The command `python -m jaxstack.generate --run DIR --prompt TEXT`: sample text, streamed to the terminal."""

import argparse
import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from jaxstack.cli import CommandParser, add_examples, fill_option_from_overrides, run_command
from jaxstack.errors import ConfigError
from jaxstack.heartbeat import doing, silence

if TYPE_CHECKING:
    from jaxstack.decoding.sampling import Sampling
    from jaxstack.run.generate import GeneratedText
    from jaxstack.run.load import Run

_LESS_MEMORY = (
    "--batch-size or --max-tokens, use more devices (parallel.tensor), or hold fewer layers in memory "
    "(--resident-layers)"
)
"""Ways to need less device memory, for the message that there is too little."""


def make_parser() -> CommandParser:
    """Return the command-line parser of `python -m jaxstack.generate`."""
    parser = CommandParser(
        prog="jaxstack generate",
        description="Sample text from a trained run or a Hugging Face checkpoint. A single text is streamed.",
        epilog="Devices: by default the weights are sharded over as many devices as divide the model's key/value "
        "heads. Choose a layout with parallel.data=2 parallel.tensor=4 and the like, and a dtype with "
        "precision.compute=float32.",
    )
    parser.add_argument("--run", metavar="DIR", help="run directory, or Hugging Face checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="parallel.key=value", help="layout of the devices, precision")
    text = parser.add_argument_group("prompts")
    text.add_argument(
        "--prompt", metavar="TEXT", action="append", help="text to continue, repeatable (default: a new document)"
    )
    text.add_argument("--prompts", metavar="FILE", help='prompts, one JSON object per line: {"prompt": "Once"}')
    text.add_argument("--samples", type=int, default=1, metavar="N", help="texts per prompt (default 1)")
    text.add_argument("--chat", action="store_true", help="format prompts by the tokenizer's chat template")
    text.add_argument(
        "--no-document-start", action="store_true", help="do not begin prompts with the tokenizer's document-start id"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default 0.8)"
    )
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that sum to P")
    sampling.add_argument(
        "--min-p", type=float, metavar="P", help="sample from tokens at least P times as likely as the likeliest"
    )
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="of the first sample; the next has N + 1")
    end = parser.add_argument_group("end of a text")
    end.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate (default 200, or what fits)")
    end.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text, repeatable")
    more = parser.add_argument_group("more")
    more.add_argument("--batch-size", type=int, default=16, metavar="N", help="texts per batch (default 16)")
    more.add_argument(
        "--resident-layers",
        type=int,
        metavar="N",
        help="hold N layers of a Hugging Face checkpoint in memory, and bring the others when they are needed",
    )
    more.add_argument(
        "--weights",
        choices=("files", "host", "peers"),
        help="where the other layers are: in the checkpoint's files (default), in host memory, or in the memory of the "
        "other devices (peers)",
    )
    more.add_argument("--step", type=int, metavar="N", help="checkpoint to load (default: the newest)")
    more.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="compress the weights at loading by a recipe of jaxstack compress that needs no calibration, such as "
        "fp8-dynamic",
    )
    more.add_argument("--json", action="store_true", help="print one JSON object per text")
    return add_examples(
        parser,
        'generate --run runs/quickstart --prompt "def "',
        'generate --run runs/quickstart --prompt "import " --temperature 0 --max-tokens 20',
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Sample text for the given command-line arguments, and return the exit code."""
    parser = make_parser()
    hint = " (the text to continue is --prompt)"
    args = fill_option_from_overrides(parser, parser.parse_intermixed_args(argv), "run", os.path.isdir, hint)
    return run_command("jaxstack generate", lambda: _generate(args), _LESS_MEMORY)


def _generate(args: argparse.Namespace) -> None:
    for name in ("max_tokens", "samples", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; found {value}.")
    if not 0 <= args.seed < 2**32 - args.samples:
        raise ConfigError(f"--seed must be at least 0 and below 2^32 - samples; found {args.seed}.")
    if "" in args.stop:
        raise ConfigError("--stop must have at least one character.")
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a character shows a replacement
        cast(io.TextIOWrapper, sys.stdout).reconfigure(errors="replace")
    from jaxstack.decoding.sampling import Sampling

    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for override in args.overrides:
        if "=" not in override:
            raise ConfigError(f"{override!r} is no setting (section.key=value); for a prompt add --prompt.")
    prompts = _read_prompts(args.prompt, args.prompts)
    from jaxstack.distributed.coordination import is_first
    from jaxstack.observe.what_ran import describe_backends
    from jaxstack.run.join import join_job
    from pallas_kernels import record_choices

    say = functools.partial(print, file=sys.stderr)
    for warning in join_job({**vars(args), "prompts": prompts}):
        say(f"warning: {warning}")
    # All processes generate the same texts, with the devices of all.
    with contextlib.nullcontext() if is_first() else _silent_output():
        with doing("loading the model"):
            run = _open(args, say if is_first() else lambda line: None)
        try:
            with doing("generating"), record_choices() as choices:
                _print_texts(args, run, prompts, sampling)
            if is_first() and (products := describe_backends(choices, "packed_matmul", "float8_mlp")):
                say(products)
        finally:
            run.decoder.unload()


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
    silence()
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        yield


def _open(args: argparse.Namespace, report: Callable[[str], None]) -> "Run":
    from jaxstack.run.load import load, open_window

    if args.resident_layers is None and args.weights is not None:
        raise ConfigError("--weights says where the layers are that are not in memory; add --resident-layers.")
    if args.resident_layers is None:
        run = load(args.run, args.overrides, step=args.step, recipe=args.recipe, report=report)
        run.decoder.join_projections()
    elif args.recipe is not None:
        raise ConfigError("--resident-layers reads weights as they are stored; leave --recipe out.")
    elif args.step is not None:
        raise ConfigError("--resident-layers reads Hugging Face checkpoints, which have no steps; leave --step out.")
    else:
        place = args.weights or "files"
        run = open_window(args.run, args.resident_layers, args.overrides, place=place, report=report)
    report(f"[{args.run}, step {run.step}]")
    return run


def _print_texts(args: argparse.Namespace, run: "Run", prompts: Sequence[str], sampling: "Sampling") -> None:
    from jaxstack.run.generate import generate, stream

    generator = run.text_generator(document_start=not args.no_document_start, chat=args.chat)
    line_end = "\n" if args.chat else ""
    if len(prompts) == args.samples == 1 and not args.json:
        pieces = stream(generator, prompts[0], sampling, max_tokens=args.max_tokens, seed=args.seed, stop=args.stop)
        print(prompts[0], end=line_end, flush=True)
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:  # after Ctrl-C too, so that the message is on a separate line
            print(flush=True)
        return
    texts = generate(
        generator,
        prompts,
        sampling,
        samples=args.samples,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=args.stop,
        batch_size=args.batch_size,
    )
    for text in texts:
        if args.json:
            print(json.dumps(_as_json(text), ensure_ascii=False), flush=True)
        else:
            print(f"--- {_title(text, len(prompts), args.samples)}\n{text.prompt}{line_end}{text.text}", flush=True)


def _read_prompts(given: Sequence[str] | None, file: str | None) -> list[str]:
    """Return the prompts given by `--prompt` and by the lines of the `--prompts` file; [""] if there are none."""
    if file is None:
        return list(given or [""])
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")  # splitlines also cuts at U+2028 inside a text
    except OSError as error:
        raise ConfigError(f"--prompts: cannot read {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts: {file} is not UTF-8 (at byte {error.start:,}); convert it with iconv.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(f'--prompts: line {number} of {file} must be a JSON object such as {{"prompt": "Once"}}.')
        found.append(prompt)
    if not found:
        raise ConfigError(f"--prompts: {file} has no lines.")
    return [*(given or []), *found]


def _as_json(text: "GeneratedText") -> dict[str, object]:
    return {"prompt": text.prompt, "text": text.text, "seed": text.seed, "finish_reason": text.finish_reason}


def _title(text: "GeneratedText", prompts: int, samples: int) -> str:
    if prompts == 1:
        return f"sample {text.sample_index + 1}"
    return f"prompt {text.prompt_index + 1}" + (f", sample {text.sample_index + 1}" if samples > 1 else "")


class _Command(ModuleType):
    """Makes this module callable, as `jaxstack.generate` is the name of a library function too."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from jaxstack.run.load import generate

        return generate(*arguments, **settings)


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    sys.exit(main())
