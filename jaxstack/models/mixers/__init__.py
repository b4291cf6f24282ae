"""The token mixers: the interface of their modules, and the table `MIXERS` of the module of each configuration.

A layer's mixer is configured by a `jaxstack.models.layer.Mixer`; `attention` computes all attention kinds of
`jaxstack.models.attention`, and a mixer with other projections is a further file here.

Dims: B batch, T query length, D model.
"""

from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from jaxstack.models.attention.base import AttentionKind
from jaxstack.models.attention.gated import GatedAttention
from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.attention.sparse_latent import SparseLatentAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.layer import CacheRoom, Context, Layer, LayerCache, Mixer, ParameterCount
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.mixers.gated_attention import GatedAttentionLayer
from jaxstack.models.mixers.gated_delta import GatedDeltaNet
from jaxstack.models.mixers.gemma_attention import GemmaAttentionLayer
from jaxstack.models.mixers.kimi_delta import KimiDeltaAttention
from jaxstack.models.mixers.latent_attention import MultiHeadLatentAttention
from jaxstack.models.mixers.sparse_latent_attention import SparseMultiHeadLatentAttention
from jaxstack.models.mixers.state_space import StateSpaceLayer
from jaxstack.models.norm import LayerInput
from jaxstack.models.recurrent import GatedDelta, KimiDelta, StateSpace


@runtime_checkable
class TokenMixer(Protocol):
    """Interface of the modules of token mixers, in which tokens exchange information. Made with (config, layer, rngs).

    Its parameters name logical axes, as those of `Attention` do, and its output projection is made with
    `make_initializer(config, residual=True)`.
    """

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the mixer's output for its normalized input x [B, T, D], and the cache with these tokens added.

        With `context.slots.pages` the tokens of many sequences are packed in one row, see `PageSlots.split`.
        """
        ...

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache, all zeros, with room for `length` tokens in each of `batch` rows."""
        ...

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache for the sequences of an engine, in pages or with `room.rows` rows."""
        ...

    def complete_cache(self, cache: LayerCache) -> LayerCache:
        """Return an empty cache, which may be that of a stack of layers, with what depends on weights filled in."""
        ...

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of one such layer's mixer."""
        ...

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: Layer, length: int) -> float:
        """Return forward and backward FLOPs per token, without its matrices, in sequences of `length` tokens."""
        ...


MIXERS: dict[type[Mixer], type[TokenMixer]] = {
    GemmaAttention: GemmaAttentionLayer,
    GatedAttention: GatedAttentionLayer,
    AttentionKind: Attention,
    SparseLatentAttention: SparseMultiHeadLatentAttention,
    LatentAttention: MultiHeadLatentAttention,
    KimiDelta: KimiDeltaAttention,
    GatedDelta: GatedDeltaNet,
    StateSpace: StateSpaceLayer,
}
"""The module of each token mixer, by the class (or a base class, which follows it) of its configuration."""


def mixer_module(mixer: Mixer) -> type[TokenMixer]:
    """Return the class of the module that computes a token mixer, from the table `MIXERS`.

    Raises:
      KeyError: the table has none for it.
    """
    found = next((module for kind, module in MIXERS.items() if isinstance(mixer, kind)), None)
    if found is None:
        raise KeyError(f"no module computes {type(mixer).__name__}; add a row to jaxstack.models.mixers.MIXERS.")
    return found
