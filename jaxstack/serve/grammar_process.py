"""Compiles grammars on trial in a separate process, which a time limit or a crash of the library may end.

llguidance can neither be interrupted nor does it limit its recursion: terminals that refer to each other 3,000 times
compile for minutes, and a chain of 2,000 references in a JSON schema overflows the stack and ends the process. What has
compiled here compiles in the server too.

This file is also the program of that process. It imports nothing else of this project, so that the process starts in a
tenth of a second.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

import llguidance

_MOST_ITEMS = 20_000
"""Limit of llguidance on the alternatives at one place of an answer, such as the optional properties of an object."""
_WHITE_SPACE = r" |\n {0,32}"
"""Between the values of JSON: a space, or a line break with an indentation. Without a limit, a weak model may write
white space up to its token limit, because it is valid everywhere."""
_STACK_BYTES = 2 * 2**20
"""Stack of the compiling thread: a quarter of that of the server's threads, so that no grammar fits here only."""
_MEMORY_BYTES = 4 * 2**30
"""Limit on the address space of the process."""


def compile_grammar(kind: str, value: object, tokenizer: Any) -> Any:
    """Return llguidance's matcher of a grammar at the start of an answer, which may be in an error state.

    Args:
      kind: what `value` is, a `jaxstack.serve.grammar.Kind`.
      value: a JSON schema (True: any JSON value), a regular expression, a list of texts, or a Lark grammar.
      tokenizer: an `llguidance.LLTokenizer`.

    Raises:
      ValueError: the value does not suit the kind, or llguidance cannot read it.
    """
    limits = llguidance.LLParserLimits(max_items_in_row=_MOST_ITEMS)
    return llguidance.LLMatcher(tokenizer, _write(kind, value), log_level=0, limits=limits)


def _write(kind: str, value: object) -> str:
    """Convert a JSON schema, regular expression, choices or grammar to llguidance's text format."""
    write = llguidance.LLMatcher
    if kind == "json":
        schema = json.dumps({} if value is True else value)
        return write.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITE_SPACE})
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise ValueError("give a list of texts")
        # A terminal (in capitals) becomes one automaton; each alternative of a rule would be parsed separately.
        return write.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in value))
    if not isinstance(value, str):
        raise ValueError(f"give a text; found {type(value).__name__}")
    return write.grammar_from_regex(value) if kind == "regex" else write.grammar_from_lark(value)


class GrammarProcess:
    """Starts processes that compile grammars on trial, one for each thread that asks at the same time. Thread-safe.

    Args:
      seconds: time limit of one compilation.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._idle: list[subprocess.Popen[bytes]] = []

    def check(self, kind: str, value: object) -> None:
        """Compile a grammar in a process.

        Raises:
          ValueError: the grammar is wrong, takes longer than the time limit, or ends the process.
        """
        process = self._take()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, value]).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            process.stdin.close()
            process.stdout.close()
            if process.wait() == -signal.SIGALRM:
                raise ValueError(f"it does not compile within {self._seconds:g} s; simplify it")
            raise ValueError("it is nested too deeply, or needs too much memory to compile; simplify it")
        self._idle.append(process)
        error = json.loads(answer)
        if error is not None:
            raise ValueError(error)

    def _take(self) -> subprocess.Popen[bytes]:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
        # Without -P, modules next to this file would hide the standard library; in a separate session, Ctrl-C
        # reaches the server only. The process ends at the end of its input, when the server does.
        command = [sys.executable, "-P", __file__, str(self._seconds)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _try_grammars(seconds: float) -> None:
    """Compile each grammar that standard input has as a line of JSON; print null or the error as a line of JSON."""
    tokenizer = llguidance.LLTokenizer("byte")
    for line in sys.stdin.buffer:
        # The default action of the signal ends the process even inside the library.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        kind, value = json.loads(line)
        try:
            matcher = compile_grammar(kind, value, tokenizer)
            if not matcher.is_error():
                matcher.compute_bitmask()
            error = matcher.get_error() if matcher.is_error() else None
        except (ValueError, TypeError) as failure:
            error = str(failure)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_try_grammars, args=(float(sys.argv[1]),))
    thread.start()
    thread.join()
