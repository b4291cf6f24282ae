"""The model of a run, made from its configuration."""

from collections.abc import Callable

from flax import nnx
from jax.typing import DTypeLike

from jaxstack.models import Transformer, add_adapters, with_kv_cache
from jaxstack.run_config import RunConfig


def build_model(config: RunConfig, dtype: DTypeLike) -> Callable[[nnx.Rngs], Transformer]:
    """Return a function that creates the configured model, with its adapters, from random keys (`nnx.Rngs`).

    Args:
      dtype: dtype of the computation.
    """

    def make(rngs: nnx.Rngs) -> Transformer:
        model = add_adapters(Transformer(config.model, rngs, dtype=dtype), config.adapters.rules, rngs)
        return with_kv_cache(model, config.precision.kv_cache)

    return make
