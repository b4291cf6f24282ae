"""Parameters by path: nested dicts and their flat form {path: leaf}, and rules that choose values by a path's pattern.

A path is a tuple of keys, or its keys joined by `/`, such as `decoder/layers/0/attention/q_proj/kernel`. A rule is
(regular expression, value); the first rule whose expression is found in the path wins.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from jaxstack.errors import ConfigError

Path = tuple[str, ...]


def nest(items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Build nested dicts from pairs (path, leaf); the inverse of `flatten`.

    Args:
      items: each path is a tuple of keys, or a text of keys joined by `/`.
    """
    tree: dict[str, Any] = {}
    for path, value in items:
        keys = path.split("/") if isinstance(path, str) else [str(key) for key in path]
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = value
    return tree


def flatten(
    tree: Mapping[str, Any], path: Path = (), stop: Callable[[Path], bool] = lambda path: False
) -> dict[Path, Any]:
    """Flatten nested dicts to {path: leaf}; a dict for whose path `stop` returns True counts as a leaf."""
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        below = isinstance(value, dict) and not stop((*path, key))
        flat.update(flatten(value, (*path, key), stop) if below else {(*path, key): value})
    return flat


def split_paths(tree: Mapping[str, Any], wanted: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split nested dicts into (the leaves for whose path, such as `a/b/0`, `wanted` returns True, the others)."""
    flat = flatten(tree)
    others = {path: flat.pop(path) for path in list(flat) if not wanted("/".join(path))}
    return nest(flat.items()), nest(others.items())


def get(tree: Mapping[str, Any], path: str) -> Any:
    """Return the leaf or branch of nested dicts at a path of keys joined by `/`."""
    branch: Any = tree
    for key in path.split("/"):
        branch = branch[key]
    return branch


V = TypeVar("V")
Rules = Sequence[tuple[str, V]]


def path_name(path: Sequence[Any]) -> str:
    """Return the key path of a leaf in a JAX pytree as text, such as `a/b/0/c`.

    The attribute `value` of NNX variables is left out.
    """
    parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
    if len(parts) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and parts[-1] == "value":
        parts.pop()
    return "/".join(parts)


def match(path: str, rules: Rules[V]) -> V:
    """Return the value of the first rule (pattern, value) whose pattern matches a parameter's path.

    Raises:
      KeyError: no rule matches; end the rules with `(".*", default)` to have a default.
    """
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    raise KeyError(f"no rule matches {path!r}; the rules are {[pattern for pattern, _ in rules]}.")


def map_by_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map `function(path, leaf, *other_leaves)` over the leaves of pytrees, where `path` is text like `a/b/0`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *rest)


def check_patterns(patterns: Sequence[str], tree: Any, what: str) -> None:
    """Check that each pattern matches the path of some leaf of `tree`; otherwise it is probably misspelt.

    Raises:
      ConfigError: a pattern matches none; the message names it, and some paths that exist.
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            shown = ", ".join(names[:3] + names[-3:])
            raise ConfigError(f"{what}: {pattern!r} matches no parameter; paths look like {shown}.")


@runtime_checkable
class _Stack(Protocol):
    def layer_numbers(self, index: int) -> Sequence[int]: ...


@runtime_checkable
class _Model(Protocol):
    @property
    def decoder(self) -> _Stack: ...


Value = TypeVar("Value")


def weight_paths(model: _Model, path: Sequence[str | int]) -> list[str]:
    """List the weight paths (`decoder/layers/3/.../kernel`) of a dense layer: one for each layer that it stacks.

    Args:
      path: path of the dense layer in the module, which may be part of a stack of layers.
    """
    if tuple(path[:2]) != ("decoder", "layers"):
        return ["/".join(map(str, (*path, "kernel")))]
    numbers = model.decoder.layer_numbers(int(path[2]))
    return ["/".join(map(str, ("decoder", "layers", number, *path[3:], "kernel"))) for number in numbers]


def match_common_value(
    names: Sequence[str], rules: Rules[Value], section: str, what: str, *, staged: bool = False
) -> Value:
    """Return the value that path rules give to these weights, which one scan runs together; raise if the values differ.

    Args:
      section: key of the configuration, for the message.
      what: meaning of a value other than None and False, for the message.
      staged: True if a pipeline stores the weights together, so that layers out of the scan are no way out.

    Raises:
      ConfigError: the rules give different values to them.
    """
    chosen = [match(name, rules) for name in names]
    if any(value != chosen[0] for value in chosen):
        yes = next(name for name, value in zip(names, chosen, strict=True) if value)
        no = next(name for name, value in zip(names, chosen, strict=True) if value != match(yes, rules))
        way_out = (
            "a pipeline stores both together; drop the layer's number, or set parallel.pipeline to 1."
            if staged
            else "one scan runs both; take as many layers at each end out of it by model.unscanned_end_layers, set "
            "model.scan_layers to false, or drop the layer's number."
        )
        raise ConfigError(f"{section}: {yes} is to {what} and {no} is not, but {way_out}")
    return chosen[0]
