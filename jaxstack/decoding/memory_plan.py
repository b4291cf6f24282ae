"""The memory of a serving engine: what weights, cache, states and logits take of it, and what would fit."""

from collections.abc import Sequence
from functools import partial

from jaxstack.decoding.adapter_places import AdapterPlaces
from jaxstack.decoding.cache_room import (
    cache_units,
    choose_room,
    free_bytes,
    token_limit,
    usable_bytes,
    usable_per_device,
)
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.mtp_draft import draft_cache_bytes, predicts_tokens
from jaxstack.observe.number_format import byte_size


def describe_memory(model: ModelOnMesh, config: EngineConfig, draft: ModelOnMesh | None = None) -> str:
    """Return a table of what an engine of these sizes keeps in device memory, as text; nothing is compiled.

    Args:
      model: the model on the mesh of one replica; it gets the places of adapters.
      config: sizes of the engine.
      draft: its draft model.

    Raises:
      ConfigError: the sizes do not fit; the message has the numbers and what would fit.
    """
    AdapterPlaces(model, config.adapters, config.adapter_rank)
    models = [model] if draft is None else [model, draft]
    predicts = draft is None and predicts_tokens(model, config)
    further = partial(draft_cache_bytes, model) if predicts else lambda room: 0
    room = choose_room(models, config, further)
    units = cache_units(models, config, room.slots, further)
    tokens = room.pages * room.page_size
    kept = 0 if config.snapshots is not None else room.snapshots * units.snapshot
    rows = [("weights", model.weight_bytes, "with places of adapters" if config.adapters else "")]
    if draft is not None:
        rows.append(("weights of the draft model", draft.weight_bytes, ""))
    if units.page:
        pages = f"{room.pages:,} pages of {room.page_size} tokens, {byte_size(units.page)} each: {tokens:,} tokens"
        rows.append(("cache of keys and values", room.pages * units.page, pages))
    if units.slots or kept:
        states = f"{room.slots:,} slots, {room.snapshots:,} snapshots"
        rows.append(("states of requests", units.slots + kept, states))
    rows.append(("logits of a step", units.sampling, f"{room.slots:,} slots, at least"))
    used = sum(count for _, count, _ in rows)
    available = usable_per_device(model)
    devices = model.device_count
    lines = [f"{devices} device(s), memory unknown"]
    if available is not None:
        total = available * devices
        lines = [
            f"{devices} device(s) with {byte_size(available)} each, engine.memory_fraction {config.memory_fraction}"
        ]
        rows.append(("left for programs and their temporaries", total - used, ""))
    lines += _table(rows)
    lines.append(f"{room.slots:,} requests at a time (engine.slots), of up to {room.length:,} tokens (engine.context)")
    if units.page:
        lines.append(f"the cache holds {tokens / room.length:,.1f} requests of {room.length:,} tokens")
    usable = usable_bytes(model)
    if usable is not None and units.page:
        fits = int(max(0.0, free_bytes(models, config, units, usable)) // units.page)
        limit = token_limit(models, config)
        lines.append(
            f"would fit: {fits:,} pages (engine.pages), {fits * room.page_size:,} tokens, which are "
            f"{fits * room.page_size / limit:,.1f} requests of {limit:,} tokens"
        )
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, int, str]]) -> list[str]:
    sizes = [byte_size(count) for _, count, _ in rows]
    first = max(len(name) for name, _, _ in rows)
    second = max(map(len, sizes))
    return [
        f"  {name:<{first}}  {size:>{second}}  {note}".rstrip()
        for (name, _, note), size in zip(rows, sizes, strict=True)
    ]
