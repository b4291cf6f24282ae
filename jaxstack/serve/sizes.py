"""Computes the context limit and the number of KV-cache pages from configuration, model and device memory."""

import jax

from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.distributed.devices import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.step import page_bytes

_DEFAULT_CONTEXT = 4096


def choose_sizes(model: ModelOnMesh, config: EngineConfig) -> tuple[int, int]:
    """Return the token limit of a request and the number of KV-cache pages.

    Raises:
      ConfigError: the model cannot be served, or its weights leave no memory.
    """
    if model.batch_unit > 1:
        raise ConfigError("an engine supports only parallel.tensor, and `open_engine` data; set fsdp and expert to 1.")
    context = config.context or model.context_length or _DEFAULT_CONTEXT
    if model.context_length is not None and context > model.context_length:
        raise ConfigError(
            f"engine.context ({context}) exceeds the model's max_position_embeddings ({model.context_length})."
        )
    try:
        size = page_bytes(model, config.page_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pages = config.pages or config.slots * -(-context // config.page_size)
    available = memory_per_device()
    if config.pages is None and available is not None:
        weights = sum(x.nbytes for x in jax.tree.leaves((model.params, model.non_params)))
        free = available * model.rules.mesh.size * config.memory_fraction - weights
        pages = min(pages, int(free // size))
    if pages * config.page_size < 2:
        raise ConfigError(
            f"the weights leave no memory for the cache of keys and values (engine.memory_fraction "
            f"{config.memory_fraction}); use more devices (parallel.tensor=2)."
        )
    return min(context, pages * config.page_size), pages
