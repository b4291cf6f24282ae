"""Chooses the context limit and the number of KV-cache pages from configuration, model and device memory."""

from collections.abc import Sequence

import jax

from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.distributed.device_setup import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.step import page_bytes

_DEFAULT_CONTEXT = 4096


def choose_context_and_pages(models: Sequence[ModelOnMesh], config: EngineConfig) -> tuple[int, int]:
    """Choose the token limit of a request and the number of KV-cache pages that fit into device memory.

    Args:
      models: the model and, if there is one, its draft model, whose pages have the same numbers.
      config: sizes that are set.

    Raises:
      ConfigError: a model cannot be served, or the weights leave no memory.
    """
    if models[0].batch_unit > 1:
        raise ConfigError("an engine supports only parallel.tensor, and `open_engine` data; set fsdp and expert to 1.")
    limit = min((model.context_length for model in models if model.context_length is not None), default=None)
    context = config.context or limit or _DEFAULT_CONTEXT
    if limit is not None and context > limit:
        raise ConfigError(f"engine.context ({context}) exceeds the model's max_position_embeddings ({limit}).")
    try:
        size = sum(page_bytes(model, config.page_size) for model in models)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pages = config.pages or config.slots * -(-context // config.page_size)
    available = memory_per_device()
    if config.pages is None and available is not None:
        weights = sum(x.nbytes for x in jax.tree.leaves([(model.params, model.non_params) for model in models]))
        free = available * models[0].rules.mesh.size * config.memory_fraction - weights
        pages = min(pages, int(free // size))
    if pages * config.page_size < 2:
        raise ConfigError(
            f"the weights leave no memory for the cache of keys and values (engine.memory_fraction "
            f"{config.memory_fraction}); use more devices (parallel.tensor=2)."
        )
    return min(context, pages * config.page_size), pages
