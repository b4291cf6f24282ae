"""Reads low-rank adapters that are served beside each other, each with the weights of one model."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices, LowRank, adaptable_layers, check_matrices, sizes_of
from jaxstack.models.adapters import Adaptable
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import check_model
from jaxstack.models.huggingface.peft import PEFT_CONFIG, read_peft
from jaxstack.models.moe_layer import Experts
from jaxstack.models.restack import Params, restack
from jaxstack.models.transformer import Transformer
from jaxstack.module_arrays.adapters import Adapters
from jaxstack.parameter_paths import flatten, nest
from jaxstack.run.load import run_config
from jaxstack.stored import StoredModel
from jaxstack.stored.run_directory import TrainingRun

_LAST_NORM = ("final_norm", "scale")
"""Names of the scales of the norm before the head."""
_ROUNDING = 2**-7
"""Largest change of a scale by a file in bfloat16 or a recipe for vectors in 8 bits, relative to the largest scale."""


def read_adapter(directory: str | Path, model: ModelConfig, base: Params | None = None) -> AdapterMatrices:
    """Read the adapter in a directory of PEFT, or that of a run with `adapters.rules`.

    Args:
      directory: the run, of whose checkpoints the newest is read, or the files of PEFT.
      model: configuration of the model that it was trained for.
      base: parameters of this model, see `check_base`; None: they are not looked at.

    Raises:
      ConfigError: it is another model's, or changes more than dense layers.
      JaxstackError: the run has no checkpoint.
    """
    unrolled = model.model_copy(update={"scan_layers": False})
    found = _read(Path(directory), unrolled)
    layers = adaptable_layers(nnx.eval_shape(lambda: Transformer(unrolled, nnx.Rngs(0))))
    check_matrices(found, sizes_of(layers), str(directory))
    if base is not None:
        check_base(directory, base)
    return found


def check_base(directory: str | Path, base: Params) -> None:
    """Check that a run with adapters started from the weights that it is to be served with.

    The scales of the last norm are compared, which a run with adapters keeps, and in which two trained models differ by
    more than the rounding of a file or a recipe. Files of PEFT have no other weights than those of adapters.

    Args:
      directory: the run, or the files of PEFT.
      base: parameters of the served model, which may be rounded or packed.

    Raises:
      ConfigError: the run has other weights.
    """
    served = flatten(base).get(_LAST_NORM)
    path = Path(directory)
    stored = None if (path / PEFT_CONFIG).is_file() else StoredModel.find(path)
    if served is None or not isinstance(stored, TrainingRun):
        return
    shapes = flatten(stored.module.abstract_params)
    if _LAST_NORM not in shapes:
        return
    wanted = np.empty(shapes[_LAST_NORM].shape, shapes[_LAST_NORM].dtype)
    own = np.asarray(flatten(stored.read_arrays(nest([(_LAST_NORM, wanted)])))[_LAST_NORM], np.float32)
    if np.abs(own - np.asarray(served, np.float32)).max() > _ROUNDING * np.abs(own).max():
        origin = run_config(stored).run.init_from
        raise ConfigError(
            f"the adapter in {directory} was trained on other weights than those of this model: the scales of the last "
            f"norm differ. Serve it with the model that it started from{'' if origin is None else f' ({origin})'}."
        )


def _read(directory: Path, model: ModelConfig) -> AdapterMatrices:
    """Read an adapter of a model with unrolled layers."""
    if (directory / PEFT_CONFIG).is_file():
        return read_peft(directory, model)
    stored = StoredModel.find(directory)
    if not isinstance(stored, TrainingRun):
        raise ConfigError(f"{directory} is neither a run with adapters nor a directory of PEFT (with {PEFT_CONFIG}).")
    check_model(model, stored.model, str(directory))
    adapters = stored.module.view(Adapters)
    if adapters is not None and not run_config(stored).trains_adapters_only:
        raise ConfigError(
            f"{directory} trained other weights than its adapters (optimizer.groups), and can only be served alone: "
            f"--run {directory}."
        )
    return _read_trained(stored, {} if adapters is None else adapters.layers)


def _read_trained(stored: TrainingRun, layers: Mapping[str, Adaptable]) -> AdapterMatrices:
    """Read the matrices of a run's adapters of all layers, as those of a model with unrolled layers.

    Raises:
      ConfigError: there are none, or they are of experts or learn magnitudes (DoRA).
    """
    other = next((path for path, layer in layers.items() if _is_unusual(layer)), None)
    if not layers or other is not None:
        found = "there are none" if other is None else f"{other} has another kind"
        raise ConfigError(
            f"{stored.directory} must have adapters of dense layers, of the method lora, to be served beside others; "
            f"{found}. Serve it alone: --run {stored.directory}."
        )
    _, added = stored.module.split_added(stored.module.abstract_params)
    found = flatten(stored.read_arrays(jax.tree.map(lambda x: np.empty(x.shape, x.dtype), added)))
    for path in found:
        if path[-1] == "b":
            found[path] = found[path] * layers["/".join(path[:-2])].adapter.scale
    stacks = {str(number): {} for number in range(stored.model.num_layers)}
    tree = nest(found.items())["decoder"]["layers"]
    unrolled = stored.model.model_copy(update={"scan_layers": False})
    plain = flatten(restack({"decoder": {"layers": stacks | tree}}, stored.model, unrolled))
    return {
        "/".join(path[:-2]): LowRank(np.asarray(a), np.asarray(plain[(*path[:-1], "b")]))
        for path, a in plain.items()
        if path[-1] == "a"
    }


def _is_unusual(layer: Adaptable) -> bool:
    """Return True if a layer's adapter cannot be computed beside those of other models."""
    return isinstance(layer, Experts) or layer.adapter.magnitude is not None
