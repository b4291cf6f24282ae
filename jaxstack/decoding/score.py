"""Scoring of text: log-probabilities of given tokens under a model."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxstack.decoding.decode import ModelOnMesh, Params
from jaxstack.parallel.sharding_context import logical_axis_rules

_MAX_LOGIT_TOKENS = 4096
"""Number of tokens whose logits are in memory at a time."""


class Score(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding would produce it.

    Attributes:
      log_probability: natural logarithm, summed over the tokens of the continuation.
      is_greedy: True if each token is the likeliest at its place.
    """

    log_probability: float
    is_greedy: bool


class Scorer:
    """Computes the log-probabilities of given continuations under a model, in batches padded to few shapes.

    Args:
      model: the model on its mesh.
      batch_size: rows per batch; rounded up to a multiple of the model's `batch_unit`.
    """

    def __init__(self, model: ModelOnMesh, batch_size: int):
        self.model = model
        self.batch_size = -(-batch_size // model.batch_unit) * model.batch_unit
        self._score = jax.jit(self._score_batch, out_shardings=model.rules.sharding(jax.P()))

    def score(
        self, rows: Sequence[tuple[Sequence[int], int]], report: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """Return for each row (ids, first) the summed log-probability of ids[first:] given ids[:first], as a `Score`.

        Args:
          rows: ids of a row, and the index of its first scored token, at least 1.
          report: called after each batch with the number of rows done.

        Returns:
          A score per row.

        Raises:
          ConfigError: an id is not in the model's vocabulary.
        """
        self.model.check_ids([ids for ids, _ in rows])
        found: dict[int, Score] = {}
        order = sorted(
            range(len(rows)), key=lambda number: -len(rows[number][0])
        )  # longest first, to run out of memory early
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            tokens, targets = self._arrange([rows[number] for number in numbers])
            with jax.set_mesh(self.model.rules.mesh):
                sums, greedy = self._score(self.model.params, self.model.non_params, tokens, targets)
            for number, total, all_likeliest in zip(numbers, sums.tolist(), greedy.tolist(), strict=False):
                found[number] = Score(total, all_likeliest)
            report(len(found))
        return [found[number] for number in range(len(rows))]

    def _arrange(
        self, rows: Sequence[tuple[Sequence[int], int]]
    ) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """Return padded int32 arrays of input tokens and target tokens for a batch; a target of -1 is not scored."""
        width = self.model.padded_length(max(len(ids) - 1 for ids, _ in rows))
        tokens, targets = (np.full((self.batch_size, width), fill, np.int32) for fill in (0, -1))
        for row, (ids, first) in enumerate(rows):
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, first - 1 : len(ids) - 1] = ids[first:]
        return tokens, targets

    def _score_batch(
        self, params: Params, non_params: Params, tokens: Int[Array, "B T"], targets: Int[Array, "B T"]
    ) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
        """Return each row's summed log-probability, and whether greedy decoding would produce its targets."""
        with logical_axis_rules(self.model.rules):
            model = self.model.module.merge(params, non_params)
            hidden = model.hidden(tokens)
            length = tokens.shape[1]
            while length % 2 == 0 and length * tokens.shape[0] > _MAX_LOGIT_TOKENS:
                length //= 2

            def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x, wanted = chunk
                logits = model.logits(x)
                chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], -1)[..., 0]
                log_probability = chosen - jax.nn.logsumexp(logits, -1)
                counts = wanted >= 0
                likeliest = (jnp.argmax(logits, -1) == wanted) | ~counts
                return jnp.where(counts, log_probability, 0).sum(1), likeliest.all(1)

            chunks = [jnp.stack(jnp.split(x, tokens.shape[1] // length, 1)) for x in (hidden, targets)]
            sums, greedy = jax.lax.map(score_chunk, tuple(chunks))
        return sums.sum(0), greedy.all(0)
