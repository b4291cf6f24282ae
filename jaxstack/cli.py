"""The frame of every command: `jaxstack <subcommand>`, exit codes, one clear message instead of a traceback."""

import argparse
import contextlib
import errno
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

from jaxstack import __version__
from jaxstack.errors import JaxstackError, nearest

COMMANDS = {
    "train": ("jaxstack.train", "train a model from a configuration file"),
    "launch": ("jaxstack.launch.__main__", "start, watch and restart the processes of a node"),
    "generate": ("jaxstack.generate", "sample text from a trained run"),
    "evaluate": ("jaxstack.evaluate", "loss, perplexity and bits per byte of a trained run on held-out data"),
    "plan": ("jaxstack.plan.__main__", "show how a configuration lies on a mesh, without its devices"),
    "convert": ("jaxstack.convert", "Hugging Face checkpoint -> run directory, and back"),
    "prepare": ("jaxstack.prepare", "tokenize text into shards"),
    "checkpoint": ("jaxstack.checkpoint.__main__", "verify, list or prune the checkpoints of a run"),
    "schema": ("jaxstack.schema", "print the JSON schema of configuration files, for editors"),
}
"""Subcommand -> (module with `main(argv) -> int`, what it does)."""


def add_examples(parser: argparse.ArgumentParser, *examples: str) -> argparse.ArgumentParser:
    """The parser with examples under its help, each on a line of its own, so that it can be copied."""
    width = 79
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", width)
    notes = textwrap.fill(parser.epilog, width) + "\n\n" if parser.epilog else ""
    parser.epilog = notes + "examples:\n" + "\n".join(f"  python -m jaxstack.{example}" for example in examples)
    return parser


_DISK = frozenset(
    [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EMFILE]
    + [errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG]
)
"""Errors of the disk, of permissions, and of something else in a file's place: no fault of the program's."""


def main(argv: Sequence[str] | None = None) -> int:
    """`jaxstack <subcommand> ...`, the same as `python -m jaxstack.<subcommand> ...`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: jaxstack <subcommand> [arguments]\n\nsubcommands:")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()))
        print("\n`jaxstack <subcommand> --help` explains each.")
        return 0 if arguments else 2
    name = arguments[0]
    if name == "--version":
        print(f"jaxstack {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"jaxstack: there is no subcommand {name!r}; {nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[name][0]).main(arguments[1:])


class LastingOutput:
    """A text stream that goes on without its reader.

    A pager, `head` or `tee` may end, and a terminal may be closed, before the command does. What is written from then
    on is dropped, so that work of hours is not lost with the output.

    Args:
      stream: standard output or standard error.
      notice: called once, when the reader is found to have gone.
    """

    def __init__(self, stream: TextIO, notice: Callable[[], None] = lambda: None):
        self._stream, self._notice, self._gone = stream, notice, False

    def write(self, text: str) -> int:
        self._guarded(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self._gone = True
            # What Python still holds in its buffer must not fail at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._notice()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output(name: str) -> Iterator[None]:
    """Within it, the process goes on when the reader of its output goes away, and says so on standard error once."""
    text = f"{name}: nobody reads standard output any more; going on without it"
    errors = LastingOutput(sys.stderr)
    output = LastingOutput(sys.stdout, lambda: print(text, file=cast(TextIO, errors), flush=True))
    with contextlib.redirect_stdout(cast(TextIO, output)), contextlib.redirect_stderr(cast(TextIO, errors)):
        yield


def run_command(name: str, body: Callable[[], int | None]) -> int:
    """Runs a command's body and turns what it raises into an exit code and one message on standard error.

    0 success, 2 configuration or usage error, 1 failure, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM. A failure that was not
    foreseen keeps its traceback: it is a fault of jaxstack's, to be reported.
    """
    try:
        return body() or 0
    except JaxstackError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        print(f"{name}: out of host memory", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _DISK:
            traceback.print_exc()
            return 1
        named = error.filename2 or error.filename  # of a file and its replacement, the one that is meant to stay
        place = f" ({named})" if named else ""
        print(f"{name}: {error.strerror}{place}: mend it, and give the same command again", file=sys.stderr)
        return 1
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            print(
                f"{name}: out of device memory: {str(error).splitlines()[0]}. Lower train.global_batch_size or raise "
                "train.gradient_accumulation, set model.remat (full saves most), or shard more (parallel.fsdp).",
                file=sys.stderr,
            )
            return 1
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
