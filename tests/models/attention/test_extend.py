"""A token mixer with a cache of its own, added in one file, is generated from, and served with other requests."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.attention.base import AttentionKind, AttentionSpec
from jaxstack.models.layer import CacheSlots
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from tests.serve.test_engine import expected, prompts

pytestmark = pytest.mark.longer  # a few seconds each

GREEDY = Sampling(temperature=0)
CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, scan_layers=False,
    initialization="fan_in", initializer_range=0.5, max_position_embeddings=128,
)  # fmt: skip


class MeanState(NamedTuple):
    """Sum of the values so far, and their number, of each row."""

    total: Float[Array, "B K H"]
    count: Float[Array, " B"]


class MeanAttention(AttentionKind):
    """The mean of all values so far, for every query; not shipped."""

    name: str = "mean"

    def attend(self, q, k, v, segment_ids, heads):
        count = jnp.arange(1, v.shape[1] + 1, dtype=v.dtype)[None, :, None, None]
        return self._for_queries(jnp.cumsum(v, axis=1) / count, heads)

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype) -> MeanState:
        return MeanState(jnp.zeros((batch, heads.num_kv_heads, heads.head_dim)), jnp.zeros(batch))

    def store(self, k, v, cache, slots, heads):
        return self.decode(k, k, v, cache, slots, heads)[1]

    def decode(self, q, k, v, cache: MeanState, slots: CacheSlots, heads):
        there = (slots.queries >= 0).astype(v.dtype)
        total = cache.total[:, None] + jnp.cumsum(v * there[:, :, None, None], axis=1)
        count = cache.count[:, None] + jnp.cumsum(there, axis=1)
        out = total / jnp.maximum(count, 1)[:, :, None, None]
        return self._for_queries(out, heads), MeanState(total[:, -1], count[:, -1])

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        return 0.0

    def _for_queries(self, mean, heads: AttentionSpec):
        return jnp.repeat(mean, heads.num_heads // heads.num_kv_heads, axis=2)


def make(rngs: nnx.Rngs) -> Transformer:
    model = Transformer(CONFIG, rngs)
    for layer in model.decoder.layers:
        layer.attention.kind = MeanAttention()
    return model


def test_a_kind_with_a_state_is_generated_from_and_served():
    """Chunks of prompts, more requests than slots, against whole forward passes."""
    module = ModuleArrays(make)
    rules = make_rules(make_mesh(ParallelConfig(), jax.devices()[:1]))
    decoder = Decoder(module, *module.init(jax.random.key(0)), rules)
    asked = prompts([40, 3, 21])
    wanted = [expected(decoder, prompt, 4) for prompt in asked]
    assert len({tuple(answer) for answer in wanted}) > 1
    rows = list(decoder.generate(asked, 4, GREEDY))
    assert [[int(row[i]) for row in rows] for i in range(3)] == wanted
    with Engine(decoder, EngineConfig(slots=2, chunk=16), warm_up=False) as engine:
        handles = [engine.submit(prompt, 4, GREEDY) for prompt in asked]
        assert [handle.result() for handle in handles] == wanted
