"""Checks whether weights and optimizer state fit the devices' memory, before anything is allocated."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxstack.cost_model.memory import PackedSize
from jaxstack.distributed.device_setup import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.models.config import preset_config, preset_names
from jaxstack.models.count import count_parameters
from jaxstack.observe.number_format import byte_size
from jaxstack.optim.base import Optimizer, RunInfo
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer

_TIGHT = 0.8
"""Share of the memory above which there is rarely room for activations in addition to the state."""
_WEIGHT_BYTES = 4
"""Weights are stored in float32."""
_BYTES_PER_PARAMETER = 16
"""Float32 weight and gradient, and the two moments of AdamW."""


class DoesNotFit(ConfigError):
    """Raised if weights and optimizer state alone need more than the memory of a device.

    Args:
      message: what does not fit, and the ways out.
      needed: bytes of the state on each device, without gradients and activations.
      available: bytes that each device has.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed = needed
        self.available = available


def check_state_size(config: RunConfig) -> None:
    """Check, from parameter counts alone, that weights and optimizer state can fit the devices' memory.

    Nothing is traced, which would take minutes for thousands of layers. The count is a lower bound: an unknown
    vocabulary counts as empty, and every weight as split over all axes that may split it. `check_memory` is exact.

    Args:
      config: the configuration of the run, whose layout is resolved.

    Raises:
      DoesNotFit: weights and optimizer state alone exceed the memory of a device.
    """
    available = memory_per_device()
    if available is None:
        return
    model = config.model
    parallel = config.parallel
    count = count_parameters(model.model_copy(update={"vocab_size": model.vocab_size or 1})).total
    some_frozen = bool(config.adapters.rules) or any(group.frozen for group in config.optimizer.groups)
    packed = PackedSize.of(config.packed_base())
    weights = (count - packed.values) * _WEIGHT_BYTES
    optimizer = 0 if some_frozen else count * _state_bytes_per_weight(config.optimizer)
    devices = math.prod(parallel.degrees.values())
    shards = devices // parallel.data  # replicas along `data` hold all weights, with ZeRO only the optimizer's state
    _refuse_state(
        weights // shards + int(packed.bytes),
        optimizer // (devices if parallel.zero else shards),
        weights + int(packed.bytes) + optimizer,
        available,
    )


def check_memory(trainer: Trainer) -> str | None:
    """Raise DoesNotFit if weights and optimizer state exceed a device's memory; return a warning if little is left.

    Refuses only what surely does not fit: the shards of weights and optimizer state. One float32 gradient per trained
    parameter is counted for the warning, as XLA may keep gradients in fewer bytes. Activations are not counted.

    Returns:
      A warning if little or nothing is left for activations; None if there is enough, or if the memory is not known.

    Raises:
      DoesNotFit: weights and optimizer state alone exceed the memory of a device.
    """
    available = memory_per_device()
    if available is None:
        return None
    state = trainer.abstract_state
    shardings = trainer.shardings
    weights = _bytes_per_device(state.params, shardings.params)
    moments = (state.optimizer, state.outer)
    optimizer = _bytes_per_device(moments, (shardings.optimizer, shardings.outer))
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, moments)))
    _refuse_state(weights, optimizer, whole, available)
    trained = trainer.module.split_frozen(state.params)[0]
    gradients = _bytes_per_device(trained, trainer.module.split_frozen(shardings.params)[0])
    needed = weights + optimizer + gradients
    if needed <= _TIGHT * available:
        return None
    likely = ": it probably does not fit" if needed > available else ""
    return (
        f"a step needs {byte_size(needed)} on each device ({byte_size(weights)} of weights, {byte_size(optimizer)} of "
        f"optimizer state, {byte_size(gradients)} of gradients), and activations on top; there are "
        f"{byte_size(available)}{_shared_note()}{likely}"
    )


def _refuse_state(weights: int, optimizer: int, whole: int, available: int) -> None:
    """Raise DoesNotFit if the bytes of weights and optimizer state on one device exceed `available`."""
    if weights + optimizer <= available:
        return
    raise DoesNotFit(
        f"the model does not fit: its state takes {byte_size(weights + optimizer)} on each device "
        f"({byte_size(weights)} of weights, {byte_size(optimizer)} of optimizer state), and gradients and activations "
        f"on top, but there are {byte_size(available)}{_shared_note()}. {_ways_out(available, -(-whole // available))}",
        weights + optimizer,
        available,
    )


def _state_bytes_per_weight(optimizer: Optimizer) -> int:
    """Return how many bytes of state an optimizer keeps for each element of a large matrix, rounded down."""
    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    state = jax.eval_shape(optimizer.core(RunInfo()).init, {"kernel": matrix})
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) // matrix.size


def _shared_note() -> str:
    cpu = jax.local_devices()[0].platform == "cpu"
    return " of this host's memory, which the CPU devices share" if cpu else ""


def _bytes_per_device(tree: PyTree[jax.ShapeDtypeStruct], shardings: PyTree[jax.sharding.Sharding]) -> int:
    def size(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def _ways_out(available: int, devices: int) -> str:
    largest = {}
    for name in preset_names():
        config = preset_config(name)
        if config.vocab_size is not None:
            largest[name] = count_parameters(config).total
    fitting = [name for name, count in largest.items() if count * _BYTES_PER_PARAMETER <= _TIGHT * available]
    preset = max(fitting, key=lambda name: largest[name], default=None)
    smaller = f"The largest shipped preset that fits one such device is {preset}; " if preset else ""
    return f"{smaller}this one needs at least {devices:,} such devices with parallel.fsdp=-1."
