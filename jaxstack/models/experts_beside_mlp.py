"""Gemma 4's feed-forward sublayer (26B-A4B, 2026): a mixture of experts next to a dense MLP, whose outputs are added.

Both read the residual stream through norms of their own, and both outputs are normalized before they are added.

Dims: B batch, T sequence, D model, E experts, k experts per token.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.config import ModelConfig
from jaxstack.models.layer import ParameterCount
from jaxstack.models.mlp import MLPS
from jaxstack.models.moe.router import RouterSums, Routing
from jaxstack.models.moe_layer import MoE
from jaxstack.models.norm import RMSNormWithoutGain, count_norm_parameters, make_norm


class ScaledExperts(MoE):
    """A mixture of experts whose router and experts have gains of their own, for inputs normalized without a gain.

    The router's gain is divided by sqrt(D). The weight of an expert's output has a learned factor.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d = config.hidden_size
        self.input_scale = nnx.Param(jnp.ones(d, jnp.float32), logical_axes=("norm",))
        self.router_scale = nnx.Param(jnp.ones(d, jnp.float32), logical_axes=("norm",))
        factors = jnp.ones(self.moe.num_experts, jnp.float32)
        self.expert_scale = nnx.Param(factors, logical_axes=("router",))

    def _further_parameters(self) -> dict[str, nnx.Param]:
        return {name: getattr(self, name) for name in ("input_scale", "router_scale", "expert_scale")}

    def _inputs(
        self, x: Float[Array, "B T D"], parameters: Mapping[str, Any]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        wide = x.astype(jnp.float32)
        router = wide * parameters["router_scale"] * x.shape[-1] ** -0.5
        return (wide * parameters["input_scale"]).astype(x.dtype), router

    def _weights(self, routing: Routing, parameters: Mapping[str, Any]) -> Float[Array, "B T k"]:
        return routing.weights * jnp.take(parameters["expert_scale"], routing.experts, mode="clip")


class ExpertsBesideMLP(nnx.Module):
    """The sublayer, without the norm of its output: norm(mlp(norm(x))) + norm(experts(x / rms(x)))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d = config.hidden_size
        self.dense_norm = make_norm(config.norm, d, config.norm_eps)
        self.dense = MLPS[config.mlp](config, rngs)
        self.dense_post_norm = make_norm(config.norm, d, config.norm_eps)
        self.experts_norm = RMSNormWithoutGain(config.norm_eps)
        self.experts = ScaledExperts(config, rngs)
        self.experts_post_norm = make_norm(config.norm, d, config.norm_eps)

    def __call__(
        self, x: Float[Array, "B T D"], *, decoding: bool = False, experts: Int[Array, "B T k"] | None = None
    ) -> tuple[Float[Array, "B T D"], RouterSums]:
        """Apply the sublayer to the residual stream x; also return the router's sums. See `MoE`."""
        dense = self.dense_post_norm(self.dense(self.dense_norm(x)))
        mixture, sums = self.experts(self.experts_norm(x), decoding=decoding, experts=experts)
        return dense + self.experts_post_norm(mixture), sums

    @staticmethod
    def count_scales(config: ModelConfig) -> ParameterCount:
        """Count the parameters of a sublayer that neither the MLP, the mixture nor the layer's other norms have."""
        assert config.moe is not None
        d = config.hidden_size
        return ParameterCount(0, 2 * count_norm_parameters(config.norm, d) + 2 * d + config.moe.num_experts)
