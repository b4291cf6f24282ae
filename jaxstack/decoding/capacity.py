"""Chooses the context limit and the sizes of the cache from configuration, model and device memory."""

from collections.abc import Sequence

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.step import cache_bytes
from jaxstack.distributed.device_setup import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.models.mixer import CacheRoom
from jaxstack.observe.number_format import byte_size

_DEFAULT_CONTEXT = 4096
_LOGITS_COPIES = 3
"""Float32 arrays of the size of the logits that sampling holds at least: the logits, sorted logits and their ids."""


def choose_room(models: Sequence[ModelOnMesh], config: EngineConfig) -> CacheRoom:
    """Choose the sizes of the cache: the token limit of a request and the number of pages that fit into device memory.

    Args:
      models: the model and, if there is one, its draft model, whose pages have the same numbers.
      config: sizes that are set.

    Raises:
      ConfigError: a model cannot be served, or the weights leave no memory for the cache or for so many requests.
    """
    limit = min((model.context_length for model in models if model.context_length is not None), default=None)
    context = config.context or limit or _DEFAULT_CONTEXT
    if limit is not None and context > limit:
        raise ConfigError(f"engine.context ({context}) exceeds the model's max_position_embeddings ({limit}).")
    size = config.page_size
    pages = config.pages or config.slots * -(-context // size)
    room = CacheRoom(config.slots, context, pages, size)
    try:
        one, two = (sum(cache_bytes(model, room._replace(pages=count)) for model in models) for count in (1, 2))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    per_page = two - one
    per_slots = one - per_page
    available = memory_per_device()
    if available is not None:
        total = available * models[0].rules.mesh.size
        weights = sum(model.weight_bytes for model in models)
        sampling = _sampling_bytes(models[0], config)
        rest = total - weights - per_page * (config.pages or 1)
        if 0 < rest < per_slots + sampling:
            most = int(rest / (per_slots + sampling) * config.slots)
            raise ConfigError(
                f"the states and logits of {config.slots:,} requests at a time (engine.slots) take at least "
                f"{byte_size(per_slots + sampling)}, but weights and cache leave {byte_size(rest)}; set "
                f"engine.slots to at most {most:,}, or use more devices (parallel.tensor=2)."
            )
        if config.pages is None:
            # What sampling needs is beyond `memory_fraction`, as far as there is room.
            free = min(total * config.memory_fraction, total - sampling) - weights - per_slots
            if free < 0:
                pages = 0
            elif per_page:
                pages = min(pages, int(free // per_page))
    if pages * size < 2:
        raise ConfigError(
            "the weights leave no memory for the cache of keys and values or states "
            f"(engine.memory_fraction {config.memory_fraction}); use more devices (parallel.tensor=2)"
            + (f" or fewer engine.slots ({config.slots})." if per_slots else ".")
        )
    return room._replace(length=min(context, pages * size), pages=pages)


def _sampling_bytes(model: ModelOnMesh, config: EngineConfig) -> int:
    """Return the bytes that sampling the tokens of one step takes at least, without the sums of a softmax."""
    vocabulary = model.config.vocab_size or 0
    return _LOGITS_COPIES * 4 * config.slots * (1 + config.draft_tokens) * vocabulary


def check_memory(model: ModelOnMesh, room: CacheRoom) -> None:
    """Check that a cache of this size fits the devices' memory.

    Raises:
      ConfigError: it does not.
    """
    available = memory_per_device()
    if available is None:
        return
    total = available * model.rules.mesh.size
    needed = cache_bytes(model, room)
    if needed > total:
        fits = int(room.length * total / needed)
        raise ConfigError(
            f"the cache of keys and values for {room.slots} x {room.length:,} tokens takes {needed / 2**30:,.1f} GiB, "
            f"of {total / 2**30:,.1f} GiB on {model.rules.mesh.size} device(s); at most about {fits:,} tokens fit, "
            "prompt and new ones together."
        )
