"""The residual stream: how a sublayer reads it through a norm, and how the sublayer's output is added to it."""

from jaxtyping import Array, Float

from jaxstack.models.linear import add
from jaxstack.models.norm import LayerInput, Norm
from jaxstack.parallel import save_for_backward, shard


def shard_residual(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Constrain x to the sharding of the residual stream."""
    return shard(x, "batch", "residual_length", "act_embed")


def normalize(norm: Norm, x: Float[Array, "B T D"]) -> tuple[LayerInput, Float[Array, "B T D"]]:
    """Normalize the input of a sublayer; return (norm(x), x), where x continues as the residual stream.

    Two things that a norm may offer are used here, and change nothing but the speed:

    - `with_residual(x)` computes both results, so that the gradients of both are joined by one kernel. The residual
      stream must then be continued with the second result instead of the x that went in.
    - `as_layer_input(normalized, x)` is an input that dense layers in FP8 recompute while they round it, so that the
      normalized array need not be stored.
    """
    with_residual = getattr(norm, "with_residual", None)
    normalized, x = (norm(x), x) if with_residual is None else with_residual(x)
    normalized = shard_residual(normalized)
    as_layer_input = getattr(norm, "as_layer_input", None)
    return (normalized if as_layer_input is None else as_layer_input(normalized, x)), x


def add_to_residual(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Add a sublayer's output to the residual stream, which is sharded and saved for the backward pass."""
    return save_for_backward(shard_residual(add(update, x)))
