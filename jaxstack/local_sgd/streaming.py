"""Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512): exchanges parts of the model in turn, during steps."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from pydantic import Field, model_validator

from jaxstack.local_sgd.base import Dict, OuterState
from jaxstack.local_sgd.diloco import OuterSGD
from jaxstack.local_sgd.reduction import Reduction, make_reduction
from jaxstack.parameter_paths import map_by_path

_LAYER = re.compile(r"(?:^|/)(\d+)(?:/|$)")
"""Number of the layer in the path of a parameter of an unrolled layer."""

_LATENCY = str(10**12)
"""Latency that XLA's scheduler assumes for the communication, in nanoseconds: 1,000 s, longer than any step."""


class StreamingDiLoCo(OuterSGD):
    """DiLoCo that exchanges fragments of the model in turn, each once every `every` steps.

    The communication of a fragment overlaps with the next train step, and its result is merged later.
    """

    name: Literal["streaming"] = "streaming"
    fragments: int = Field(default=4, ge=1)
    """Parts of the model, each with every `fragments`-th layer; embedding and head belong to the smallest ones."""
    delay: int = Field(default=1, ge=1)
    """Steps from the beginning of a fragment's communication to the merge of its result. Its communication overlaps
    with the first of them."""
    mixing: float = Field(default=0.5, ge=0, lt=1)
    """Share that a worker's own parameters keep when the result is merged."""
    compression: Literal["none", "int8"] = "none"
    """Format of the communication between workers. none: float32; int8: 8-bit integers."""

    @model_validator(mode="after")
    def _check(self) -> "StreamingDiLoCo":
        if max(self.fragments, self.delay + 1) > self.every:
            raise ValueError(
                f"every ({self.every}) must be at least fragments ({self.fragments}) and more than delay "
                f"({self.delay}); raise every, or lower them."
            )
        return self

    def build(self, workers: int, stacked: Mapping[str, Any]) -> "StreamingExchange":
        return StreamingExchange(self, make_reduction(self.compression, 0, workers), stacked)


class StreamingExchange:
    """Streaming DiLoCo's exchange between workers, of one part of the model's layers at a time.

    Phase p exchanges fragment p. The state is that of DiLoCo.

    Args:
      settings: intervals and outer optimizer.
      reduction: computes the mean over workers, without state.
      stacked: True for each trained parameter whose first dim counts layers.
    """

    def __init__(self, settings: StreamingDiLoCo, reduction: Reduction, stacked: Mapping[str, Any]):
        self._settings = settings
        self._reduction = reduction
        self._stacked = stacked
        self.phases = settings.fragments
        self.delay = settings.delay

    def init(self, params: Dict) -> OuterState:
        """Return the state at the start of a run: the parameters (`anchor`), and zero momentum (`velocity`)."""
        return OuterState({"anchor": params, "velocity": jax.tree.map(jnp.zeros_like, params)}, {})

    def due(self, step: int) -> int | None:
        """Return the fragment (part of the model) to communicate during the next train step; None if there is none."""
        every = self._settings.every
        count = self.phases
        starts = {fragment * every // count: fragment for fragment in range(count)}
        return starts.get(step % every)

    def compute_changes(self, phase: int, params: Dict, state: OuterState) -> dict[str, jax.Array]:
        """Return anchor - parameters of fragment `phase`, {path: array}; the anchor is from its last exchange."""
        return self._parts(phase, jax.tree.map(jnp.subtract, state.shared["anchor"], params))

    def send(self, phase: int, changes: dict[str, jax.Array], state: OuterState) -> OuterState:
        """Average changes of one part of the model over workers, and apply Nesterov SGD; return the new state."""
        anchor = state.shared["anchor"]
        velocity = state.shared["velocity"]
        with set_xla_metadata(latency_metadata=_LATENCY):
            progress, _ = self._reduction(changes, OuterState({}, {}))
        anchors = self._parts(phase, anchor)
        velocities = self._parts(phase, velocity)
        stepped = {name: self._settings.step(anchors[name], velocities[name], x) for name, x in progress.items()}
        anchor = self._replaced(phase, anchor, {name: new for name, (new, _) in stepped.items()})
        velocity = self._replaced(phase, velocity, {name: new for name, (_, new) in stepped.items()})
        return OuterState({"anchor": anchor, "velocity": velocity}, {})

    def merge(self, phase: int, params: Dict, state: OuterState) -> Dict:
        """Return the parameters, in one part of the model mixed from the worker's own and the common ones."""
        own = self._parts(phase, params)
        anchors = self._parts(phase, state.shared["anchor"])
        keep = self._settings.mixing
        return self._replaced(phase, params, {name: keep * x + (1 - keep) * anchors[name] for name, x in own.items()})

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Communicate and merge one part of the model, without overlap; return the parameters and the state."""
        state = self.send(phase, self.compute_changes(phase, params, state), state)
        return self.merge(phase, params, state), state

    def _parts(self, phase: int, tree: Dict) -> dict[str, jax.Array]:
        """Return {path: array} of the parameters in one part of the model; of stacked layers only those in the part."""
        parts: dict[str, jax.Array] = {}

        def add(path: str, x: jax.Array, stacked: bool, owner: int) -> None:
            if stacked and phase < len(x):
                parts[path] = x[phase :: self.phases]
            elif not stacked and owner == phase:
                parts[path] = x

        map_by_path(add, tree, self._stacked, self._owners(tree))
        return parts

    def _replaced(self, phase: int, tree: Dict, parts: Mapping[str, jax.Array]) -> Dict:
        """Return the parameter tree, with the values of one fragment (part of the model) replaced by `parts`."""

        def replace(path: str, x: jax.Array, stacked: bool) -> jax.Array:
            if path not in parts:
                return x
            return _with_layers(x, parts[path], phase, self.phases) if stacked else parts[path]

        return map_by_path(replace, tree, self._stacked)

    def _owners(self, tree: Dict) -> Dict:
        """Return the number of the fragment (part of the model) to which each unstacked array belongs.

        It is that of the array's layer, or else the smallest fragment.
        """
        sizes = [0] * self.phases
        rest: list[tuple[int, str]] = []
        owner: dict[str, int] = {}

        def measure(path: str, x: jax.Array, stacked: bool) -> None:
            if stacked:
                for fragment in range(self.phases):
                    layers = len(range(fragment, len(x), self.phases))
                    sizes[fragment] += layers * math.prod(x.shape[1:])
            elif layer := _LAYER.search(path):
                owner[path] = int(layer[1]) % self.phases
                sizes[owner[path]] += math.prod(x.shape)
            else:
                rest.append((math.prod(x.shape), path))

        map_by_path(measure, tree, self._stacked)
        for size, path in sorted(rest, reverse=True):
            owner[path] = min(range(self.phases), key=lambda fragment: sizes[fragment])
            sizes[owner[path]] += size
        find: Callable[[str, jax.Array], int] = lambda path, x: owner.get(path, 0)  # noqa: E731
        return map_by_path(find, tree)


def _with_layers(x: jax.Array, layers: jax.Array, first: int, stride: int) -> jax.Array:
    """Return `x` with every `stride`-th entry of its first dim from `first` on replaced, as `.at[].set` does.

    With a stride of 1, XLA crashes when it compiles that scatter for GPUs together with a scan over the layers.
    """
    after = len(x) - 1 - first - (len(layers) - 1) * stride
    rest = [(0, 0, 0)] * (x.ndim - 1)
    spread = jax.lax.pad(layers, jnp.zeros((), layers.dtype), [(first, after, stride - 1), *rest])
    replaced = (jnp.arange(len(x)) % stride == first).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(replaced, spread, x)
