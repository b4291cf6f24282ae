"""The command `python -m jaxstack.prepare`: tokenize text into checksummed files on all cores; can be resumed."""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.distributed.cluster import on_first_process
from jaxstack.errors import ConfigError
from jaxstack.observe.number_format import byte_size, plural

STOPPED = "stopped; the same command goes on from here"


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack prepare",
        description="Tokenize text into fixed-length shards with a SHA-256 each.",
        epilog="Train on it with data.sources: [{path: data/corpus}]. A stopped command resumes when it is run again.",
    )
    add = parser.add_argument
    add(
        "--source",
        action="append",
        required=True,
        metavar="PATH",
        help="a file (text, jsonl, parquet; .gz and .zst too), a directory, a glob, a URL, stdlib",
    )
    add(
        "--output",
        required=True,
        metavar="DIR",
        help="directory for the shards; an unfinished one is resumed",
    )
    add(
        "--tokenizer",
        default="bpe",
        metavar="byte|bpe|FILE",
        help="byte, bpe (trained on the training documents), or a tokenizer.json (default: bpe)",
    )
    add("--vocab-size", type=int, default=4096, metavar="N", help="ids of a trained BPE (default: 4096)")
    add(
        "--document-start",
        metavar="TOKEN",
        help="special token of a tokenizer.json that begins a document",
    )
    add("--shard-tokens", type=int, default=2**24, metavar="N", help="tokens per shard (default: 16777216)")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes (default: one per core); does not change the result",
    )
    add(
        "--held-out-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share held out (default: 0.05; 0: none)",
    )
    add(
        "--format",
        choices=("auto", "text", "jsonl", "parquet"),
        default="auto",
        help="default: by the file names",
    )
    add(
        "--text-key",
        default="text",
        metavar="K",
        help="jsonl key or parquet column with the text (default: text)",
    )
    add("--quiet", action="store_true", help="print nothing but errors")
    return add_examples(
        parser,
        "prepare --source 'corpus/**/*.txt' --output data/corpus",
        "prepare --source news.jsonl.zst --text-key body --tokenizer llama.json --output data/news",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.prepare` with the arguments `argv`; return its exit code."""
    arguments = make_parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)

    def body() -> int:
        _check(arguments)
        try:
            run(arguments)
        except KeyboardInterrupt:
            print(STOPPED, file=sys.stderr)
            return 130
        return 0

    return run_command("jaxstack prepare", on_first_process(body))


def _terminate(number: int, frame: object) -> None:
    """Exit with code 128 + the signal's number; files that are already written are kept for a later resume."""
    print(STOPPED, file=sys.stderr)
    sys.exit(128 + number)


def _check(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.held_out_fraction < 1:
        raise ConfigError(f"--held-out-fraction is {arguments.held_out_fraction}, it must be at least 0 and below 1")
    if arguments.workers is not None and arguments.workers < 1:
        raise ConfigError(f"--workers is {arguments.workers}, it must be at least 1")
    if arguments.shard_tokens < 1024:
        raise ConfigError(f"--shard-tokens is {arguments.shard_tokens}, it must be at least 1024")
    if arguments.vocab_size < 257:
        raise ConfigError(f"--vocab-size is {arguments.vocab_size}; 256 bytes and a document start need at least 257")


def run(arguments: argparse.Namespace) -> None:
    """Tokenize the sources named on the command line into shards (files of token ids).

    Raises:
      JaxstackError: as `jaxstack.data.build_shards.prepare_tokens`.
    """
    # Imported here so that --help and a mistyped option answer at once.
    from jaxstack.data.build_shards import WORK, BuildOptions, available_cores, build
    from jaxstack.data.config import SourceConfig, TokenizerConfig
    from jaxstack.data.prepared_folders import ensure_tokenizer
    from jaxstack.data.tokenization_plan import make_plan

    say = (lambda message: None) if arguments.quiet else (lambda message: print(message, flush=True))
    began = time.perf_counter()
    sources = [SourceConfig(path=p, format=arguments.format, text_key=arguments.text_key) for p in arguments.source]
    output = Path(arguments.output).expanduser()
    _check_output(output, [source.path for source in sources])
    plan = make_plan(sources, arguments.held_out_fraction)
    files = plural(sum(s["files"] for s in plan.sources), "file")
    say(f"{files}, {byte_size(plan.size)}, {plural(len(plan.units), 'unit')}")
    wanted = arguments.tokenizer
    named = wanted if wanted in ("byte", "bpe") else "file"
    config = TokenizerConfig(
        name=named, vocab_size=arguments.vocab_size, path=wanted if named == "file" else None,
        document_start=arguments.document_start,
    )  # fmt: skip
    tokenizer = ensure_tokenizer(config, [plan], output / WORK, say)
    with _progress(arguments.quiet, plan.size) as progress:
        workers = arguments.workers or available_cores()
        options = BuildOptions(arguments.shard_tokens, workers, progress.say, progress.update)
        index = build(plan, output, tokenizer, options)
    _summarize(index, say)
    say(f"written to {output} in {time.perf_counter() - began:.1f} s")


def _check_output(output: Path, sources: Sequence[str]) -> None:
    """Check the directory for the shards.

    Raises:
      ConfigError: it is a file, or lies in a source directory: its shards would be read as source text next time.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output must be a directory, which is made if it is missing; {output} is a file.")
    place = output.resolve()
    for source in sources:
        folder = Path(source).expanduser()
        if folder.is_dir() and (place == folder.resolve() or folder.resolve() in place.parents):
            raise ConfigError(
                f"--output {output} lies in the source {source}: its shards would be read as text the next time; "
                "choose a directory outside of it."
            )


def _summarize(index: dict, say: Callable[[str], None]) -> None:
    from jaxstack.data.shards import describe_altered_inputs

    for name, split in index["splits"].items():
        say(
            f"{name}: {plural(split['documents'], 'document')}, {byte_size(split['bytes'])}, "
            f"{plural(split['tokens'], 'token')}, {plural(len(split['shards']), 'shard')}"
        )
    for note in describe_altered_inputs(index):
        say(note)


class _Lines:
    """Shows the progress of tokenization as plain lines of text, at most one every five seconds."""

    def __init__(self, show: bool):
        self._show = show
        self._began = self._last = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def say(self, message: str) -> None:
        if self._show:
            print(message, flush=True)

    def update(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._last >= 5:
            self._last = now
            rate = byte_size(done / (now - self._began))
            self.say(f"{byte_size(done)} of {byte_size(total)} ({100 * done / max(total, 1):.0f}%), {rate}/s")


class _Bar:
    """Shows the progress of tokenization as a bar on a terminal."""

    def __init__(self, total: int):
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        self._bar = Progress(TextColumn("tokenizing"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        self._task = self._bar.add_task("tokenizing", total=total)

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *error):
        self._bar.stop()

    def say(self, message: str) -> None:
        self._bar.console.print(message, highlight=False, markup=False)

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


def _progress(quiet: bool, total: int) -> "_Lines | _Bar":
    if quiet or not sys.stdout.isatty():
        return _Lines(not quiet)
    return _Bar(total)


if __name__ == "__main__":
    sys.exit(main())
