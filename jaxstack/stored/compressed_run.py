"""A run directory whose weights `jaxstack.compress` wrote, as a stored model."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxstack.checkpoint import compressed
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.models.restack import same_stacking
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import AxisRules
from jaxstack.parameter_paths import nest
from jaxstack.stored.model import Form, Params, convert, initial_variables
from jaxstack.stored.training_run import RunDirectory
from pallas_kernels import PackedWeight


class CompressedRun(RunDirectory):
    """A run directory in which the parameters are packed (such as quantized) weights and plain arrays."""

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        return super().is_in(directory) and compressed.is_compressed(directory)

    @property
    def packed(self) -> bool:
        return True

    def choose_step(self, step: int | None) -> int:
        stored = compressed.read_step(self.directory)
        if step not in (None, stored):
            raise ConfigError(f"{self.directory} holds the compressed model of step {stored} only; leave --step out.")
        return stored

    def describe(self, step: int | None = None) -> str:
        return f"the compressed parameters of {self.directory}, step {self.choose_step(step)}"

    def read(
        self,
        wanted: Params,
        model: ModelConfig | None = None,
        *,
        form: Form = "plain",
        step: int | None = None,
        direct_storage: bool = False,
    ) -> Params:
        self.choose_step(step)
        target = model or self.model
        layout = jax.tree.map(lambda x: x.sharding, wanted)
        if form == "packed" and same_stacking(self.model, target):
            specs = {path: sharding.spec for path, sharding in compressed.named_leaves(layout).items()}
            return self._read_packed(specs.__getitem__, jax.tree.leaves(layout)[0].mesh)
        leaves = compressed.named_leaves(compressed.read_compressed(self.directory)[0])
        dense = nest((path, compressed.dense_parameter(path, leaf)) for path, leaf in leaves.items())
        converted = convert(dense, wanted, self.model, target)
        return jax.tree.map(jax.device_put, converted, layout)

    def read_state(self, module: ModuleArrays, rules: AxisRules, step: int | None = None) -> tuple[Params, Params]:
        self.choose_step(step)
        specs = compressed.named_leaves(module.parameter_specs(rules))
        return self._read_packed(specs.__getitem__, rules.mesh), initial_variables(module)

    def open_parameters(self, step: int | None = None) -> Callable[[str], np.ndarray | PackedWeight]:
        self.choose_step(step)
        return compressed.named_leaves(compressed.read_compressed(self.directory)[0]).__getitem__

    def _read_packed(self, spec: Callable[[str], jax.P], mesh: jax.sharding.Mesh) -> Params:
        """Read the weights in the form in which they are stored, each sharded as its plain form would be."""
        place = None if mesh.size == 1 else lambda path, _: spec(path)
        return compressed.read_compressed(self.directory, place, mesh)[0]
