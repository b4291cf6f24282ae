"""Low-rank adapters of dense layers: LoRA (Hu et al. 2021, arXiv:2106.09685), DoRA (Liu et al. 2024, arXiv:2402.09353).

A layer x W becomes x W + s (x A) B with s = alpha / rank, A [in, rank] random and B [rank, out] zero, so that training
starts at the layer as it was. DoRA gives each output a length of its own: the result times m / |W + s A B|, norms over
the inputs, m [out] at first |W|; the norm counts as a constant in the gradient (section 4.3 of the paper).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from jaxstack.config.base import Component, PathRule
from jaxstack.models.dropout import drop, fold_key
from jaxstack.models.layer_paths import choose_for_all, weight_paths
from jaxstack.models.linear import Linear, multiply
from jaxstack.tree_rules import check_patterns
from pallas_kernels import QuantizedWeight


class AdapterRule(PathRule):
    """The adapter of dense layers whose weight has such a path, as decoder/layers/3/mlp/down_proj/kernel."""

    method: Literal["lora", "dora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    """What the adapter adds is scaled by alpha / rank; left out: by 1."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of the adapter's input, while training."""


class AdapterConfig(Component):
    """The adapters of a model. With any, all other parameters are frozen, unless `optimizer.groups` say otherwise."""

    rules: tuple[AdapterRule, ...] = ()
    """The first whose path is found in that of a dense layer's weight decides on its adapter; without, it has none."""


class Adapter(nnx.Module):
    """What `rule` adds to a dense layer; a stack of layers gets a stack of adapters."""

    def __init__(self, layer: Linear, rule: AdapterRule, rngs: nnx.Rngs):
        kernel, known = layer.kernel, layer.kernel.get_metadata()
        axes, stacked = known["logical_axes"], int(known["logical_axes"][:1] == ("layers",))
        cut = stacked + layer.contracted
        (stack, inputs, outputs), rank = _cut(kernel.shape, stacked, cut), rule.rank
        own = {"sum_where_used": True} if known.get("sum_where_used") else {}

        def parameter(value: jax.Array, *axes: str) -> nnx.Param:
            return nnx.Param(value, logical_axes=axes, **own)

        a = jax.random.normal(rngs.params(), (*stack, *inputs, rank)) * math.prod(inputs) ** -0.5
        self.a = parameter(a, *axes[:cut], "rank")
        self.b = parameter(jnp.zeros((*stack, rank, *outputs)), *axes[:stacked], "rank", *axes[cut:])
        self.magnitude: nnx.Param | None = nnx.data(None)
        if rule.method == "dora":
            norms = _column_norms(kernel[...], layer.contracted, stacked)
            self.magnitude = parameter(norms, *axes[:stacked], *axes[cut:])
        self.scale = rule.alpha / rank if rule.alpha is not None else 1.0
        self.dropout = rule.dropout
        self.contracted, self.stacked = layer.contracted, stacked
        self.key: jax.Array | None = nnx.data(None)
        """Draws the dropout mask; set for one pass by `seed_adapters`."""

    def __call__(self, x: jax.Array, y: jax.Array, kernel: jax.Array | QuantizedWeight) -> jax.Array:
        """The layer's result for x [..., in], from y [..., out], which is x times its kernel."""
        x = drop(x, self.dropout, self.key)
        a, b = (p[...].astype(y.dtype) for p in (self.a, self.b))
        low = multiply(jax.lax.dot_general, x.astype(y.dtype), a, self.contracted)
        y = y + multiply(jax.lax.dot_general, low, b, 1) * self.scale
        if self.magnitude is None:
            return y
        value = kernel.carrier if isinstance(kernel, QuantizedWeight) else kernel
        moved = jax.lax.stop_gradient(_moved(value, a, b, self.scale, 0))
        return y * (self.magnitude[...] / _column_norms(moved, self.contracted)).astype(y.dtype)

    def measure(self, layer: Linear) -> None:
        """Sets the magnitudes, where there are some, to those of the layer's present weight and this adapter."""
        if self.magnitude is not None:
            moved = _moved(layer.kernel[...], self.a[...], self.b[...], self.scale, self.stacked)
            self.magnitude[...] = _column_norms(moved, self.contracted, self.stacked)

    def merge(self, kernel: Any, a: Any, b: Any, magnitude: Any = None) -> jax.Array:
        """The kernel [..., in, out], float32, of the layer that computes without an adapter what it does with this one.

        The arrays are those of an adapter of this form, which may be abstract itself.
        """
        moved = _moved(kernel, a, b, self.scale, self.stacked)
        if magnitude is None:
            return moved
        ratio = jnp.asarray(magnitude) / _column_norms(moved, self.contracted, self.stacked)
        return moved * jnp.expand_dims(ratio, tuple(range(self.stacked, self.stacked + self.contracted)))


def _cut(shape: Sequence[int], *cuts: int) -> list[tuple[int, ...]]:
    ends = (0, *cuts, len(shape))
    return [tuple(shape[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _moved(kernel: Any, a: Any, b: Any, scale: float, stacked: int) -> jax.Array:
    """W + s A B, float32, of one layer or of a stack."""
    batch = tuple(range(stacked))
    dims = (((jnp.ndim(a) - 1,), (stacked,)), (batch, batch))
    product = jax.lax.dot_general(
        jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), dims, precision=jax.lax.Precision.HIGHEST
    )
    return jnp.asarray(kernel, jnp.float32) + scale * product


def _column_norms(kernel: jax.Array, contracted: int, stacked: int = 0) -> jax.Array:
    """Norms over the inputs [..., out], float32."""
    inputs = tuple(range(stacked, stacked + contracted))
    return jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=inputs))


def add_adapters(model: Any, rules: Sequence[AdapterRule], rngs: nnx.Rngs) -> Any:
    """Gives a Transformer's dense layers the adapters of the first rule that matches; changed in place.

    Raises:
      ConfigError: a rule tells apart layers that one scan runs, or matches no dense layer.
    """
    table, seen = [*((rule.path, rule) for rule in rules), (".*", None)], {}
    for path, layer in _dense_layers(model):
        names = weight_paths(model, path)
        seen.update(dict.fromkeys(names, 0))
        rule = choose_for_all(names, table, "adapters.rules", "get another adapter")
        layer.adapter = nnx.data(None if rule is None else Adapter(layer, rule, rngs))
    if rules:
        check_patterns([rule.path for rule in rules], seen, "adapters.rules, which are for dense layers")
    return model


def merge_adapters(model: Any) -> Any:
    """The model without adapters that computes the same, in float32; changed in place."""
    for layer in adapted_layers(model).values():
        known: Adapter = layer.adapter
        magnitude = None if known.magnitude is None else known.magnitude[...]
        layer.kernel[...] = known.merge(layer.kernel[...], known.a[...], known.b[...], magnitude)
        layer.adapter = nnx.data(None)
    return model


def measure_magnitudes(model: Any) -> Any:
    """DoRA's magnitudes set to the norms of the present weights; changed in place."""
    for layer in adapted_layers(model).values():
        layer.adapter.measure(layer)
    return model


def adapted_layers(model: Any) -> dict[str, Linear]:
    """The dense layers that have an adapter, by the path of the layer in the module."""
    return {"/".join(map(str, path)): layer for path, layer in _dense_layers(model) if layer.adapter is not None}


def seed_adapters(module: Any, key: jax.Array | None) -> Any:
    """Sets what draws the masks of the adapters' dropout in one pass; without a key there is no dropout."""
    if key is not None:
        for index, layer in enumerate(adapted_layers(module).values()):
            layer.adapter.key = fold_key(key, index)
    return module


def _dense_layers(model: Any) -> list[tuple[tuple[Any, ...], Linear]]:
    return [(path, node) for path, node in nnx.iter_modules(model) if isinstance(node, Linear)]
