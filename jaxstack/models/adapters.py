"""Low-rank adapters of dense layers and of experts: LoRA (Hu et al. 2021, arXiv:2106.09685), DoRA (Liu et al. 2024).

LoRA replaces a layer x W by x W + s (x A) B with s = alpha / rank, A [in, rank] random and B [rank, out] zero, so that
training starts from the unchanged layer. DoRA also learns the magnitude of each output: it multiplies the result by
m / |W + s A B|, with norms over the inputs and m [out] starting at |W|; the norm is a constant in the gradient (section
4.3 of arXiv:2402.09353). Experts' weights are stacked, W [experts, in, out], and so are A, B and m: each expert has an
adapter of its own.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key
from pydantic import Field

from jaxstack.config.base import Component, PathRule
from jaxstack.config.features import Excludes, Feature, Fixed
from jaxstack.errors import ConfigError
from jaxstack.models.dropout import drop, fold_key
from jaxstack.models.linear import Kernel, Linear, multiply
from jaxstack.models.moe_layer import Experts
from jaxstack.parameter_paths import check_patterns, match_common_value, weight_paths
from pallas_kernels import PackedWeight, QuantizedWeight

Module = TypeVar("Module", bound=nnx.Module)

Adaptable: TypeAlias = Linear | Experts
"""A layer that may have an adapter."""


class AdapterRule(PathRule):
    """Adapter settings (method, rank, alpha) of the layers whose weight path matches the rule."""

    method: Literal["lora", "dora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    """The adapter's output is multiplied by alpha / rank; left out: by 1."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the adapter's input during training; routed experts support none."""


class AdapterConfig(Component):
    """Configuration of a model's adapters. All other parameters are frozen unless `optimizer.groups` says otherwise."""

    rules: tuple[AdapterRule, ...] = ()
    """The first rule whose path occurs in the path of a layer's weight decides on its adapter; without a matching rule
    it has none."""


class Adapter(nnx.Module):
    """LoRA or DoRA adapter of one dense layer, or of several layers or experts whose weights are stacked."""

    def __init__(self, layer: Adaptable, rule: AdapterRule, rngs: nnx.Rngs):
        kernel = layer.kernel
        known = layer.kernel.get_metadata()
        axes = known["logical_axes"]
        stacked = sum(name in ("layers", "expert") for name in axes)
        cut = stacked + layer.contracted
        stack, inputs, outputs = _cut(kernel.shape, stacked, cut)
        rank = rule.rank
        metadata = {"sum_where_used": True} if known.get("sum_where_used") else {}

        def parameter(value: jax.Array, *axes: str) -> nnx.Param:
            return nnx.Param(value, logical_axes=axes, **metadata)

        a = jax.random.normal(rngs.params(), (*stack, *inputs, rank)) * math.prod(inputs) ** -0.5
        self.a = parameter(a, *axes[:cut], "rank")
        self.b = parameter(jnp.zeros((*stack, rank, *outputs)), *axes[:stacked], "rank", *axes[cut:])
        self.magnitude: nnx.Param | None = nnx.data(None)
        if rule.method == "dora":
            norms = _column_norms(kernel[...], layer.contracted, stacked)
            self.magnitude = parameter(norms, *axes[:stacked], *axes[cut:])
        self.scale = rule.alpha / rank if rule.alpha is not None else 1.0
        self.dropout = rule.dropout
        self.contracted = layer.contracted
        self.key: jax.Array | None = nnx.data(None)
        """Key of the dropout mask, which `set_adapter_dropout_keys` sets for one forward pass."""

    def __call__(self, x: Float[Array, "..."], y: Float[Array, "..."], kernel: Kernel) -> Float[Array, "..."]:
        """Return the layer's output with the adapter, given the input x [..., in] and y [..., out] = x @ kernel."""
        x = drop(x, self.dropout, self.key)
        a, b = (p[...].astype(y.dtype) for p in (self.a, self.b))
        projected = multiply(jax.lax.dot_general, x.astype(y.dtype), a, self.contracted)
        y = y + multiply(jax.lax.dot_general, projected, b, 1) * self.scale
        if self.magnitude is None:
            return y
        return y * self.output_factors(kernel, a, b).astype(y.dtype)

    def output_factors(self, kernel: Kernel, a: ArrayLike, b: ArrayLike) -> jax.Array:
        """Return DoRA's factor of each output, m / |W + s A B| [..., out] float32, whose norm is a constant."""
        assert self.magnitude is not None, "LoRA has no factors"
        adapted = jax.lax.stop_gradient(self._adapted(kernel, a, b))
        return self.magnitude[...] / _column_norms(adapted, self.contracted, self._count_stacked(a))

    def column_norms(self, kernel: Kernel, a: ArrayLike, b: ArrayLike) -> jax.Array:
        """Return the norm of each output's column of W + s A B [..., out] float32, DoRA's initial magnitudes.

        The arrays are passed in because this adapter may be abstract.
        """
        return _column_norms(self._adapted(kernel, a, b), self.contracted, self._count_stacked(a))

    def _adapted(self, kernel: Kernel, a: ArrayLike, b: ArrayLike) -> jax.Array:
        """Return W + s A B in float32."""
        if isinstance(kernel, PackedWeight):
            value = kernel.dense()
        else:
            value = kernel.carrier if isinstance(kernel, QuantizedWeight) else kernel
        return _adapted_kernel(value, a, b, self.scale, self._count_stacked(a))

    def merge(self, kernel: ArrayLike, a: ArrayLike, b: ArrayLike, magnitude: ArrayLike | None = None) -> jax.Array:
        """Merge the adapter into the kernel: return a float32 kernel that gives the same outputs on its own.

        The arrays are passed in because this adapter may be abstract.
        """
        stacked = self._count_stacked(a)
        adapted = _adapted_kernel(kernel, a, b, self.scale, stacked)
        if magnitude is None:
            return adapted
        ratio = jnp.asarray(magnitude) / _column_norms(adapted, self.contracted, stacked)
        return adapted * jnp.expand_dims(ratio, tuple(range(stacked, stacked + self.contracted)))

    def _count_stacked(self, a: ArrayLike) -> int:
        """Return the number of leading dims of A: those of layers, which are missing inside of a scan, and experts."""
        return jnp.ndim(a) - self.contracted - 1


def _cut(shape: Sequence[int], *cuts: int) -> list[tuple[int, ...]]:
    ends = (0, *cuts, len(shape))
    return [tuple(shape[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _adapted_kernel(kernel: ArrayLike, a: ArrayLike, b: ArrayLike, scale: float, stacked: int) -> jax.Array:
    """Return the kernel with its low-rank update, W + s A B in float32, for one layer or a stack."""
    batch = tuple(range(stacked))
    dims = (((jnp.ndim(a) - 1,), (stacked,)), (batch, batch))
    product = jax.lax.dot_general(
        jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), dims, precision=jax.lax.Precision.HIGHEST
    )
    return jnp.asarray(kernel, jnp.float32) + scale * product


def _column_norms(kernel: jax.Array, contracted: int, stacked: int = 0) -> jax.Array:
    """Return the norm of each output's column of the kernel, over its inputs, [..., out] float32."""
    inputs = tuple(range(stacked, stacked + contracted))
    return jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=inputs))


def add_adapters(model: Module, rules: Sequence[AdapterRule], rngs: nnx.Rngs) -> Module:
    """Give each dense layer and projection of experts of a Transformer the adapter of the first rule for it, in place.

    Raises:
      ConfigError: a rule matches no such layer, only some of the layers that one scan runs, or has dropout for experts.
    """
    table = [*((rule.path, rule) for rule in rules), (".*", None)]
    seen = {}
    for path, layer in _adaptable_layers(model):
        names = weight_paths(cast(Any, model), path)
        seen.update(dict.fromkeys(names, 0))
        rule = match_common_value(names, table, "adapters.rules", "get another adapter")
        if isinstance(layer, Experts) and rule is not None and rule.dropout:
            raise ConfigError(
                f"adapters.rules: {names[0]} are weights of routed experts, whose adapters have no dropout; the rule "
                f"{rule.path!r} has {rule.dropout}. Set it to 0, or put a rule without dropout for them before it."
            )
        layer.adapter = nnx.data(None if rule is None else Adapter(layer, rule, rngs))
    if rules:
        check_patterns([rule.path for rule in rules], seen, "adapters.rules, which are for dense layers and experts")
    return model


def merge_adapters(model: Module) -> Module:
    """Merge all adapters into the model's weights, in float32 and in place."""
    for layer in adapted_layers(model).values():
        adapter: Adapter = layer.adapter
        magnitude = None if adapter.magnitude is None else adapter.magnitude[...]
        layer.kernel[...] = adapter.merge(layer.kernel[...], adapter.a[...], adapter.b[...], magnitude)
        layer.adapter = nnx.data(None)
    return model


def without_adapters(model: Module) -> Module:
    """Return a model that shares the weights of this one and computes without its adapters."""
    plain = nnx.merge(*nnx.split(model))
    for layer in adapted_layers(plain).values():
        layer.adapter = nnx.data(None)
    return plain


def adapted_layers(model: nnx.Module) -> dict[str, Adaptable]:
    """Return the layers that have a LoRA or DoRA adapter, keyed by their path in the module."""
    return {"/".join(map(str, path)): layer for path, layer in _adaptable_layers(model) if layer.adapter is not None}


def set_adapter_dropout_keys(module: Module, key: Key[Array, "..."] | None) -> Module:
    """Set the dropout keys of all adapters for one forward pass, in place; without a key there is no dropout."""
    if key is not None:
        for index, layer in enumerate(adapted_layers(module).values()):
            layer.adapter.key = fold_key(key, index)
    return module


def _adaptable_layers(model: nnx.Module) -> list[tuple[tuple[Any, ...], Adaptable]]:
    return [(path, node) for path, node in nnx.iter_modules(model) if isinstance(node, Linear | Experts)]


FEATURES = (
    Feature(
        "adapters",
        "adapters",
        lambda adapters: bool(adapters.rules),
        ("adapters.rules=[{path: q_proj, rank: 2}]",),
        fixed=Fixed("the adapters", "which merges the adapters trained so far into the weights", free=("dropout",)),
        excludes=(
            Excludes(
                "pipeline",
                "stages stack the weights of their layers, and adapters are parts of single layers",
                "adapters do not support a pipeline; use fsdp or tensor, or remove the adapters.",
            ),
            Excludes(
                "muP",
                "the rank of an adapter does not grow with the width",
                "model.parametrization mup has no rule for the matrices of adapters, whose rank does not grow with the "
                "width; set model.parametrization=standard.",
            ),
            *(
                Excludes(
                    other,
                    "a merged adapter would move weights out of their compressed form",
                    "compression.rules and adapters.rules exclude each other: a merged adapter would move weights out "
                    "of their compressed form; merge the adapters first, by starting from that run with run.init_from.",
                )
                for other in ("compressed weights",)
            ),
        ),
    ),
)
"""Features of adapters, see `jaxstack.config.features`."""
