"""Read the initial parameters of a run from another run or from Hugging Face files: the key `run.init_from`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from jaxstack.checkpoint.compressed import dense_parameter, is_compressed, named_leaves, read_compressed
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.compressed_training.base import WeightRule
from jaxstack.compressed_training.config import read_compression
from jaxstack.decoding.decode import Params
from jaxstack.errors import ConfigError
from jaxstack.functional.compressed import compress_in_training
from jaxstack.functional.module import FunctionalModule, flatten, nest
from jaxstack.models import ModelConfig, Transformer, add_adapters
from jaxstack.models.adapters import AdapterRule
from jaxstack.models.huggingface.families import check_model
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.models.pretrained import is_run, read_adapters, read_pretrained_model_config
from jaxstack.models.restack import restack, restack_shapes, same_stacking


def initial_parameters(
    directory: str | Path,
    model: ModelConfig,
    abstract: Params,
    report: Callable[[str], None],
    direct_storage: bool = False,
) -> Params:
    """Read a run's initial parameters from another run's checkpoint, a compressed model or a Hugging Face checkpoint.

    Args:
      directory: run directory (compressed weights are unpacked), or directory of the Hugging Face checkpoint.
      model: the new run's model; it must compute what the stored one computes, but may stack its layers otherwise.
      abstract: nested dicts of shapes, dtypes and shardings of its parameters; each device reads only its own shard.
      report: called with a line that names the source.
      direct_storage: True reads a Hugging Face checkpoint by GPUDirect Storage where this machine has it.

    Raises:
      ConfigError: there are no parameters, or they are another model's; the message names what differs.
      JaxstackError: the checkpoint is damaged.
    """
    if not is_run(directory):
        report(f"starting from the weights in {directory}")
        layout = jax.tree.map(lambda x: x.sharding, abstract)
        return read_parameters(directory, model, layout, direct_storage=direct_storage, report=report)
    stored = read_pretrained_model_config(directory)
    check_model(model, stored, str(directory))
    read = _unpack if is_compressed(directory) else _restore
    if same_stacking(stored, model):
        return read(Path(directory), stored, abstract, report)
    params = read(Path(directory), stored, restack_shapes(abstract, model, stored), report)
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(lambda params: restack(params, stored, model), out_shardings=layout)(params)


def _unpack(directory: Path, model: ModelConfig, abstract: Params, report: Callable[[str], None]) -> Params:
    """Read a compressed model (written by `jaxstack compress`) as ordinary, uncompressed parameters."""
    del model
    params, step = read_compressed(directory)
    report(f"starting from the compressed parameters of {directory}, step {step}")
    dense = {path: dense_parameter(path, leaf) for path, leaf in named_leaves(params).items()}
    wanted = flatten(abstract)
    return nest((path, jax.device_put(dense["/".join(path)].astype(x.dtype), x.sharding)) for path, x in wanted.items())


def _restore(directory: Path, model: ModelConfig, abstract: Params, report: Callable[[str], None]) -> Params:
    """Read the parameters of a run's newest checkpoint."""
    manager = CheckpointManager(directory / "checkpoints", report=report)
    step = manager.latest_step()
    if step is None:
        raise ConfigError(f"run.init_from: {directory} holds no checkpoint yet.")
    report(f"starting from the parameters of {directory}, step {step}")
    if rules := read_compression(directory).rules:
        return _restore_compressed(manager, step, model, abstract, rules)
    return _restore_adapted(manager, step, model, abstract, read_adapters(directory))


def _restore_compressed(
    manager: CheckpointManager, step: int, model: ModelConfig, abstract: Params, rules: Sequence[WeightRule]
) -> Params:
    """Read a checkpoint trained with compressed weights; return ordinary parameters, as an export has them."""
    module = compress_in_training(lambda rngs: Transformer(model, rngs), rules)
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    replicated = NamedSharding(jax.tree.leaves(layout)[0].mesh, jax.P())
    known = flatten(abstract)
    stored = nest(
        (path, known.get(path) or jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated))
        for path, x in flatten(module.abstract_params).items()
    )
    tree, _ = manager.restore(step, {"params": stored}, subset=True)
    return jax.jit(module.export, out_shardings=layout)(tree["params"])


def _restore_adapted(
    manager: CheckpointManager, step: int, model: ModelConfig, abstract: Params, adapters: Sequence[AdapterRule]
) -> Params:
    """Read a checkpoint's parameters, sharded as `abstract` says, and merge its adapters into them."""
    if not adapters:
        return manager.restore(step, {"params": abstract}, subset=True)[0]["params"]
    module = FunctionalModule(lambda rngs: add_adapters(Transformer(model, rngs), adapters, rngs))
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    replicated = NamedSharding(jax.tree.leaves(layout)[0].mesh, jax.P())
    abstract_adapters = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
        module.split_adapters(module.abstract_params)[1],
    )
    tree, _ = manager.restore(step, {"params": module.join(abstract, abstract_adapters)}, subset=True)

    def merge(base: Params, adapters: Params) -> Params:
        return module.merge_adapters(base, adapters, module.init(jax.random.key(0))[1])

    return jax.jit(merge, out_shardings=layout, donate_argnums=0)(*module.split_adapters(tree["params"]))
