"""Programs that also record which experts each token was sent to, so that training can send them to the same ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxstack.decoding.decode import Params
from jaxstack.decoding.requests import Request
from jaxstack.decoding.rows import Pages
from jaxstack.decoding.step import ScoredPrograms
from jaxstack.models.layer import CacheRoom, PageSlots
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import shard
from jaxstack.parallel.sharding_context import logical_axis_rules


class ExpertPrograms(ScoredPrograms):
    """Programs that keep the experts of each token beside its keys and values, for models with mixtures of experts.

    The cache has one more element after those of the layers, a table [places, layers, k] with a place for each token of
    each page. So tokens whose keys and values are found in the cache of prefixes have theirs too.
    """

    def make_cache(self, room: CacheRoom, params: Params, non_params: Params) -> Pages:
        """Return an empty cache with an empty table. Traceable."""
        config = self.model.config
        assert config.moe is not None
        shape = room.pages * room.page_size, config.num_layers, config.moe.num_experts_per_tok
        table = jnp.zeros(shape, jnp.uint8 if config.moe.num_experts <= 256 else jnp.int16)
        layers = super().make_cache(room, params, non_params)
        with logical_axis_rules(self.model.rules, self.model.layout):
            return [*layers, shard(table, None, None, None)]

    def merge(self, params: Params, non_params: Params) -> Any:
        """Return the model with its parameters, which records experts in the table. Traceable."""
        return _Recorder(super().merge(params, non_params))

    def finish(self, request: Request) -> None:
        """Set the experts of a request's tokens, before its pages are released."""
        table = np.zeros(self.table_width, np.int32)
        table[: len(request.pages)] = request.pages
        with jax.set_mesh(self.model.rules.mesh):
            request.experts = self._take_pages(self._pages[-1], table)
        request.experts.copy_to_host_async()

    @functools.cached_property
    def _take_pages(self) -> Callable[[jax.Array, np.ndarray], jax.Array]:
        def take(experts: jax.Array, table: jax.Array) -> jax.Array:
            places = table[:, None] * self.page_size + jnp.arange(self.page_size)
            return experts[places.ravel()]

        return jax.jit(take, out_shardings=self.model.rules.sharding(jax.P()))


class _Recorder:
    """A model whose cache has the table of experts as its last element; see `ExpertPrograms`."""

    def __init__(self, model: Transformer):
        self._model = model
        self.logits = model.logits

    def decode_packed(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        slots: PageSlots,
        pages: Pages,
        *,
        layers_together: int = 1,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Run the next tokens of many sequences; return hidden states and the updated cache."""
        assert layers_together == 1
        *layers, table = pages
        hidden, layers, experts = self._model.decode_packed_with_experts(tokens, positions, slots, layers)
        return hidden, [*layers, table.at[slots.write].set(experts.astype(table.dtype), mode="drop")]
