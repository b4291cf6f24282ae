"""The weights of a module that compression can change, and how each is reshaped to matrices [out, in]."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models import ModelConfig
from jaxstack.models.embedding import Embedding
from jaxstack.models.linear import Linear
from jaxstack.models.moe_layer import Experts
from jaxstack.models.transformer import Transformer
from jaxstack.parameter_paths import weight_paths
from pallas_kernels.weight_only.packed import PackedWeight


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """Shape of a weight, and its reshaping to one matrix [out, in] or a stack of matrices.

    Attributes:
      shape: shape of the weight.
      stack: number of leading dims that count layers and experts.
      inputs: number of contracted dims, which follow the stack's.
      outputs_first: True if the dims of the outputs precede those of the inputs, as in an embedding table.
      axes: logical axes of the weight, for each dim; None: not known.
      stages: number of pipeline stages that hold equal parts of the first dim.
    """

    shape: tuple[int, ...]
    stack: int
    inputs: int
    outputs_first: bool = False
    axes: tuple[str | None, ...] | None = None
    stages: int = 1

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Sizes of the weight's leading dims, along which the matrices of layers and experts are stacked."""
        return self.shape[: self.stack]

    @property
    def has_layers(self) -> bool:
        """True if the weight's first dim stacks layers."""
        return bool(self.axes) and self.axes[0] == "layers"

    @property
    def size(self) -> tuple[int, int]:
        """Shape of one matrix: (outputs, inputs)."""
        first, second = self._parts
        return (first, second) if self.outputs_first else (second, first)

    @property
    def dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of a matrix's input dims, and of its output dims."""
        first = self.shape[self.stack : self._cut]
        second = self.shape[self._cut :]
        return (second, first) if self.outputs_first else (first, second)

    @property
    def matrix_axes(self) -> tuple[tuple[str | None, ...], str | None, str | None]:
        """Logical axes of the stack, output and input dims; dims merged into one have the logical axis of the first."""
        axes = self.axes or (None,) * len(self.shape)
        first = axes[self.stack]
        second = axes[self._cut]
        return axes[: self.stack], *((first, second) if self.outputs_first else (second, first))

    @property
    def _cut(self) -> int:
        """Index of the weight's first output dim, or of its first input dim if `outputs_first`."""
        return len(self.shape) - self.inputs if self.outputs_first else self.stack + self.inputs

    @property
    def _parts(self) -> tuple[int, int]:
        """Total sizes of the weight's input dims and output dims; the outputs come first if `outputs_first`."""
        return math.prod(self.shape[self.stack : self._cut]), math.prod(self.shape[self._cut :])

    def to_matrices(self, w: jax.Array) -> jax.Array:
        """Reshape the weight to matrices [*stack, out, in]."""
        w = w.reshape(*w.shape[: self.stack], *self._parts)
        return w if self.outputs_first else jnp.swapaxes(w, -1, -2)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """Reshape matrices [*stack, out, in] back to the shape of the weight."""
        w = matrices if self.outputs_first else jnp.swapaxes(matrices, -1, -2)
        return w.reshape(*w.shape[: self.stack], *self.shape[self.stack :])

    def from_compressed(self, matrix: PackedWeight | Float[Array, "*stack out in"]) -> PackedWeight | jax.Array:
        """Reshape a compressed matrix [out, in], or a stack of them, to the weight; a packed one remains packed."""
        if isinstance(matrix, PackedWeight):
            return matrix.with_dims(*self.dims)
        return self.from_matrices(matrix)

    def map(self, function: Callable[[jax.Array], jax.Array], w: jax.Array, *, one_by_one: bool = False) -> jax.Array:
        """Return the weight with `function` (from [out, in] to [out, in]) applied to each of its matrices.

        Args:
          one_by_one: True runs the matrices in a loop, so that the temporary arrays of only one exist at a time; those
            of several pipeline stages run side by side, each on the devices that hold it.
        """
        for _ in range(self.stack):
            function = _looped(function) if one_by_one else jax.vmap(function)
        matrices = self.to_matrices(w)
        if one_by_one and self.stages > 1:
            parts = matrices.reshape(self.stages, -1, *matrices.shape[1:])
            return self.from_matrices(jax.vmap(function)(parts).reshape(matrices.shape))
        return self.from_matrices(function(matrices))


def _looped(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda stack: jax.lax.map(function, stack)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight matrix, or stack of matrices, to which compression rules can apply.

    Attributes:
      path: keys of the parameter in the module's dict of parameters, joined by `/`.
      names: paths that rules see, one for each layer of a stack: decoder/layers/3/mlp/down_proj/kernel.
      layout: the weight as matrices.
    """

    path: str
    names: tuple[str, ...]
    layout: MatrixLayout


_PREDICTION = "mtp/"


def find_weights(model: nnx.Module) -> list[Weight]:
    """Find a model's compressible weights: of dense layers, experts, embeddings and heads; not of routers.

    In modules other than jaxstack's, each parameter `kernel` of two dims counts as [in, out].
    """
    found: dict[str, Weight] = {}
    for path, node in nnx.iter_modules(model):
        for name, param in vars(node).items():
            layout = _layout(node, name, param) if isinstance(param, nnx.Param) else None
            key = "/".join(map(str, (*path, name)))
            if layout is not None:
                found.setdefault(key, Weight(key, tuple(_names(model, cast(Sequence[str | int], path), name)), layout))
    return [found[key] for key in sorted(found)]


def _names(model: nnx.Module, path: Sequence[str | int], name: str) -> list[str]:
    if name == "kernel" and isinstance(model, Transformer):
        return weight_paths(model, path)
    return ["/".join(map(str, (*path, name)))]


def _layout(node: object, name: str, param: nnx.Param) -> MatrixLayout | None:
    shape = tuple(param.shape)
    axes = param.get_metadata().get("logical_axes")
    stacked = int(bool(axes) and axes[0] == "layers")

    def layout(stack, inputs, first=False):
        return MatrixLayout(shape, stack, inputs, first, axes)

    if isinstance(node, Linear):
        return layout(stacked, node.contracted) if name == "kernel" else None
    if isinstance(node, Experts):
        return layout(stacked + 1, 1) if name == "kernel" else None
    if isinstance(node, Embedding):
        return layout(0, 1, True)
    if name in ("kernel", "head") and len(shape) == 2 and "router" not in (axes or ()):
        return layout(0, 1)
    return None


def layer_kernels(module: nnx.Module) -> dict[str, MatrixLayout]:
    """Return the kernels of a module's dense layers and experts, which may stack Transformer layers, by path."""
    layers = {"/".join(map(str, path)) for path, node in nnx.iter_modules(module) if isinstance(node, Linear | Experts)}
    return {w.path: w.layout for w in find_weights(module) if w.path.rpartition("/")[0] in layers}


def compressible_weights(config: ModelConfig) -> dict[str, MatrixLayout]:
    """Return the weights that can be compressed after training, by path in the unrolled model, in forward order.

    They are the dense layers, the experts, the head and the embedding, which is the head of a tied model. Layers for
    multi-token prediction stay as they are.
    """
    model = _unrolled(config)
    ends = {weight.path: weight.layout for weight in find_weights(model) if weight.path in ("embedding/table", "head")}
    kernels = {path: layout for path, layout in layer_kernels(model).items() if not path.startswith(_PREDICTION)}
    found = {**kernels, **ends}
    return dict(sorted(found.items(), key=lambda item: forward_order_key(item[0])))


def other_parameters(config: ModelConfig) -> dict[str, str]:
    """Return the parameters of the unrolled model that are not compressed after training: path -> what it is."""
    model = _unrolled(config)
    known = compressible_weights(config)
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]

    def describe(path: str) -> str:
        return "a weight of multi-token prediction" if path.startswith(_PREDICTION) else "no dense layer"

    return {path: describe(path) for path in paths if path not in known}


def _unrolled(config: ModelConfig) -> Transformer:
    """Return the shapes of a Transformer whose layers are not stacked, so that each weight has a path of its layer."""
    return nnx.eval_shape(lambda: Transformer(config.model_copy(update={"scan_layers": False}), nnx.Rngs(0)))


def forward_order_key(path: str) -> tuple[int | str, ...]:
    """Return a sort key for parameter paths, in forward order: embedding, layers by number, head."""
    parts = path.split("/")
    place = {"embedding": 0, "decoder": 1}.get(parts[0], 2)
    number = int(parts[2]) if parts[:2] == ["decoder", "layers"] else 0
    return place, number, path
