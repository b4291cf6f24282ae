"""What `python -m jaxstack.generate` does: prompts in, text to the terminal as it comes."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxstack.decoding.chat import ChatGenerator
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text import TextGenerator
from jaxstack.errors import ConfigError
from jaxstack.run.load import open_generator

_TOKENS = 200


class _Row(NamedTuple):
    """A text to generate."""

    prompt: str
    ids: list[int]
    seed: int
    title: str


def generate_text(args: argparse.Namespace) -> None:
    """Generates what the parsed arguments say."""
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    prompts = _read_prompts(args)
    generator, step = open_generator(
        args.run, args.overrides, step=args.step, document_start=not args.no_document_start
    )
    print(f"[{args.run}, step {step}]", file=sys.stderr)
    generator, line_end = (ChatGenerator(generator), "\n") if args.chat else (generator, "")
    rows = _make_rows(generator, prompts, args.samples, args.seed)
    tokens = _max_tokens(generator, rows, args.max_tokens)
    if len(rows) == 1 and not args.json:
        print(rows[0].prompt, end=line_end, flush=True)
        for piece in generator.stream([rows[0].ids], tokens, sampling, seed=[args.seed], stop=args.stop):
            print(piece.text, end="", flush=True)
        print()
        return
    for start in range(0, len(rows), args.batch_size):
        some = rows[start : start + args.batch_size]
        for row, text, reason in _finished(generator, some, tokens, sampling, args.stop):
            if args.json:
                line = {"prompt": row.prompt, "text": text, "seed": row.seed, "finish_reason": reason}
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print(f"--- {row.title}\n{row.prompt}{line_end}{text}", flush=True)


def _finished(
    generator: TextGenerator, rows: Sequence[_Row], tokens: int, sampling: Sampling, stop: Sequence[str]
) -> Iterator[tuple[_Row, str, str]]:
    """Each row with its text and why it ended, in order, as soon as it and those before it have ended."""
    texts, reasons, shown = [""] * len(rows), [""] * len(rows), 0
    seeds = [row.seed for row in rows]
    for piece in generator.stream([row.ids for row in rows], tokens, sampling, seed=seeds, stop=stop):
        texts[piece.row] += piece.text
        reasons[piece.row] = piece.reason or ""
        while shown < len(rows) and reasons[shown]:
            yield rows[shown], texts[shown], reasons[shown]
            shown += 1


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts is None:
        return args.prompt or [""]
    try:
        lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
        found = [json.loads(line)["prompt"] for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts: cannot read {args.prompts}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        found = []
    if not found or not all(isinstance(prompt, str) for prompt in found):
        raise ConfigError(f'--prompts: each line of {args.prompts} must be a JSON object such as {{"prompt": "Once"}}.')
    return [*(args.prompt or []), *found]


def _make_rows(generator: TextGenerator, prompts: Sequence[str], samples: int, seed: int) -> list[_Row]:
    rows = []
    for number, prompt in enumerate(prompts, 1):
        ids = generator.encode(prompt)
        if not ids:
            raise ConfigError("an empty prompt has nothing to go on from without the document start; give one.")
        for sample in range(samples):
            several = f", sample {sample + 1}" if samples > 1 else ""
            title = f"sample {sample + 1}" if len(prompts) == 1 else f"prompt {number}{several}"
            rows.append(_Row(prompt, ids, seed + sample, title))
    return rows


def _max_tokens(generator: TextGenerator, rows: Sequence[_Row], wanted: int | None) -> int:
    """As asked for, or as many as fit."""
    limit = generator.decoder.context_length
    if wanted is not None or limit is None:
        return wanted or _TOKENS
    return max(1, min(_TOKENS, limit - max(len(row.ids) for row in rows)))
