"""How likely a model finds given tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.parallel.context import logical_axis_rules

_LOGITS_AT_ONCE = 4096
"""Tokens whose logits are in memory together."""


class Score(NamedTuple):
    """Of tokens after given ones."""

    log_probability: float
    """Natural logarithm, summed over them."""
    is_greedy: bool
    """Whether each is the likeliest where it stands."""


class Scorer:
    """Scores rows of tokens in batches of few shapes.

    Args:
      model: on its mesh.
      batch_size: rows at a time, rounded up to what the mesh divides.
    """

    def __init__(self, model: ModelOnMesh, batch_size: int):
        self.model = model
        self.batch_size = -(-batch_size // model.batch_unit) * model.batch_unit
        self._score = jax.jit(self._score_batch, out_shardings=model.rules.sharding(jax.P()))

    def score(
        self, rows: Sequence[tuple[Sequence[int], int]], report: Callable[[int], Any] = lambda done: None
    ) -> list[Score]:
        """The scores of rows (ids, first): of ids[first:] after what is before them; `first` is at least 1.

        Args:
          report: is told how many rows are done.

        Raises:
          ConfigError: an id is none of the model's.
        """
        self.model.check_ids([ids for ids, _ in rows])
        found: dict[int, Score] = {}
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number][0]))  # what needs most memory first
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            tokens, targets = self._arrange([rows[number] for number in numbers])
            with jax.set_mesh(self.model.rules.mesh):
                sums, greedy = self._score(self.model.params, self.model.non_params, tokens, targets)
            for number, total, all_likeliest in zip(numbers, sums.tolist(), greedy.tolist(), strict=False):
                found[number] = Score(total, all_likeliest)
            report(len(found))
        return [found[number] for number in range(len(rows))]

    def _arrange(self, rows: Sequence[tuple[Sequence[int], int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets int32 [batch size, width]; a target of -1 does not count."""
        width = self.model.width(max(len(ids) - 1 for ids, _ in rows))
        tokens, targets = (np.full((self.batch_size, width), fill, np.int32) for fill in (0, -1))
        for row, (ids, first) in enumerate(rows):
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, first - 1 : len(ids) - 1] = ids[first:]
        return tokens, targets

    def _score_batch(
        self, params: Any, non_params: Any, tokens: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        with logical_axis_rules(self.model.rules):
            model = self.model.module.merge(params, non_params)
            hidden = model.hidden(tokens)
            piece = tokens.shape[1]
            while piece % 2 == 0 and piece * tokens.shape[0] > _LOGITS_AT_ONCE:
                piece //= 2

            def of_piece(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x, wanted = part
                logits = model.logits(x)
                chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], -1)[..., 0]
                log_probability = chosen - jax.nn.logsumexp(logits, -1)
                counts = wanted >= 0
                likeliest = (jnp.argmax(logits, -1) == wanted) | ~counts
                return jnp.where(counts, log_probability, 0).sum(1), likeliest.all(1)

            pieces = [jnp.stack(jnp.split(x, tokens.shape[1] // piece, 1)) for x in (hidden, targets)]
            sums, greedy = jax.lax.map(of_piece, tuple(pieces))
        return sums.sum(0), greedy.all(0)
