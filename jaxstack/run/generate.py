"""Generate texts that continue prompts, several samples each, in batches."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import FinishReason, TextGenerator
from jaxstack.errors import ConfigError
from jaxstack.resilience.progress_file import ProgressFile

_DEFAULT_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """A generated text, with its prompt, seed, and the reason why it ended.

    Attributes:
      prompt: the prompt as given.
      text: the continuation, without the prompt and without the stop string.
      seed: seed of this sample; it gives the same text again.
      finish_reason: "stop" at a stop string or a stop token, "length" at the token limit.
      prompt_index: index of the prompt among the given ones.
      sample_index: index of the sample among those of its prompt.
    """

    prompt: str
    text: str
    seed: int
    finish_reason: FinishReason
    prompt_index: int = 0
    sample_index: int = 0


class _Row(NamedTuple):
    """Row of a batch: prompt, token ids and seed of one text to generate, with the indices of its prompt and sample."""

    prompt: str
    ids: list[int]
    seed: int
    prompt_index: int
    sample_index: int


def generate(
    generator: TextGenerator,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    samples: int = 1,
    max_tokens: int | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    batch_size: int = 16,
) -> Iterator[GeneratedText]:
    """Generate `samples` texts for each prompt in batches, and yield them in order as soon as they are complete.

    Args:
      generator: the model with its tokenizer, from `jaxstack.run.load.Run.text_generator`.
      prompts: texts to continue; "" starts a new document.
      sampling: temperature and limits of the choice of tokens.
      samples: texts per prompt.
      max_tokens: token limit of each text; default: 200, or as many as fit the model's context.
      seed: seed of each prompt's first sample; sample i has seed + i.
      stop: strings that end a text.
      batch_size: texts that are generated at a time.

    Raises:
      ConfigError: a prompt is empty or too long, or a stop string is empty.
    """
    encoded = _encode(generator, prompts)
    tokens = _token_limit(generator, encoded, max_tokens)
    # One batch at a time: the rows of all samples together could fill the memory.
    rows = (
        _Row(prompt, ids, seed + sample, prompt_index, sample)
        for prompt_index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
        for sample in range(samples)
    )
    while batch := list(itertools.islice(rows, batch_size)):
        yield from _generate_batch(generator, batch, tokens, sampling, stop)


def stream(
    generator: TextGenerator,
    prompt: str,
    sampling: Sampling,
    *,
    max_tokens: int | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """Generate one text, and yield it piece by piece as its tokens are sampled; arguments as in `generate`."""
    encoded = _encode(generator, [prompt])
    tokens = _token_limit(generator, encoded, max_tokens)
    return (piece.text for piece in generator.stream(encoded, tokens, sampling, seed=[seed], stop=stop))


def _generate_batch(
    generator: TextGenerator, rows: Sequence[_Row], tokens: int, sampling: Sampling, stop: Sequence[str]
) -> Iterator[GeneratedText]:
    """Generate the texts of one batch; yield them in order, each as soon as it and all earlier ones are complete."""
    texts: list[str] = [""] * len(rows)
    reasons: list[FinishReason | None] = [None] * len(rows)
    completed = 0
    signs = ProgressFile.of_this_process()  # for a launcher
    seeds = [row.seed for row in rows]
    for piece in generator.stream([row.ids for row in rows], tokens, sampling, seed=seeds, stop=stop):
        signs.alive()
        texts[piece.row] += piece.text
        reasons[piece.row] = piece.finish_reason
        while completed < len(rows) and (reason := reasons[completed]) is not None:
            row = rows[completed]
            yield GeneratedText(row.prompt, texts[completed], row.seed, reason, row.prompt_index, row.sample_index)
            completed += 1


def _encode(generator: TextGenerator, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt."""
    encoded = [generator.encode(prompt) for prompt in prompts]
    if not all(encoded):
        raise ConfigError("an empty prompt without the document start leaves nothing to go on from; give a prompt.")
    return encoded


def _token_limit(generator: TextGenerator, encoded: Sequence[list[int]], max_tokens: int | None) -> int:
    """Return the number of tokens to generate: `max_tokens`, or a default that fits the model's context."""
    limit = generator.decoder.context_length
    if max_tokens is not None or limit is None:
        return max_tokens or _DEFAULT_TOKENS
    return max(1, min(_DEFAULT_TOKENS, limit - max(map(len, encoded))))
