"""The mixture-of-experts sublayer: router, routed experts and shared experts.

Dims: B batch, T sequence, D model, E experts, F width of an expert, k experts per token, t = B T tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.activations import ACTIVATIONS, clamped_swiglu
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import Initializer, make_initializer
from jaxstack.models.linear import multiply as dense_multiply
from jaxstack.models.mlp import MLPS
from jaxstack.models.moe.exchange import (
    Kernels,
    compute_on_expert_devices,
    compute_on_this_device,
    group_of_rows,
    take_group,
)
from jaxstack.models.moe.router import MoEConfig, RouterSums, Routing, capacity, route
from jaxstack.models.norm import LayerInput, gradient_carrier
from jaxstack.parallel import TokenSplit, with_local_tokens
from pallas_kernels import PackedWeight, fp8_grouped_matmul, grouped_matmul
from pallas_kernels.target import current_target
from pallas_kernels.weight_only.packed import is_packed

ROUTER_AXES = ("embed", "router")


class Router(nnx.Module):
    """Weights of the router: the float32 matrix [D, E] that scores experts, its bias, and one that balances their load.

    The bias and the balancing bias are [E], or None.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        shape = config.hidden_size, moe.num_experts
        kernel = make_initializer(config)(rngs.params(), shape, config.hidden_size)
        self.kernel = nnx.Param(kernel, logical_axes=ROUTER_AXES)
        bias = jnp.zeros(moe.num_experts, jnp.float32)
        self.bias = nnx.Param(bias, logical_axes=("router",)) if moe.router_bias else None
        self.balance_bias = nnx.Param(bias, logical_axes=("router",)) if moe.balance_bias else None


class SharedGate(nnx.Module):
    """The float32 matrix [D, 1] of the gate of the shared experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        kernel = make_initializer(config)(rngs.params(), (config.hidden_size, 1), config.hidden_size)
        self.kernel = nnx.Param(kernel, logical_axes=ROUTER_AXES)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T 1"]:
        """Return each token's gate, between 0 and 1, in the dtype of x."""
        wide = jnp.sum(x.astype(jnp.float32) * self.kernel[...][:, 0], axis=-1, keepdims=True)
        return jax.nn.sigmoid(wide).astype(x.dtype)


class Experts(nnx.Module):
    """Weights of one projection (up, gate or down) of all experts: [experts, in, out], and biases [experts, out].

    In a model from quantized files the kernel may be a `PackedWeight`, whose `stack` is (experts,).
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: tuple[str, str, str],
        initialize: Initializer,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        self.kernel = nnx.Param(initialize(rngs.params(), shape, shape[1]), logical_axes=axes)
        zeros = jnp.zeros((shape[0], shape[2]), self.kernel.dtype)
        self.bias = nnx.Param(zeros, logical_axes=(axes[0], axes[2])) if bias else None
        self.fp8 = False
        """True if the grouped matmuls run in FP8 with a scale for every 128 values, see `fp8_grouped_matmul`."""
        self.contracted = 1
        self.product: Callable[..., jax.Array] = grouped_matmul
        """The grouped matmul itself, which calibration replaces by one that also records its rows."""
        self.adapter: Any = nnx.data(None)
        """`jaxstack.models.adapters.Adapter`, which changes the products before the biases are added; None: no adapter.
        """


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
        into = (e, d, f), ("expert", "embed", "expert_mlp"), inner, rngs, moe.expert_bias
        self.up_proj = Experts(*into)
        self.gate_proj = Experts(*into) if config.mlp == "gated" else None
        self.down_proj = Experts((e, f, d), ("expert", "expert_mlp", "embed"), outer, rngs, moe.expert_bias)
        shared = config.model_copy(update={"intermediate_size": moe.n_shared_experts * f})
        self.shared_experts = MLPS[config.mlp](shared, rngs) if moe.n_shared_experts else None
        self.shared_gate = SharedGate(config, rngs) if moe.shared_expert_gate else None
        self.moe = moe
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(
        self,
        x: LayerInput,
        *,
        decoding: bool = False,
        experts: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterSums]:
        """Apply the sublayer to x [B, T, D]; also return the router's losses and balance, summed over tokens.

        Args:
          decoding: no token is dropped, whatever the capacity of the experts.
          experts: see `route`.
        """
        x = gradient_carrier(x)
        modules = {"router": self.router, **self._projections}
        found = {name: module.kernel for name, module in modules.items()}
        biases = {f"{name}_bias": module.bias for name, module in modules.items()}
        found |= {name: bias for name, bias in biases.items() if bias is not None}
        if self.router.balance_bias is not None:
            found["balance_bias"] = self.router.balance_bias
        found |= self._further_parameters()
        parameters = {name: _value_and_axes(parameter) for name, parameter in found.items()}
        parameters |= self._adapters()

        def local(
            tokens: tuple[jax.Array, jax.Array | None], parameters: dict[str, Any], split: TokenSplit
        ) -> tuple[jax.Array, RouterSums, jax.Array]:
            y, routing = self._local(*tokens, parameters, split, decoding)
            return y, routing.sums, routing.chosen

        with jax.named_scope("experts"):
            # Quantized from what is stored: a copy in the compute dtype would be written for nothing.
            y, sums, chosen = with_local_tokens(local, (x, experts), parameters, x.dtype, self._in_fp8)
        if self.shared_experts is not None:
            with jax.named_scope("shared_experts"):
                shared = self.shared_experts(x)
                y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x))
        return y, sums._replace(experts=chosen)

    def _local(
        self,
        x: jax.Array,
        experts: jax.Array | None,
        parameters: Mapping[str, Any],
        split: TokenSplit,
        decoding: bool,
    ) -> tuple[jax.Array, Routing]:
        """Route this device's tokens x [B, T, D] to experts; return the combined outputs and the routing."""
        moe = self.moe
        shape = x.shape
        x, router_input = self._inputs(x, parameters)
        logits = dense_multiply(jax.lax.dot_general, router_input, parameters["router"], 1)
        if "router_bias" in parameters:
            logits = logits + parameters["router_bias"]
        balance_bias = parameters.get("balance_bias")
        routing = route(
            moe, logits, balance_bias, sequence_axes=split.sequence_axes, dropless=decoding, experts=experts
        )
        kernels = {name: x for name, x in parameters.items() if name.startswith(("up", "gate", "down"))}
        if "down_bias" in kernels:
            kernels["down_bias"] = kernels["down_bias"] / split.summed
        tokens = math.prod(shape[:2])
        devices = moe.num_experts // kernels["up"].shape[0]
        chosen = routing.experts.reshape(tokens, -1)
        if split.expert_axis is not None:
            chosen = _own_experts(chosen, kernels["up"].shape[0], split.expert_axis)
        arrays = (
            x.reshape(tokens, shape[2]),
            chosen,
            self._weights(routing, parameters).reshape(tokens, -1),
            kernels,
        )
        fp8 = bool(self._in_fp8)
        if devices == 1 or split.expert_axis is not None:
            y = compute_on_this_device(self._compute, *arrays, fp8=fp8)
        else:
            limited = moe.capacity_factor is not None and not decoding
            max_rows = shape[0] * capacity(moe, shape[1]) * kernels["up"].shape[0] if limited else None
            y = compute_on_expert_devices(
                self._compute, *arrays, devices=devices, factor=moe.exchange_factor, max_rows=max_rows, fp8=fp8
            )
        return y.reshape(shape), routing

    def _adapters(self) -> dict[str, tuple[jax.Array | PackedWeight, tuple[str, ...]]]:
        """Return arrays of adapters and their logical axes: A and B, and DoRA's factors of the experts' outputs."""
        found = {}
        for name, module in self._projections.items():
            if (adapter := module.adapter) is None:
                continue
            found |= {f"{name}_a": _value_and_axes(adapter.a), f"{name}_b": _value_and_axes(adapter.b)}
            if adapter.magnitude is not None:
                factors = adapter.output_factors(module.kernel.get_value(), adapter.a[...], adapter.b[...])
                found[f"{name}_factors"] = factors, _value_and_axes(adapter.magnitude)[1]
        return found

    def _further_parameters(self) -> dict[str, nnx.Param]:
        """Return the parameters that `_inputs` and `_weights` need, by name; none here."""
        return {}

    def _inputs(
        self, x: Float[Array, "B T D"], parameters: Mapping[str, Any]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Return the input of the experts, in the dtype of x, and that of the router, in float32."""
        return x, x.astype(jnp.float32)

    def _weights(self, routing: Routing, parameters: Mapping[str, Any]) -> Float[Array, "B T k"]:
        """Return the weights of the chosen experts' outputs, float32."""
        return routing.weights

    def _compute(
        self, rows: jax.Array, weights: jax.Array, kernels: Kernels, sizes: jax.Array, alignment: int
    ) -> jax.Array:
        """Apply each expert's MLP to its group of rows by grouped matmuls; return the outputs times `weights`.

        With `MoEConfig.weight_inputs` the rows are multiplied by `weights`, and the outputs are not.
        """
        if self.moe.weight_inputs:
            rows = (rows * weights[:, None]).astype(rows.dtype)
        by_row = self.moe.expert_bias or any(name.endswith("_factors") for name in kernels)
        group = group_of_rows(sizes, rows.shape[0], alignment) if by_row else None
        options = {"group_sizes": sizes, "alignment": alignment, "implementation": self.moe.implementation}

        def adapt(x: jax.Array, y: jax.Array, name: str) -> jax.Array:
            if f"{name}_a" not in kernels:
                return y
            a, b, factors = (cast(Any, kernels.get(f"{name}_{part}")) for part in ("a", "b", "factors"))
            a, b = _widened(a, b)
            inner = grouped_matmul(x, a, **options)
            y = y + grouped_matmul(inner, b, **options) * self._projections[name].adapter.scale
            return y if factors is None else y * take_group(factors, cast(Any, group)).astype(y.dtype)

        def multiply(x: jax.Array, *names: str, weights: jax.Array | None = None) -> tuple[jax.Array, ...]:
            matrices = tuple(kernels[name] for name in names)
            if self._in_fp8.issuperset(names) and not any(map(is_packed, matrices)):
                found = fp8_grouped_matmul(x, cast(tuple[jax.Array, ...], matrices), sizes, alignment=alignment)
            else:
                products = [self._projections[name].product for name in names]
                found = tuple(product(x, w, **options) for product, w in zip(products, matrices, strict=True))
            found = tuple(adapt(x, y, name) for y, name in zip(found, names, strict=True))
            if not self.moe.expert_bias:
                return found
            assert group is not None
            biases = [take_group(cast(jax.Array, kernels[f"{name}_bias"]), group) for name in names]
            biases = [bias if weights is None else bias * weights[:, None] for bias in biases]
            return tuple(y + bias.astype(y.dtype) for y, bias in zip(found, biases, strict=True))

        if "gate" not in kernels:
            (up,) = multiply(rows, "up")
            hidden = self.activation(up)
        else:
            gate, up = multiply(rows, "gate", "up")
            limit = self.moe.swiglu_limit
            hidden = self.activation(gate) * up if limit is None else clamped_swiglu(gate, up, limit)
        # An empty row has the weight 0, by which the biases in it vanish too.
        if not self.moe.weight_inputs:
            hidden = (hidden * weights[:, None]).astype(rows.dtype)
        return multiply(hidden, "down", weights=weights)[0]

    @property
    def _projections(self) -> dict[str, Experts]:
        projections = {"up": self.up_proj, "gate": self.gate_proj, "down": self.down_proj}
        return {name: module for name, module in projections.items() if module is not None}

    @property
    def _in_fp8(self) -> set[str]:
        return {name for name, module in self._projections.items() if module.fp8}


def _own_experts(experts: Int[Array, "t k"], count: int, axis: str) -> Int[Array, "t k"]:
    """Return the numbers of experts among the `count` of this device of `axis`; of the others, `count`."""
    own = experts - jax.lax.axis_index(axis) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def _widened(a: Float[Array, "G D r"], b: Float[Array, "G r F"]) -> tuple[jax.Array, jax.Array]:
    """Return A and B with a rank, filled up with zeros, for which there are grouped matmuls on GPUs."""
    more = -a.shape[2] % 64 if current_target().platform == "cuda" else 0
    return jnp.pad(a, ((0, 0), (0, 0), (0, more))), jnp.pad(b, ((0, 0), (0, more), (0, 0)))


def _value_and_axes(parameter: nnx.Param) -> tuple[jax.Array | PackedWeight, tuple[str, ...]]:
    value = parameter.get_value()
    return value if is_packed(value) else parameter[...], parameter.get_metadata()["logical_axes"]
