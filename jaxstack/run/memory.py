"""Check that the train state fits the memory of the devices, before anything is allocated."""

import math

import jax
from jaxtyping import PyTree

from jaxstack.distributed.devices import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.count import count_parameters
from jaxstack.models.preset import preset_config, preset_names
from jaxstack.observe.units import byte_size
from jaxstack.parallel import ParallelConfig
from jaxstack.trainer import Trainer

_TIGHT = 0.8
"""Share of the memory above which there is rarely room for activations in addition to the state."""
_BYTES_PER_PARAMETER = 16
"""Float32 weight and gradient, and the two moments of AdamW."""


class DoesNotFit(ConfigError):
    """The train state and the gradients alone exceed the memory of a device.

    Args:
      message: what does not fit, and the ways out.
      needed: bytes that a step needs on each device, without activations.
      available: bytes that each device has.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed, self.available = needed, available


def check_memory(trainer: Trainer) -> str | None:
    """Compare what every step needs with what the devices have.

    Counts the shards of the train state and of one float32 gradient per trained parameter. Activations are not counted,
    so a run that passes may still be too large.

    Returns:
      A warning if little is left for activations; None if there is enough, or if the memory is not known.

    Raises:
      DoesNotFit: the state and the gradients alone exceed the memory of a device.
    """
    available = memory_per_device()
    if available is None:
        return None
    state, shardings = trainer.abstract_state, trainer.shardings
    weights = _bytes_per_device(state.params, shardings.params)
    optimizer = _bytes_per_device(state.optimizer, shardings.optimizer)
    trained = trainer.module.split_frozen(state.params)[0]
    gradients = _bytes_per_device(trained, trainer.module.split_frozen(shardings.params)[0])
    needed = weights + optimizer + gradients
    parts = (
        f"{byte_size(needed)} on each device ({byte_size(weights)} of weights, {byte_size(optimizer)} of optimizer "
        f"state, {byte_size(gradients)} of gradients), and activations on top"
    )
    device = trainer.rules.mesh.devices.flat[0]
    shared = " of this host's memory, which the CPU devices share" if device.platform == "cpu" else ""
    if needed > available:
        whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.optimizer, trained)))
        count = -(-whole // available)
        raise DoesNotFit(
            f"the model does not fit: a step needs {parts}, but there are {byte_size(available)}{shared}. "
            f"{_ways_out(trainer, available, count)}",
            needed,
            available,
        )
    if needed > _TIGHT * available:
        return f"a step needs {parts}; there are {byte_size(available)}{shared}"
    return None


def looks_too_large(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return True if weights, gradients and two moments in float32 would take most of a device's memory.

    A quick estimate before data is prepared; `check_memory` counts exactly.
    """
    available = memory_per_device()
    if model.vocab_size is None or available is None:
        return False
    whole = 1 if parallel.zero else parallel.data  # replicas along `data` hold everything
    shards = math.prod(parallel.degrees.values()) // whole
    return count_parameters(model).total * _BYTES_PER_PARAMETER > _TIGHT * available * shards


def _bytes_per_device(tree: PyTree[jax.ShapeDtypeStruct], shardings: PyTree[jax.sharding.Sharding]) -> int:
    def size(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def _ways_out(trainer: Trainer, available: int, devices: int) -> str:
    largest = {}
    for name in preset_names():
        config = preset_config(name)
        if config.vocab_size is not None:
            largest[name] = count_parameters(config).total
    fitting = [name for name, count in largest.items() if count * _BYTES_PER_PARAMETER <= _TIGHT * available]
    preset = max(fitting, key=lambda name: largest[name], default=None)
    smaller = f"The largest shipped preset that fits one such device is {preset}; " if preset else ""
    return f"{smaller}this one needs at least {devices} such devices with parallel.fsdp=-1."
