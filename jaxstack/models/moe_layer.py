"""The mixture-of-experts sublayer: router, routed experts and shared experts.

Dims: B batch, T sequence, D model, E experts, F width of an expert, k experts per token, t = B T tokens.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.activations import ACTIVATIONS
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import Initializer, make_initializer
from jaxstack.models.mlp import MLPS
from jaxstack.models.moe.exchange import Kernels, compute_on_expert_devices, compute_on_this_device
from jaxstack.models.moe.router import MoEConfig, capacity, route
from jaxstack.models.norm import LayerInput, gradient_carrier
from jaxstack.parallel import TokenSplit, with_local_tokens
from pallas_kernels import grouped_matmul

ROUTER_AXES = ("embed", "router")


class Router(nnx.Module):
    """Weights of the router: the float32 matrix [D, E] that scores experts, and the bias that balances their load."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        shape = config.hidden_size, moe.num_experts
        kernel = make_initializer(config)(rngs.params(), shape, config.hidden_size)
        self.kernel = nnx.Param(kernel, logical_axes=ROUTER_AXES)
        bias = jnp.zeros(moe.num_experts, jnp.float32)
        self.balance_bias = nnx.Param(bias, logical_axes=("router",)) if moe.balance_bias else None


class Experts(nnx.Module):
    """Weights of one projection (up, gate or down) of all experts, stacked as [experts, in, out]."""

    def __init__(
        self, shape: tuple[int, int, int], axes: tuple[str, str, str], initialize: Initializer, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(initialize(rngs.params(), shape, shape[1]), logical_axes=axes)
        self.wants_fp8 = False
        """True if the FP8 rules choose this weight, although its grouped matmuls stay in the compute dtype."""


class MoE(nnx.Module):
    """Weighted sum of each token's k best experts, plus shared experts (Shazeer et al. 2017, arXiv:1701.06538)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        moe = config.moe
        assert moe is not None
        e = moe.num_experts
        d = config.hidden_size
        f = config.expert_size
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        self.router = Router(config, moe, rngs)
        self.up_proj = Experts((e, d, f), ("expert", "embed", "mlp"), inner, rngs)
        self.gate_proj = Experts((e, d, f), ("expert", "embed", "mlp"), inner, rngs) if config.mlp == "gated" else None
        self.down_proj = Experts((e, f, d), ("expert", "mlp", "embed"), outer, rngs)
        shared = config.model_copy(update={"intermediate_size": moe.n_shared_experts * f})
        self.shared_experts = MLPS[config.mlp](shared, rngs) if moe.n_shared_experts else None
        self.moe = moe
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: LayerInput, *, decoding: bool = False) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        """Apply the sublayer to x [B, T, D]; also return the router's losses, summed over tokens.

        Args:
          decoding: no token is dropped, whatever the capacity of the experts.
        """
        x = gradient_carrier(x)
        modules = {"router": self.router, "up": self.up_proj, "gate": self.gate_proj, "down": self.down_proj}
        parameters = {name: _value_and_axes(module.kernel) for name, module in modules.items() if module is not None}
        if self.router.balance_bias is not None:
            parameters["bias"] = _value_and_axes(self.router.balance_bias)

        def local(x: jax.Array, parameters: dict[str, jax.Array], split: TokenSplit) -> tuple[jax.Array, jax.Array]:
            return self._local(x, parameters, split, decoding)

        with jax.named_scope("experts"):
            y, loss = with_local_tokens(local, x, parameters, x.dtype)
        if self.shared_experts is not None:
            with jax.named_scope("shared_experts"):
                y = y + self.shared_experts(x)
        return y, loss

    def _local(
        self, x: jax.Array, parameters: Mapping[str, jax.Array], split: TokenSplit, decoding: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Route this device's tokens x [B, T, D] to experts; return the combined outputs and the router loss."""
        moe = self.moe
        shape = x.shape
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), parameters["router"])
        bias = parameters.get("bias")
        routing = route(moe, logits, bias, sequence_axes=split.sequence_axes, dropless=decoding)
        kernels: Kernels = {name: parameters[name] for name in ("up", "gate", "down") if name in parameters}
        tokens = math.prod(shape[:2])
        arrays = (
            x.reshape(tokens, shape[2]),
            routing.experts.reshape(tokens, -1),
            routing.weights.reshape(tokens, -1),
            kernels,
        )
        devices = moe.num_experts // kernels["up"].shape[0]
        if devices == 1:
            y = compute_on_this_device(self._compute, *arrays)
        else:
            limited = moe.capacity_factor is not None and not decoding
            max_rows = shape[0] * capacity(moe, shape[1]) * kernels["up"].shape[0] if limited else None
            y = compute_on_expert_devices(
                self._compute, *arrays, devices=devices, factor=moe.exchange_factor, max_rows=max_rows
            )
        return y.reshape(shape), routing.loss

    def _compute(
        self, rows: jax.Array, weights: jax.Array, kernels: Kernels, sizes: jax.Array, alignment: int
    ) -> jax.Array:
        """Apply each expert's MLP to its group of rows by grouped matmuls; return the outputs times `weights`."""

        def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return grouped_matmul(x, kernel, sizes, alignment=alignment, implementation=self.moe.implementation)

        hidden = multiply(rows, kernels["up"])
        if "gate" in kernels:
            hidden = self.activation(multiply(rows, kernels["gate"])) * hidden
        else:
            hidden = self.activation(hidden)
        hidden = (hidden * weights[:, None]).astype(rows.dtype)
        return multiply(hidden, kernels["down"])


def _value_and_axes(parameter: nnx.Param) -> tuple[jax.Array, tuple[str, ...]]:
    return parameter[...], parameter.get_metadata()["logical_axes"]
