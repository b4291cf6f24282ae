"""A run directory as a stored model: with training checkpoints, or with weights that `jaxstack.compress` wrote."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxstack.checkpoint import compressed
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.compress.base import DuringTraining
from jaxstack.compress.config import CompressionConfig
from jaxstack.compress.during_training import Compression, compress_in_training
from jaxstack.config.base import Component, with_new_names
from jaxstack.config.loader import build_component, load_yaml
from jaxstack.data.config import DataConfig
from jaxstack.data.load_tokenizer import load_tokenizer
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.models import AdapterConfig, ModelConfig, Transformer, add_adapters
from jaxstack.models.restack import restack_shapes, same_stacking
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import AxisRules
from jaxstack.parameter_paths import flatten, get, nest
from jaxstack.preference import PreferenceConfig
from jaxstack.stored.model import (
    Form,
    Params,
    StoredLayers,
    StoredModel,
    abstract_parameters,
    convert,
    initial_variables,
)
from jaxstack.stored.packed_base import PACKED_BASE, open_packed_base
from pallas_kernels import PackedWeight

CONFIG = "config.yaml"
C = TypeVar("C", bound=Component)


class RunDirectory(StoredModel, register=False):
    """Base of training runs and compressed runs, whose configuration is in config.yaml."""

    marker = CONFIG
    title = "a run directory"

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        return (directory / CONFIG).is_file()

    def settings(self) -> dict[str, Any]:
        return with_new_names(load_yaml(self.directory / CONFIG))

    def read_model(self) -> ModelConfig:
        return self.section("model", ModelConfig)

    @property
    def held_out_text(self) -> bool:
        return not self.section("data", DataConfig).pairs  # pairs of answers are no text

    def section(self, name: str, kind: type[C]) -> C:
        """Return a section of the run's configuration.

        Raises:
          ConfigError: it cannot be read.
        """
        return build_component(kind, self.settings().get(name) or {}, str(self.directory / CONFIG))

    def open_layers(self, model: ModelConfig) -> StoredLayers:
        raise ConfigError(
            f"--resident-layers reads single layers from safetensors, and {self.directory} is a run; convert it first: "
            f"python -m jaxstack.convert {self.directory} --output DIR."
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_folder)


class TrainingRun(RunDirectory):
    """A run directory with training checkpoints, of weights that views may have changed in training."""

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        return super().is_in(directory) and not compressed.is_compressed(directory)

    @functools.cached_property
    def compression(self) -> Sequence[DuringTraining]:
        """The rules of the weights that were trained in compressed form."""
        return self.section("compression", CompressionConfig).rules

    @functools.cached_property
    def checkpoints(self) -> CheckpointManager:
        """The run's checkpoints."""
        return CheckpointManager(self.directory / "checkpoints", report=self.report)

    @functools.cached_property
    def _newest(self) -> int | None:
        """Step of the newest intact checkpoint, found once: a run that is still training may save another meanwhile."""
        return self.checkpoints.latest_step()

    def choose_step(self, step: int | None) -> int:
        manager = self.checkpoints
        if step is None:
            if self._newest is None:
                raise JaxstackError(f"{manager.directory} holds no checkpoint yet; train the run first.")
            return self._newest
        steps = manager.all_steps()
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ConfigError(f"there is no checkpoint of step {step} in {manager.directory}; there are: {known}.")
        return step

    def describe(self, step: int | None = None) -> str:
        return f"the parameters of {self.directory}, step {self.choose_step(step)}"

    def read(
        self,
        wanted: Params,
        model: ModelConfig | None = None,
        *,
        form: Form = "plain",
        step: int | None = None,
        direct_storage: bool = False,
    ) -> Params:
        stored = self.model
        target = model or stored
        module = self.module
        chosen = self.choose_step(step)
        same = same_stacking(stored, target)
        known = flatten(wanted if same else restack_shapes(wanted, target, stored))
        replicated = NamedSharding(jax.tree.leaves(wanted)[0].sharding.mesh, jax.P())

        def shape(path: tuple[str, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = known[path].sharding if path in known else replicated  # adapters and factors are small
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = self._restore(
            chosen, {"params": nest((path, shape(path, x)) for path, x in flatten(module.abstract_params).items())}
        )["params"]
        packed: dict[str, PackedWeight] = {}
        if form == "packed" and (compression := module.view(Compression)) is not None:
            packed = compression.pack_rounding(state)

        def finish(state: Params) -> Params:
            return convert(self._plain(module, state, form), wanted, stored, target)

        alike = jax.tree.structure(state) == jax.tree.structure(wanted)
        if not (same and alike and all(x.dtype == y.dtype for x, y in _pairs(state, wanted)) and not self.compression):
            layout = jax.tree.map(lambda x: x.sharding, wanted)
            state = jax.jit(finish, out_shardings=layout)(state)
        if not packed:
            return state
        return compressed.with_packed_weights(state, packed, jax.tree.map(lambda x: x.sharding, wanted))

    def read_state(self, module: ModuleArrays, rules: AxisRules, step: int | None = None) -> tuple[Params, Params]:
        plain = module.plain
        shapes = abstract_parameters(plain, rules)
        whole = rules.sharding(jax.P())
        others = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), plain.abstract_non_params
        )
        tree = self._restore(self.choose_step(step), {"params": shapes, "non_params": others})
        params = tree["params"]
        others = tree["non_params"]
        if not module.stores_plain:
            shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
            from_plain = functools.partial(module.from_plain, wanted=module.abstract_params)
            params = jax.jit(from_plain, out_shardings=shardings)(params)
            others = jax.jit(functools.partial(module.from_plain, wanted=module.abstract_non_params))(others)
        return params, others

    def read_arrays(self, wanted: Params, step: int | None = None) -> Params:
        """Read some arrays of a checkpoint in the form in which they were trained.

        Args:
          wanted: nested dicts of NumPy arrays, which may be empty, of the shapes and dtypes.
          step: training step of the parameters; default: the newest.

        Raises:
          ConfigError: there is no checkpoint of `step`.
          JaxstackError: the files are damaged, or there is no checkpoint at all.
        """
        return self._restore(self.choose_step(step), {"params": wanted})["params"]

    @property
    def is_reward_model(self) -> bool:
        """True if the run trained a reward model, whose head is in its checkpoints."""
        preference = self.section("preference", PreferenceConfig)
        return preference.loss is not None and preference.method.has_head

    def read_reward_head(self, step: int | None = None) -> np.ndarray:
        """Read the weights [D] float32 of a reward model's head.

        Raises:
          ConfigError: the run did not train a reward model, or has no checkpoint of `step`.
        """
        if not self.is_reward_model:
            raise ConfigError(f"{self.directory} is no reward model; train one with preference.loss=reward_model.")
        head = np.empty(self.model.hidden_size, np.float32)
        return self.read_arrays({"reward_head": head}, step)["reward_head"]

    def open_parameters(self, step: int | None = None) -> Callable[[str], np.ndarray | PackedWeight]:
        chosen = self.choose_step(step)

        def stored(path: str) -> Any:
            leaf = get(self.module.abstract_params, path)
            wanted = nest([(path, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), leaf))])
            return get(self.read_arrays(wanted, chosen), path)

        read = stored
        for view in self.module.views:
            read = functools.partial(view.read, stored=read)
        return read

    @functools.cached_property
    def module(self) -> ModuleArrays:
        """The module whose parameters a checkpoint holds, with the views through which they were trained."""
        adapters = self.section("adapters", AdapterConfig).rules

        def make(rngs: nnx.Rngs) -> Transformer:
            return add_adapters(Transformer(self.model, rngs), adapters, rngs)

        return compress_in_training(make, self.compression)

    def _plain(self, module: ModuleArrays, state: Params, form: Form) -> Params:
        """Return plain parameters from those of a checkpoint, in which compressed weights are dense."""
        if form == "master" and (compression := module.view(Compression)) is not None:
            return compression.master(state)
        return module.fold(state)

    @functools.cached_property
    def packed_base(self) -> frozenset[str]:
        """Paths of the weights that stayed packed while others were trained, see `PACKED_BASE`."""
        base = open_packed_base(self.directory / PACKED_BASE)
        return frozenset(() if base is None else base.weights)

    def _restore(self, step: int, wanted: Params) -> Params:
        flat = flatten(wanted["params"])
        packed = {path: flat.pop(path) for path in list(flat) if "/".join(path) in self.packed_base}
        tree, extra = self.checkpoints.restore(step, {**wanted, "params": nest(flat.items())}, subset=True)
        check_tokenizer(self.tokenizer_folder, step, extra)
        if packed:
            names = {"/".join(path) for path in packed}
            base = compressed.read_compressed(self.directory / PACKED_BASE, wanted=names.__contains__)[0]
            read = {path: _like(get(base, "/".join(path)).dense(leaf.dtype), leaf) for path, leaf in packed.items()}
            tree["params"] = nest((flatten(tree["params"]) | read).items())
        return tree


def _like(value: jax.Array, wanted: jax.ShapeDtypeStruct | np.ndarray) -> jax.Array | np.ndarray:
    """Return an array in host memory or sharded, as `wanted` is."""
    return np.asarray(value) if isinstance(wanted, np.ndarray) else jax.device_put(value, wanted.sharding)


def check_tokenizer(folder: Path, step: int, extra: object) -> None:
    """Check, by its hash, that the tokenizer in `folder` is the one that a checkpoint was trained with.

    Args:
      folder: directory of the tokenizer; without one nothing is checked.
      step: step of the checkpoint, for the message.
      extra: extra data of the checkpoint, whose `data.tokenizer` is the tokenizer's hash.

    Raises:
      JaxstackError: it is another tokenizer.
    """
    data = extra.get("data") if isinstance(extra, dict) else None
    trained = data.get("tokenizer") if isinstance(data, dict) else None
    if trained is not None and folder.is_dir() and load_tokenizer(folder).hash != trained:
        raise JaxstackError(f"{folder} is not the tokenizer of checkpoint {step}: restore its files.")


def _pairs(state: Params, wanted: Params) -> list[tuple[Any, Any]]:
    return list(zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True))


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
        names = compressed.named_leaves(wanted)
        every = not same_stacking(self.model, target)
        found = compressed.read_compressed(self.directory, wanted=lambda path: every or path in names)[0]
        leaves = compressed.named_leaves(found)
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
