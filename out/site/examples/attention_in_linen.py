"""`flash_attention` in an existing Linen model: one argument changes, the outputs do not.

python docs/examples/attention_in_linen.py
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from pallas_kernels import flash_attention


class LanguageModel(nn.Module):
    """A small causal Transformer as one finds it in many Linen code bases."""

    vocabulary: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    attention_fn: Any = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] -> logits [B, T, V]."""
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(self.heads, attention_fn=self.attention_fn)
            x = x + attention(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Attention function for Flax, [B, T, N, H]. `causal` replaces the mask, so hidden tiles are skipped."""
    return flash_attention(query, key, value, causal=True)


def main() -> float:
    """Return the largest difference between the logits of the two models with the same weights."""
    tokens = jax.random.randint(jax.random.key(0), (2, 128), 0, 64)
    plain, ours = LanguageModel(), LanguageModel(attention_fn=attend)
    weights = plain.init(jax.random.key(1), tokens)
    difference = jnp.max(jnp.abs(plain.apply(weights, tokens) - ours.apply(weights, tokens)))
    print(f"largest difference of the logits: {difference:.1e}")
    return float(difference)


if __name__ == "__main__":
    main()
