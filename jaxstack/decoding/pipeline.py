"""Pipeline inference: consecutive layers lie on devices of their own, between which activations are sent.

The rows of a batch are as many groups as there are stages, each with an engine of its own. An engine dispatches its
steps without waiting for the devices, so that a stage computes one group while the next stage computes another
(EnergonAI, Du et al. 2022, arXiv:2209.02341).
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxstack.decoding.decode import DECODING_LAYOUT, Params, bytes_on_devices, cast_shapes
from jaxstack.decoding.parted import PartedDecoder
from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules
from jaxstack.parallel.sharding_context import StepLayout

_ENTRY = ("embedding", "position_embedding")
"""Parameters that the first stage needs beside its layers."""


def split_stages(rules: AxisRules) -> list[AxisRules]:
    """Return the rules of each stage of a pipeline, whose mesh has the devices of one index of the axis `pipeline`.

    Raises:
      ConfigError: the mesh has several stages, and splits batches too, or some of its devices are another process's.
    """
    mesh = rules.mesh
    axis = mesh.axis_names.index("pipeline")
    if mesh.devices.shape[axis] == 1:
        return [rules]
    wrong = {name: size for name, size in mesh.shape.items() if size > 1 and name not in ("pipeline", "tensor")}
    if wrong:
        shown = ", ".join(f"{name} {size}" for name, size in wrong.items())
        raise ConfigError(f"a pipeline generates text together with parallel.tensor only; found {shown}: set it to 1.")
    if mesh.is_multi_process:
        raise ConfigError("the stages of a pipeline that generates text must be devices of one process.")
    parts = np.split(mesh.devices, mesh.devices.shape[axis], axis)
    return [
        dataclasses.replace(rules, mesh=Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)) for devices in parts
    ]


def stage_of(layer: int, layers: int, stages: int) -> int:
    """Return the stage of a layer; the numbers of layers of two stages differ by at most one."""
    return layer * stages // layers


def stage_shapes(module: ModuleArrays, stages: Sequence[AxisRules]) -> Params:
    """Return shapes, shardings and dtypes of a model's parameters as `cast_shapes`, each on the devices of its stage.

    Args:
      module: the functional form of the Transformer, with unrolled layers.
      stages: from `split_stages`; one is that of a model without a pipeline.

    Raises:
      ConfigError: there are more stages than layers.
    """
    shapes = [cast_shapes(module, rules) for rules in stages]
    decoder = shapes[-1]["decoder"]
    layers = len(decoder["layers"])
    if len(stages) > layers:
        raise ConfigError(
            f"parallel.pipeline ({len(stages)}) must not exceed the number of layers; set it to at most {layers}."
        )
    placed = {
        key: shapes[stage_of(int(key), layers, len(stages))]["decoder"]["layers"][key] for key in decoder["layers"]
    }
    first = {name: shapes[0][name] for name in _ENTRY if name in shapes[0]}
    return {**shapes[-1], **first, "decoder": {**decoder, "layers": placed}}


class PipelineDecoder(PartedDecoder):
    """Generates tokens with a model whose layers are split over stages of devices.

    A tied embedding matrix lies on the first stage and on the last one. The cache of a layer lies where its weights do.

    Args:
      module: the functional form of the Transformer, with unrolled layers.
      params: its parameters, placed as `stage_shapes` says.
      non_params: its other variables.
      stages: from `split_stages`.
      vocab_size, layout: as in `Decoder`.
    """

    def __init__(
        self,
        module: ModuleArrays,
        params: Params,
        non_params: Params,
        stages: Sequence[AxisRules],
        *,
        vocab_size: int | None = None,
        layout: StepLayout = DECODING_LAYOUT,
    ):
        layers = len(params["decoder"]["layers"])

        def stage(layer: int) -> int:
            return stage_of(layer, layers, len(stages))

        options = {"vocab_size": vocab_size, "layout": layout}
        super().__init__(module, params, non_params, stages, key=stage, stage=stage, **options)
        self.groups = len(stages)

    def load(self, params: Params, non_params: Params) -> None:
        super().load(params, non_params)
        tied = self.config.tie_word_embeddings
        self._head = _moved(self.params["embedding"], self.rules.mesh) if tied else self.params["head"]

    def unload(self) -> None:
        super().unload()
        self._head = {}

    def join_projections(self) -> None:
        """Do nothing: projections with the same input stay apart, as they do in training."""

    def check_whole(self, what: str) -> None:
        raise ConfigError(
            f"{what} runs all layers in one program, and a pipeline has {self.groups}; set "
            "parallel.pipeline=1, and for more memory parallel.tensor=2 or more."
        )

    @property
    def device_count(self) -> int:
        return sum(rules.mesh.size for rules in self.stages)

    @property
    def memory_share(self) -> float:
        layers = Counter(part.stage for part in self.parts for _ in part.layers)
        weights = Counter[jax.Device]()
        for x in self._stored:
            for device in x.sharding.device_set:
                weights[device] += bytes_on_devices(x) // len(x.sharding.device_set)
        return min(counts.total() / len(counts) / max(counts.values()) for counts in (layers, weights))

    @property
    def weight_bytes(self) -> int:
        return sum(map(bytes_on_devices, self._stored))

    @property
    def _stored(self) -> list[jax.Array]:
        copy = self._head if self.config.tie_word_embeddings else {}
        return jax.tree.leaves((self.params, self.non_params, copy))

    @property
    def entry(self) -> Params:
        return {name: self.params[name] for name in _ENTRY if name in self.params}

    @property
    def final(self) -> Params:
        return {name: found for name, found in self.params.items() if name not in ("decoder", "head", "mtp", *_ENTRY)}

    def take(self, number: int) -> Params:
        layers = self.params["decoder"]["layers"]
        return layers[str(number)] if number < len(layers) else self._head


def _moved(params: Params, mesh: Mesh) -> Params:
    """Return a copy of parameters on the devices of another stage's mesh."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), params)
