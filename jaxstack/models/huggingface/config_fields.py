"""Conversions between keys of Hugging Face's config.json and fields of `ModelConfig`, in both directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxstack.errors import ConfigError, nearest
from jaxstack.models.config import ModelConfig
from jaxstack.models.rope import REQUIRED, SCALINGS, RopeScaling

Keys = Mapping[str, Any]


class Row(NamedTuple):
    """Two-way conversion between some keys of Hugging Face's config.json and fields of `ModelConfig`."""

    keys: tuple[str, ...]
    read: Callable[[Keys], dict[str, Any]]
    """Returns the fields of `ModelConfig` for a config.json; raises ConfigError for what the model does not support."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Returns the keys of config.json for a model."""


def find(config: Keys, key: str, default: Any = REQUIRED) -> Any:
    """Look up a key of config.json; if it is missing, return the default that transformers assumes."""
    if key in config and not (default is REQUIRED and config[key] is None):
        return config[key]
    if default is REQUIRED:
        raise ConfigError(f"config.json has no {key}, which this family needs.")
    return default


def same(theirs: str, ours: str, default: Any = REQUIRED, value: Callable[[ModelConfig], Any] | None = None) -> Row:
    """Create the conversion that copies one key of config.json to one field of `ModelConfig`, and back.

    Args:
      value: returns what is written, if that is not the field itself.
    """
    return Row(
        (theirs,),
        lambda config: {ours: find(config, theirs, default)},
        lambda model: {theirs: value(model) if value else getattr(model, ours)},
    )


def fixed(key: str, *allowed: Any) -> Row:
    """Create the conversion of a config.json key whose value must be in `allowed`; the first is the default."""

    def read(config: Keys) -> dict[str, Any]:
        found = find(config, key, allowed[0])
        if found not in allowed:
            shown = " or ".join(repr(value) for value in allowed)
            raise ConfigError(f"config.json: {key}: {found!r} is not supported; only {shown} is.")
        return {}

    return Row((key,), read, lambda model: {})


def always(**fields: Any) -> Row:
    """Create the conversion that sets `ModelConfig` fields that are constant in a family and not in config.json."""
    return Row((), lambda config: fields, lambda model: {})


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Names of activations in transformers -> ours."""


def activation(key: str, default: str) -> Row:
    """Create the conversion of the activation function's name; `default` is the family's preferred name."""

    def read(config: Keys) -> dict[str, Any]:
        found = find(config, key, default)
        if found not in ACTIVATIONS:
            raise ConfigError(
                f"config.json: {key}: there is no activation {found!r}; {nearest(str(found), ACTIVATIONS)}"
            )
        return {"hidden_act": ACTIVATIONS[found]}

    def write(model: ModelConfig) -> dict[str, Any]:
        names = [default, *ACTIVATIONS]
        return {key: next(name for name in names if ACTIVATIONS[name] == model.hidden_act)}

    return Row((key,), read, write)


def _rope_fields(said: Keys, where: str, config: Keys) -> tuple[float | None, dict[str, Any] | None]:
    """Read (theta, scaling) from a dictionary of rotary position settings in config.json."""
    said = {key: value for key, value in said.items() if value is not None}
    kind = said.pop("rope_type", said.pop("type", "default"))
    said.pop("type", None)
    kind = "longrope" if kind == "su" else kind  # the name that Phi-3's first files have for it
    kinds = {"default": {}, **SCALINGS}
    if kind not in kinds:
        raise ConfigError(f"config.json: {where}: rope_type {kind!r} is not supported; {nearest(str(kind), kinds)}")
    theta = said.pop("rope_theta", None)
    if kind != "proportional" and said.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config.json: {where}.partial_rotary_factor must be 1: all of a head's dims rotate.")
    if kind in ("yarn", "longrope"):
        said = _with_context(said, config)
    unknown = [key for key in said if key not in kinds[kind]]
    # transformers has no defaults for the keys of llama3.
    needed = [key for key, default in kinds[kind].items() if default is REQUIRED or kind == "llama3"]
    missing = [key for key in needed if key not in said]
    if unknown or missing:
        problem = f"has keys that are not supported: {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        raise ConfigError(f"config.json: {where} (rope_type {kind}) {problem}.")
    return theta, {"rope_type": kind, **said} if kind != "default" else None


def _with_context(said: dict[str, Any], config: Keys) -> dict[str, Any]:
    """Add to the settings of a scaling what transformers takes from keys next to them: the context and its growth."""
    key = "original_max_position_embeddings"
    length = config.get("max_position_embeddings")
    original = config.get(key) or said.get(key)
    if length and original:
        return {"factor": length / original, **said, key: original}
    return {**said, key: length} if length else said


def rope_keys(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return a scaling as the dictionary of config.json, without keys that have no value."""
    return None if scaling is None else scaling.model_dump(mode="json", exclude_none=True)


def rope(theta: float = 10000.0, local: float | None = None, partial: float | None = None) -> Row:
    """Create the conversion of rotary position settings, in the keys of transformers 4 (rope_scaling) and 5.

    Args:
      theta: default base of the family.
      local: default base of layers with a window, if the family has a separate one.
      partial: default share of a head's channels that rotate, if the family has `partial_rotary_factor`.
    """
    optional = {"rope_local_base_freq": local, "partial_rotary_factor": partial}
    keys = ("rope_theta", "rope_scaling", "rope_parameters", *(key for key, value in optional.items() if value))

    def read(config: Keys) -> dict[str, Any]:
        newer = config.get("rope_parameters")
        older = config.get("rope_scaling")
        if newer and older and newer != older:
            raise ConfigError("config.json has rope_scaling and rope_parameters, and they differ; remove one of them.")
        base = config.get("rope_theta")
        narrow = config.get("rope_local_base_freq")
        said = newer or older or {}
        share = config.get("partial_rotary_factor", partial)
        if partial:
            said = dict(said)
            share = said.pop("partial_rotary_factor", share)
        where = "rope_parameters" if newer else "rope_scaling"
        if newer and local and ("full_attention" in newer or "sliding_attention" in newer):
            narrow, stretched = _rope_fields(newer.get("sliding_attention") or {}, f"{where}.sliding_attention", config)
            if stretched:
                raise ConfigError(f"config.json: {where}.sliding_attention: only full_attention layers may be scaled.")
            said = newer.get("full_attention") or {}
            where = f"{where}.full_attention"
        found, scaling = _rope_fields(said, where, config)
        fields = {"rope_theta": found or base or theta, "rope_scaling": scaling}
        fields |= {"partial_rotary_factor": share} if partial else {}
        return {**fields, "rope_local_base_freq": narrow or local} if local else fields

    def write(model: ModelConfig) -> dict[str, Any]:
        keys: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": rope_keys(model.rope_scaling)}
        keys |= {"partial_rotary_factor": model.partial_rotary_factor} if partial else {}
        return {**keys, "rope_local_base_freq": model.rope_local_base_freq or model.rope_theta} if local else keys

    return Row(keys, read, write)


def repeated_types(special: Sequence[bool], name: str) -> tuple[str, ...]:
    """Return the shortest `layer_types` for layers of which those that are True are of type `name`, the others full."""
    return repeated_part([name if kind else "full_attention" for kind in special])


def repeated_part(types: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest beginning of `types` of which all of it is a repetition."""
    count = len(types)  # 0 is refused where the model's configuration is made
    period = next((p for p in range(1, count + 1) if all(kind == types[i % p] for i, kind in enumerate(types))), 1)
    return tuple(types[:period])


def windows(
    keys: Sequence[str],
    kinds: Callable[[Keys, int], Sequence[bool]],
    write: Callable[[ModelConfig], dict[str, Any]],
    layers: str = "num_hidden_layers",
    default: int | None = 4096,
) -> Row:
    """Create the conversion of the keys that say which layers have sliding-window attention, and its size.

    Args:
      keys: keys that the row reads in addition to `sliding_window`.
      kinds: returns for each layer True if it has a window; used if config.json has no `layer_types`.
      write: returns the keys for a model.
      layers: key of the number of layers.
      default: window if the key is missing.
    """

    def read(config: Keys) -> dict[str, Any]:
        size = find(config, "sliding_window", default)
        count = find(config, layers)
        named = config.get("layer_types") if "layer_types" in keys else None
        if named is not None:
            strange = sorted({str(kind) for kind in named} - {"full_attention", "sliding_attention"})
            if strange:
                raise ConfigError(f"config.json: layer_types: {', '.join(strange)} is not supported.")
            if len(named) != count:
                raise ConfigError(f"config.json: layer_types has {len(named)} entries for {count} layers.")
        narrow = [kind == "sliding_attention" for kind in named] if named is not None else list(kinds(config, count))
        if size is None or not any(narrow):
            return {}
        return {"layer_types": repeated_types(narrow, "sliding_attention"), "sliding_window": size}

    return Row(("sliding_window", *keys), read, write)


def layer_types(model: ModelConfig) -> dict[str, Any]:
    """Return the keys `layer_types` (one entry per layer) and `sliding_window` of config.json for a model."""
    narrow = model.windows()
    names = ["full_attention" if window is None else "sliding_attention" for window in narrow]
    return {"layer_types": names, "sliding_window": next((window for window in narrow if window), None)}
