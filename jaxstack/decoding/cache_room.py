"""The engine's cache of keys, values and states: its shapes, its bytes, and how much of it fits the devices' memory."""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import Array, Int, PyTree

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh, Params, copies_on_devices
from jaxstack.decoding.rows import Pages
from jaxstack.distributed.coordination import all_gather
from jaxstack.distributed.device_setup import memory_per_device
from jaxstack.errors import ConfigError
from jaxstack.models.attention.paged_cache import PagedKeys
from jaxstack.models.layer import CacheRoom
from jaxstack.observe.number_format import byte_size
from jaxstack.observe.nvml import available_bytes
from jaxstack.parallel.sharding_context import logical_axis_rules

MakeCache: TypeAlias = Callable[[ModelOnMesh, Params, Params, CacheRoom], Any]
"""(model, params, non_params, room) -> an empty cache, a tree of arrays. Traceable."""

_known_copies = weakref.WeakKeyDictionary[ModelOnMesh, dict[MakeCache, list[int]]]()
_DEFAULT_CONTEXT = 4096
_AGREE_SECONDS = 3600
"""Time limit of an agreement of the processes, of which one may still read weights."""
_LOGITS_COPIES = 3
"""Float32 arrays of the size of the logits that sampling holds at least: the logits, sorted logits and their ids."""
_LEAST_SLOTS = 16
_MOST_SLOTS = 512
"""Fewest and most requests at a time where their number is chosen."""
_TOKENS_OF_A_REQUEST = 1024
"""Tokens, of prompt and answer, that a request is assumed to have where the number of requests is chosen."""
_MOST_PAGE_NUMBERS = 2**21
"""Most page numbers of the rows of a step: 8 MiB, which are sent to the devices for each program."""
_SHARE_OF_STATES = 0.5
"""Most of the memory for pages and states that the states of so many requests may take."""


def cache_bytes(model: ModelOnMesh, room: CacheRoom, make: MakeCache | None = None) -> int:
    """Return the bytes of a cache in device memory, summed over all layers and devices.

    Arrays without heads, such as latents, are on every device of `tensor`, and count for each.

    Args:
      model: the model.
      room: the size of the cache.
      make: makes another cache than `make_cache`.
    """
    make = make or make_cache
    shapes = jax.eval_shape(lambda params, rest: make(model, params, rest, room), model.params, model.non_params)
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes)]
    return sum(size * copies for size, copies in zip(sizes, _device_copies(model, make, len(sizes)), strict=True))


def _device_copies(model: ModelOnMesh, make: MakeCache, count: int) -> list[int]:
    """Return how many times the devices together hold each of the `count` arrays of a cache, whatever its size."""
    if model.rules.mesh.size == 1:
        return [1] * count
    known = _known_copies.setdefault(model, {})
    if make not in known:
        # XLA chooses the layout of arrays that have no constraint. The smallest cache is laid out as a large one is.
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model.params, model.non_params))
        made = jax.jit(lambda params, rest: make(model, params, rest, CacheRoom(1, 1, 1, 1)))
        with jax.set_mesh(model.rules.mesh):
            lowered = made.lower(*abstract)
            shapes, shardings = map(jax.tree.leaves, (lowered.out_info, lowered.compile().output_shardings))
        known[make] = [copies_on_devices(x.shape, y) for x, y in zip(shapes, shardings, strict=True)]
    return known[make]


def shares_pages(model: ModelOnMesh) -> bool:
    """Return True if every layer keeps its cache in pages.

    Otherwise some keep a state of fixed size for each sequence, which only moves forward: sequences with a common
    prefix share snapshots of it, it cannot take back draft tokens, and takes the chunks of a prompt one after another.
    """
    axes = row_axes(partial(cache_shapes, model), CacheRoom(1, 1, 1, 1))
    return all(axis < 0 for axis in jax.tree.leaves(axes))


def has_pages(model: ModelOnMesh) -> bool:
    """Return True if a layer keeps its cache in pages."""
    return any(isinstance(layer, PagedKeys) for layer in cache_shapes(model, CacheRoom(1, 1, 1, 1)))


def row_axes(make: Callable[[CacheRoom], Pages], room: CacheRoom) -> PyTree[int]:
    """Return the dim of each array of a cache that has a row for each sequence; -1: none, as it has pages.

    Args:
      make: returns the shapes of the cache of a given size.
    """

    def axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
        return next((i for i, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if len({*sizes}) > 1), -1)

    return jax.tree.map(axis, make(room), make(room._replace(snapshots=room.snapshots + 1)))


def copy_row(axes: PyTree[int], source: Int[Array, ""], target: Int[Array, ""], pages: Pages) -> Pages:
    """Copy a row of the caches of fixed size, in the dims `axes`, to another row; return the cache."""

    def copy(axis: int, x: jax.Array) -> jax.Array:
        if axis < 0:
            return x
        row = jax.lax.dynamic_index_in_dim(x, source, axis)
        return jax.lax.dynamic_update_index_in_dim(x, row, target, axis)

    return jax.tree.map(copy, axes, pages)


def cache_shapes(model: ModelOnMesh, room: CacheRoom) -> Pages:
    """Return the shapes of a model's cache."""

    def make(params: Params, non_params: Params) -> Pages:
        return make_cache(model, params, non_params, room)

    return jax.eval_shape(make, model.params, model.non_params)


def make_cache(model: ModelOnMesh, params: Params, non_params: Params, room: CacheRoom) -> Pages:
    """Return an empty cache for all layers of a model. To be called in a jitted function.

    Raises:
      ValueError: the model's attention has no cache.
    """
    with logical_axis_rules(model.rules, model.layout):
        return model.module.merge(params, non_params).make_shared_cache(room)


class CacheUnits(NamedTuple):
    """Bytes of the parts of a cache, summed over layers and devices, and of what sampling needs beside it."""

    page: int
    """Bytes of a page."""
    snapshot: int
    """Bytes of a snapshot of a request's states; 0: no layer has states."""
    slots: int
    """Bytes of the states of all slots, and of a number of snapshots that is set."""
    sampling: int
    """Bytes that sampling the tokens of one step takes at least."""


def cache_units(
    models: Sequence[ModelOnMesh],
    config: EngineConfig,
    slots: int,
    further: Callable[[CacheRoom], int] = lambda room: 0,
) -> CacheUnits:
    """Return the bytes of the parts of a cache for `slots` requests; other arguments as in `choose_room`.

    Raises:
      ConfigError: a model cannot be served.
    """
    room = CacheRoom(slots, token_limit(models, config), 1, config.page_size)
    try:
        rooms = [room, room._replace(pages=2), room._replace(snapshots=1)]
        one, *larger = (sum(cache_bytes(model, small) for model in models) + further(small) for small in rooms)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    page, snapshot = (size_of - one for size_of in larger)
    kept = config.snapshots if config.snapshots is not None and config.prefix_cache else 0
    return CacheUnits(page, snapshot, one - page + snapshot * kept, _sampling_bytes(models[0], config, slots))


def token_limit(models: Sequence[ModelOnMesh], config: EngineConfig) -> int:
    """Return the token limit of a request, without regard to memory.

    Raises:
      ConfigError: `engine.context` exceeds that of a model.
    """
    limit = min((model.context_length for model in models if model.context_length is not None), default=None)
    context = config.context or limit or _DEFAULT_CONTEXT
    if limit is not None and context > limit:
        raise ConfigError(f"engine.context ({context}) exceeds the model's max_position_embeddings ({limit}).")
    return context


def usable_per_device(model: ModelOnMesh) -> int | None:
    """Return the bytes of each device's memory that XLA can get, of the device with the least; None if unknown.

    Memory that other programs hold is not counted. Processes that run a model together get the same number, so that
    their caches have the same size; all of them must call this.

    Raises:
      JaxstackError: another process does not answer in time.
    """
    limit = memory_per_device()
    own = None if limit is None else _least([limit, *available_bytes(jax.local_devices())])
    if not model.rules.mesh.is_multi_process:
        return own
    return _least(all_gather("usable-memory", own, _AGREE_SECONDS))


def _least(sizes: Iterable[int | None]) -> int | None:
    """Return the smallest size that is known; None if none is."""
    return min((size for size in sizes if size is not None), default=None)


def usable_bytes(model: ModelOnMesh) -> int | None:
    """Return the bytes that weights and cache can take, summed over all devices; see `usable_per_device`."""
    available = usable_per_device(model)
    return None if available is None else int(available * model.device_count * model.memory_share)


def free_bytes(models: Sequence[ModelOnMesh], config: EngineConfig, units: CacheUnits, total: int) -> float:
    """Return the bytes that pages and snapshots may take, of `total` bytes of memory; below 0: there are none.

    What sampling needs is beyond `memory_fraction`, as far as there is room.
    """
    weights = sum(model.weight_bytes for model in models)
    free = min(total * config.memory_fraction, total - units.sampling) - weights - units.slots
    # On a CPU, the programs, and what they compute with, are in the same memory.
    return free / 2 if jax.default_backend() == "cpu" else free


def choose_room(
    models: Sequence[ModelOnMesh], config: EngineConfig, further: Callable[[CacheRoom], int] = lambda room: 0
) -> CacheRoom:
    """Choose the sizes of the cache: requests at a time, the token limit of each, and the pages that fit into memory.

    Args:
      models: the model and, if there is one, its draft model, whose pages have the same numbers.
      config: sizes that are set.
      further: bytes of other caches.

    Raises:
      ConfigError: a model cannot be served, or the weights leave no memory for the cache, for so many pages or for so
        many requests.
    """
    context = token_limit(models, config)
    size = config.page_size
    total = usable_bytes(models[0])
    slots = config.slots or _choose_slots(models, config, further, total)
    pages = config.pages or slots * -(-context // size)
    units = cache_units(models, config, slots, further)
    per_page, per_snapshot, per_slots, sampling = units
    snapshots = slots if config.snapshots is None else config.snapshots
    if not per_snapshot or not config.prefix_cache:
        snapshots = 0
    if total is not None:
        weights = sum(model.weight_bytes for model in models)
        rest = total - weights - per_page * (config.pages or 1)
        most = int((total - weights - per_slots - sampling) // per_page) if per_page else 0
        if config.pages is not None and rest <= 0 < most:
            raise ConfigError(
                f"{config.pages:,} pages (engine.pages) take {byte_size(per_page * config.pages)} and the weights "
                f"{byte_size(weights)}, of {byte_size(total)} on {models[0].device_count} device(s); set "
                f"engine.pages to at most {most:,}, or to null for as many as fit."
            )
        if 0 < rest < per_slots + sampling:
            most = int(rest / (per_slots + sampling) * slots)
            kept = f", {snapshots:,} snapshots (engine.snapshots)" if config.snapshots and snapshots else ""
            raise ConfigError(
                f"the states{kept} and logits of {slots:,} requests at a time (engine.slots) take at least "
                f"{byte_size(per_slots + sampling)}, but weights and cache leave {byte_size(rest)}; set "
                f"engine.slots to at most {most:,}, or use more devices (parallel.tensor=2)."
            )
        if config.pages is None:
            free = free_bytes(models, config, units, total)
            if config.snapshots is None and snapshots:
                snapshots = max(0, min(snapshots, int(free / 4 // per_snapshot)))
                free -= per_snapshot * snapshots
            if free < 0:
                pages = 0
            elif per_page:
                pages = min(pages, int(free // per_page))
    if pages * size < 2:
        raise ConfigError(
            "the weights leave no memory for the cache of keys and values or states "
            f"(engine.memory_fraction {config.memory_fraction}); raise that fraction, or use more devices "
            "(parallel.tensor=2)" + (f" or fewer engine.slots ({slots})." if per_slots else ".")
        )
    return CacheRoom(slots, min(context, pages * size), pages, size, snapshots)


def _choose_slots(
    models: Sequence[ModelOnMesh], config: EngineConfig, further: Callable[[CacheRoom], int], total: int | None
) -> int:
    """Return the number of requests that are decoded at a time if none is set; `total` as in `free_bytes`.

    Steps of more rows take less time for each, up to some hundreds of rows. Where a longer request needs the pages of
    another one, that waits. Each step sends the page numbers of its rows, of which those of very long requests have too
    many.
    """
    if total is None or jax.default_backend() == "cpu":
        return _LEAST_SLOTS
    size = config.page_size
    longest = token_limit(models, config)
    pages = -(-min(longest, _TOKENS_OF_A_REQUEST) // size)
    slots = _MOST_SLOTS
    while slots > _LEAST_SLOTS and slots * longest > _MOST_PAGE_NUMBERS * size:
        slots //= 2
    while slots > _LEAST_SLOTS:
        units = cache_units(models, config, slots, further)
        free = free_bytes(models, config, units, total)
        held = config.pages if config.pages is not None else free // units.page if units.page else math.inf
        if held >= slots * pages and units.slots <= _SHARE_OF_STATES * (free + units.slots):
            break
        slots //= 2
    return slots


def _sampling_bytes(model: ModelOnMesh, config: EngineConfig, slots: int) -> int:
    """Return the bytes that sampling the tokens of one step takes at least, without the sums of a softmax."""
    vocabulary = model.config.vocab_size or 0
    return _LOGITS_COPIES * 4 * slots * (1 + config.draft_tokens) * vocabulary


def check_memory(model: ModelOnMesh, room: CacheRoom) -> None:
    """Check that a cache of this size fits the devices' memory.

    Raises:
      ConfigError: it does not.
    """
    total = usable_bytes(model)
    if total is None:
        return
    needed = cache_bytes(model, room)
    if needed > total:
        fits = int(room.length * total / needed)
        raise ConfigError(
            f"the cache of keys and values for {room.slots} x {room.length:,} tokens takes {needed / 2**30:,.1f} GiB, "
            f"of {total / 2**30:,.1f} GiB on {model.device_count} device(s); at most about {fits:,} tokens fit, "
            "prompt and new ones together."
        )
