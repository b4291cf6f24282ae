"""The first parameters of a run, from another run's checkpoint or from Hugging Face files: `run.init_from`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError
from jaxstack.functional.module import FunctionalModule
from jaxstack.models import ModelConfig, Transformer, add_adapters
from jaxstack.models.adapters import AdapterRule
from jaxstack.models.huggingface.families import check_model
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.models.pretrained import is_run, read_adapters, read_model
from jaxstack.models.restack import restack, restack_shapes, same_stacking


def initial_parameters(directory: str, model: ModelConfig, abstract: Any, say: Callable[[str], None]) -> Any:
    """The parameters in a run directory (of its newest checkpoint, adapters merged) or a Hugging Face checkpoint.

    Args:
      model: the one that they are for; it must compute what theirs computes.
      abstract: their shapes and shardings, nested dicts; each device reads its own part only.

    Raises:
      ConfigError: there are none, or they are of another model; the message names what differs.
      JaxstackError: a checkpoint is damaged.
    """
    if not is_run(directory):
        say(f"starting from the weights in {directory}")
        return read_parameters(directory, model, jax.tree.map(lambda x: x.sharding, abstract))
    stored = read_model(directory)
    check_model(model, stored, directory)
    manager = CheckpointManager(Path(directory) / "checkpoints", report=say)
    step = manager.latest_step()
    if step is None:
        raise ConfigError(f"run.init_from: {directory} holds no checkpoint yet.")
    say(f"starting from the parameters of {directory}, step {step}")
    if same_stacking(stored, model):
        return _restore(manager, step, stored, abstract, read_adapters(directory))
    params = _restore(manager, step, stored, restack_shapes(abstract, model, stored), read_adapters(directory))
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(lambda params: restack(params, stored, model), out_shardings=layout)(params)


def _restore(
    manager: CheckpointManager, step: int, model: ModelConfig, abstract: Any, adapters: Sequence[AdapterRule]
) -> Any:
    """A checkpoint's parameters, laid out as `abstract`, with the adapters merged."""
    if not adapters:
        return manager.restore(step, {"params": abstract}, subset=True)[0]["params"]
    module = FunctionalModule(lambda rngs: add_adapters(Transformer(model, rngs), adapters, rngs))
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    whole = NamedSharding(jax.tree.leaves(layout)[0].mesh, jax.P())
    of_adapters = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        module.split_adapters(module.abstract_params)[1],
    )
    tree, _ = manager.restore(step, {"params": module.join(abstract, of_adapters)}, subset=True)

    def merge(base: Any, adapters: Any) -> Any:
        return module.merge_adapters(base, adapters, module.init(jax.random.key(0))[1])

    return jax.jit(merge, out_shardings=layout, donate_argnums=0)(*module.split_adapters(tree["params"]))
