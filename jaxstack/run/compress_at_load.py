"""Compresses the weights of a model while it is loaded for inference, by a recipe that needs no calibration."""

from collections.abc import Mapping

from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.compress.base import AfterTraining, compress_weight, method_name
from jaxstack.compress.config import Recipe, choose_methods
from jaxstack.compress.matrix import compressible_weights, other_parameters
from jaxstack.decoding.decode import Params
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.parallel.packed_weights import place_packed
from jaxstack.parameter_paths import get
from jaxstack.stored import StoredModel
from pallas_kernels import PackedWeight


def choose_at_load(recipe: Recipe, stored: StoredModel, model: ModelConfig) -> dict[str, AfterTraining]:
    """Return the compression method of each weight, by path in the unrolled model.

    Args:
      recipe: the recipe.
      stored: the model on disk.
      model: its configuration.

    Raises:
      ConfigError: the model is compressed already, or the recipe needs calibration or does not fit the model.
    """
    if stored.packed:
        raise ConfigError(f"{stored.directory} is compressed already, and no recipe can be applied; leave it out.")
    for rule in recipe.layers:
        if isinstance(rule, AfterTraining) and rule.needs:
            raise ConfigError(
                f"the method {method_name(rule)} measures the inputs of layers on a text, which loading does not; "
                "write the compressed model with `jaxstack compress`, and load that."
            )
    return choose_methods(recipe, compressible_weights(model), other_parameters(model))


def compress_in_place(params: Params, methods: Mapping[str, AfterTraining], model: ModelConfig, wanted: Params) -> None:
    """Replace weights by compressed ones, one after the other, so that memory for few of both forms is needed.

    Args:
      params: parameters of the unrolled model as nested dicts; changed.
      methods: the method of each weight to compress, by path.
      model: configuration of the model.
      wanted: nested dicts of the sharding of each parameter.
    """
    layouts = compressible_weights(model) if methods else {}
    shardings = {path: leaf.sharding for path, leaf in named_leaves(wanted).items()}
    for path, method in methods.items():
        above, _, name = path.rpartition("/")
        branch = get(params, above) if above else params
        found = compress_weight(branch[name], method, layouts[path])
        if isinstance(found, PackedWeight):
            found = found.with_numbers(branch[name].dtype)
            branch[name] = place_packed(found, shardings[path], transposed=path.endswith("/table"))
        else:
            branch[name] = found.astype(branch[name].dtype)
