"""Shared behaviour of all commands: exit codes, one clear message instead of a traceback, examples in the help."""

import argparse
import contextlib
import errno
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from jaxstack.errors import JaxstackError, memory_shortage, nearest
from jaxstack.heartbeat import beating

MESSAGES = "JAXSTACK_MESSAGES_FILE"
"""Environment variable in which the launcher names the file for the messages with which a process of several ends: what
all of them have to say it prints once."""


def _print_message(text: str, file: str | None) -> None:
    """Print the message with which a command ends on standard error, or leave it to the launcher in its `file`."""
    with contextlib.suppress(OSError):
        if file is not None:
            with open(file, "a", encoding="utf-8", errors="backslashreplace") as messages:
                messages.write(f"{text}\n")
            return
    print(text, file=sys.stderr)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports wrong usage in one line, with the nearest option and a correct command."""

    example = ""
    """A command that is right; set by `add_examples`."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """Parse arguments as in argparse, and refuse empty paths: an unset variable of a shell gives one.

        Without this, "" would be the current directory.
        """
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            given = getattr(found, action.dest, None)
            path = str(action.metavar).split("|")[-1] in ("DIR", "FILE", "PATH", "SOURCE")
            if path and "" in (given if isinstance(given, list) else [given]):
                self.error(f"{'/'.join(action.option_strings) or action.metavar} is empty")
        return found, rest

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition("unrecognized arguments: ")
        unknown = next((word for word in words.split() if word.startswith("-")), None)
        if not kind and unknown is not None:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            alike = nearest(unknown.partition("=")[0], options)
            message = f"there is no option {unknown}" + (f"; {alike}" if alike.startswith("did you mean") else "")
        example = f" For example: {self.example}; all options: {self.prog} --help" if self.example else ""
        text = f"{self.prog}: {message.rstrip('.')}{'' if message.endswith('?') else '.'}{example}"
        _print_message(text, os.environ.get(MESSAGES))
        self.exit(2)


def fill_option_from_overrides(
    parser: CommandParser, arguments: argparse.Namespace, name: str, accepts: Callable[[str], bool], hint: str = ""
) -> argparse.Namespace:
    """Set a missing required option to the first positional argument that `accepts` takes as its value.

    Args:
      parser: the parser, which exits if the value is missing.
      arguments: the parsed arguments, with `overrides`; changed in place.
      name: name of the option, without dashes.
      accepts: returns True for a word without `=` that is the value.
      hint: end of the message if the value is missing.

    Returns:
      The arguments.
    """
    if getattr(arguments, name) is None:
        word = next((word for word in arguments.overrides if "=" not in word and accepts(word)), None)
        if word is None:
            parser.error(f"--{name} is missing{hint}")
        arguments.overrides.remove(word)
        setattr(arguments, name, word)
    return arguments


def add_examples(parser: CommandParser, *examples: str) -> CommandParser:
    """Add example commands to the end of a parser's help, each on its own line so that it can be copied.

    Args:
      parser: the parser, which is changed in place; its description and epilog are wrapped here.
      examples: arguments after `python -m jaxstack.`, such as `train --config configs/quickstart.yaml`.

    Returns:
      The parser.
    """
    width = 79
    parser.example = f"python -m jaxstack.{examples[0]}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", width)
    notes = textwrap.fill(parser.epilog, width) + "\n\n" if parser.epilog else ""
    parser.epilog = notes + "examples:\n" + "\n".join(f"  python -m jaxstack.{example}" for example in examples)
    return parser


_FILE_SYSTEM_ERRORS = frozenset(
    [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EMFILE]
    + [errno.EFBIG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG]
)
"""Errors of disks, permissions and paths, which are not faults of the program."""


class BrokenPipeTolerantOutput:
    """A text stream that drops its output, instead of failing, once its reader (such as a pipe) is gone.

    A pager, `head` or `tee` may end, and a terminal may be closed, before the command does. Without this, the work of
    hours would be lost with the output.

    Args:
      stream: standard output or standard error.
      notice: called once, when a write finds that the reader is gone.
    """

    def __init__(self, stream: TextIO, notice: Callable[[], None] = lambda: None):
        self._stream = stream
        self._notice = notice
        self._gone = False

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
            # Python flushes its buffer at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._notice()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def tolerate_broken_pipe(name: str) -> Iterator[None]:
    """Context in which a command goes on, with one message, if the reader of its output (a pipe) goes away.

    Args:
      name: name of the command, which begins the message.
    """
    text = f"{name}: nobody reads standard output any more; going on without it"
    errors = BrokenPipeTolerantOutput(sys.stderr)
    output = BrokenPipeTolerantOutput(sys.stdout, lambda: print(text, file=cast(TextIO, errors), flush=True))
    with contextlib.redirect_stdout(cast(TextIO, output)), contextlib.redirect_stderr(cast(TextIO, errors)):
        yield


def run_command(name: str, body: Callable[[], int | None], lower: str = "the sizes of batches and texts") -> int:
    """Run the body of a command; turn exceptions into an exit code and one message on standard error.

    While it prints nothing, lines of `jaxstack.heartbeat` show that it is at work.

    Args:
      name: name of the command, which begins each message.
      body: does the command's work; returns an exit code, or None for success.
      lower: what needs less device memory, which completes "Lower" if there is too little.

    Returns:
      0 for success, 2 for a configuration or usage error, 1 for a failure, 129 for SIGHUP, 130 for Ctrl-C, 143 for
      SIGTERM. An unexpected failure keeps its traceback: it is a bug in jaxstack to be reported. One of several
      processes that has failed does not return, but ends the process: the others may wait for it.
    """
    messages = os.environ.pop(MESSAGES, None)  # not for commands that this one starts
    code = _exit_code(body, lower, lambda text: _print_message(f"{name}: {text}", messages))
    coordination = _coordination()
    return code if coordination is None else coordination.exit_at_once_on_failure(code)


def _coordination() -> ModuleType | None:
    """Return the module of jobs of several processes if this command has imported it, which takes seconds."""
    return sys.modules.get("jaxstack.distributed.coordination")


def _exit_code(body: Callable[[], int | None], lower: str, say: Callable[[str], None]) -> int:
    try:
        with beating():
            return body() or 0
    except JaxstackError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); without this, Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        say("out of host memory")
        return 1
    except OSError as error:
        if error.errno not in _FILE_SYSTEM_ERRORS:
            traceback.print_exc()
            return 1
        path = error.filename2 or error.filename  # for a rename, the target
        place = f" ({path})" if path else ""
        place += "; a limit on file sizes is reached (ulimit -f)" if error.errno == errno.EFBIG else ""
        say(f"{error.strerror}{place}: correct this, then run the same command again")
        return 1
    except Exception as error:
        coordination = _coordination()
        if coordination is not None and (lost := coordination.as_lost_peer(error)) is not None:
            say(str(lost))
            return lost.exit_code
        if (shortage := memory_shortage(error)) is not None:
            say(f"{shortage}. Lower {lower}.")
            return 1
        traceback.print_exc()
        return 1
