"""Speculative decoding by the serving engine with trained models: tokens/s and accepted drafts, with and without.

    python -m jaxstack.train --config configs/quickstart.yaml run.name=target
    python -m jaxstack.train --config configs/quickstart.yaml run.name=draft model.num_layers=2 train.steps=1500
    python benchmarks/serving/speculation.py --run runs/target --draft runs/draft

How many drafts are accepted depends on the models and on the text, so that random weights would tell nothing. The
prompts are the beginnings of this repository's own sources, which models trained on Python's standard library have not
seen; the answers are greedy, and stop at no token. Variants: none; n-gram (tokens that followed the newest tokens
earlier in the text); draft model (Leviathan et al. 2022, arXiv:2211.17192); draft model whose attention sublayers run
together in groups of --together (EasySpec, Wu et al. 2025, arXiv:2502.02493). All of their steps have drafts; where
they are `chosen`, those have that are measured to be faster (`engine.drafts: auto`). Each is measured with one client
and with each number of --at-once, for --seconds after all prompts were answered once; a client asks one prompt after
another, so that the number of running requests stays the same. `acceptance` is the share of drafts that were accepted,
`drafted` that of the steps that had drafts, `tokens_per_step` of single requests the tokens that a run of the model
gave, `same_text` the share of answers that equal those without drafts; in bfloat16 other numbers of rows can change the
choice between tokens of almost equal probability. The trials of a choice are part of the time. Rows are appended to
benchmarks/results/speculation.jsonl.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

import jaxstack
from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.runner import EngineStats
from jaxstack.decoding.sampling import Sampling
from jaxstack.distributed.device_setup import cache_compilations, start_devices
from jaxstack.errors import ConfigError
from jaxstack.models import count_parameters
from jaxstack.run.load import Run, load
from jaxstack.serve.config import EngineConfig

GREEDY = Sampling(temperature=0.0)
_PROMPTS = 16
"""Prompts at least, as how well drafts are accepted depends on the text."""
COLUMNS = ("variant", "tokens_per_second_per_device", "times_without", "acceptance", "drafted", "tokens_per_step",
           "same_text", "measured_seconds", "start_seconds")  # fmt: skip


class Measured(NamedTuple):
    """Result of one variant: seconds per token, the answers, shares of accepted drafts and of steps with drafts."""

    seconds: float
    answers: list[list[int]]
    acceptance: float | None
    drafted: float
    tokens_per_step: float
    whole: float
    """Seconds of the measurement."""


def make_prompts(run: Run, count: int, length: int) -> list[list[int]]:
    """Return the first `length` tokens of `count` of jaxstack's own source files, the longest files first.

    Raises:
      ConfigError: there are not that many files of that length.
    """
    files = sorted(Path(jaxstack.__file__).parent.rglob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    prompts = [run.tokenizer.encode(path.read_text(encoding="utf-8")[: 16 * length]) for path in files[:count]]
    found = [[run.tokenizer.document_start, *tokens.tolist()][:length] for tokens in prompts]
    if len(found) < count or any(len(tokens) < length for tokens in found):
        raise ConfigError(f"there are no {count} source files of at least {length} tokens.")
    return found


def measure(engine: Engine, prompts: Sequence[list[int]], tokens: int, least: float, at_once: int) -> Measured:
    """Answer prompts, so many at once, for at least so many seconds, after each has been answered once."""
    answers = [engine.submit(prompt, tokens, GREEDY, stop_tokens=()) for prompt in prompts]
    found = [answer.result() for answer in answers]
    before = _counts(engine.stats)
    began = time.perf_counter()
    numbers = itertools.count()

    def ask() -> None:
        while time.perf_counter() < began + least:
            number = next(numbers) % len(prompts)
            found[number] = engine.submit(prompts[number], tokens, GREEDY, stop_tokens=()).result()

    with ThreadPoolExecutor(at_once) as clients:
        for client in [clients.submit(ask) for _ in range(at_once)]:
            client.result()
    whole = time.perf_counter() - began
    count = next(numbers) * tokens
    steps, drafted, drafts, accepted = (now - then for now, then in zip(_counts(engine.stats), before, strict=True))
    acceptance = accepted / drafts if drafts else None
    return Measured(whole / count, found, acceptance, drafted / steps, count / steps, whole)


def _counts(stats: EngineStats) -> tuple[int, ...]:
    """Return the engine's numbers of steps, of those with drafts, of drafts, and of accepted ones."""
    return stats.steps, stats.draft_steps, stats.draft_tokens, stats.accepted_tokens


def variants(draft: Decoder, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], Decoder | None]]:
    """Yield the name, the engine's settings and the draft model of each variant."""
    count = {"draft_tokens": args.draft_tokens, "drafts": "always"}
    yield "none", {}, None
    for words, model in (("n-gram", None), ("draft model", draft)):
        if "always" in args.drafts:
            yield f"{words}, {args.draft_tokens} drafts", count, model
        if "auto" in args.drafts:
            yield f"{words}, {args.draft_tokens} drafts, chosen", {**count, "drafts": "auto"}, model
    if args.together > 1 and "always" in args.drafts:
        words = f"draft model, {args.draft_tokens} drafts, {args.together} layers together"
        yield words, {**count, "draft_layers_together": args.together}, draft


def open_models(args: argparse.Namespace) -> tuple[Run, Run]:
    """Load the served model and the draft model on one device."""
    runs = [load(path, ["parallel.tensor=1"], report=print) for path in (args.run, args.draft)]
    for run in runs:
        run.decoder.join_projections()
    if runs[0].tokenizer.hash != runs[1].tokenizer.hash:
        raise ConfigError(f"{args.draft} has another tokenizer than {args.run}.")
    return runs[0], runs[1]


def measure_all(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Measure every variant; hand each row to `write` at once, and return all rows."""
    run, draft = open_models(args)
    most = max(args.at_once)
    prompts = make_prompts(run, max(most, _PROMPTS), args.prompt)
    sizes = [count_parameters(each.decoder.config).matmul / 1e6 for each in (run, draft)]
    work = f"speculation {sizes[0]:,.0f}M draft {sizes[1]:,.0f}M prompt {args.prompt} tokens {args.tokens}"
    rows = list[dict[str, Any]]()
    plain = dict[int, Measured]()
    for name, settings, model in variants(draft.decoder, args):
        config = EngineConfig(
            slots=most, context=args.prompt + args.tokens + 16, chunk=64, prefix_cache=False, **settings
        )
        began = time.perf_counter()
        with Engine(run.decoder, config, vocab_size=run.tokenizer.vocab_size, draft=model) as engine:
            start = time.perf_counter() - began
            for at_once in sorted({1, *args.at_once}):
                found = measure(engine, prompts, args.tokens, args.seconds, at_once)
                base = plain.setdefault(at_once, found)
                same = [one == other for one, other in zip(found.answers, base.answers, strict=True)]
                rows.append({
                    "work": f"{work} {run.decoder.module.dtype}", "implementation": "jaxstack",
                    "variant": f"{name}, {at_once} at once", "drafts": name, "at_once": at_once,
                    "device": jax.devices()[0].device_kind, "devices": 1,
                    "tokens_per_second_per_device": 1 / found.seconds, "times_without": base.seconds / found.seconds,
                    "drafted": found.drafted, "measured_seconds": found.whole, "acceptance": found.acceptance,
                    "same_text": sum(same) / len(same), "start_seconds": start,
                    "tokens_per_step": found.tokens_per_step if at_once == 1 else None,
                    "trained_steps": [run.step, draft.step],
                })  # fmt: skip
                write(rows[-1])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="trained run, or checkpoint, that answers")
    parser.add_argument("--draft", required=True, help="smaller one with the same tokenizer, that guesses")
    parser.add_argument("--at-once", type=positive(int), nargs="+", default=[8], help="requests that run at once")
    parser.add_argument("--prompt", type=positive(int), default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive(int), default=256, help="tokens of an answer")
    parser.add_argument("--draft-tokens", type=positive(int), default=4, help="drafts per step")
    parser.add_argument("--drafts", nargs="+", default=["always", "auto"], choices=["always", "auto"],
                        help="steps with drafts: all, or where they are faster (default: both)")  # fmt: skip
    parser.add_argument("--together", type=positive(int), default=2, help="layers of the draft model (1: leave out)")
    parser.add_argument("--seconds", type=positive(float), default=4.0, help="duration of each measurement")
    parser.add_argument("--no-rows", action="store_true", help="print the rows only")
    args = parser.parse_args()
    if not args.no_rows:
        require_commit("speculation")
    start_devices()
    cache_compilations()
    rows = measure_all(args, lambda row: None if args.no_rows else append_rows("speculation", [row]))
    print_table(rows, COLUMNS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
