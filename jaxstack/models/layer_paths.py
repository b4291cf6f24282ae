"""Path rules for dense layers: they go by the numbers of the model's layers, whichever of these one scan runs."""

from collections.abc import Sequence
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.tree_rules import Rules, match


def weight_paths(model: Any, path: Sequence[Any]) -> list[str]:
    """The path of a dense layer's weight in each layer of the model that this layer of the module stands for."""
    if tuple(path[:2]) != ("decoder", "layers"):
        return ["/".join(map(str, (*path, "kernel")))]
    numbers = model.decoder.layer_numbers(int(path[2]))
    return ["/".join(map(str, ("decoder", "layers", number, *path[3:], "kernel"))) for number in numbers]


def choose_for_all(names: Sequence[str], rules: Rules[Any], section: str, what: str) -> Any:
    """The value that the rules give to all of these weights, which one scan runs.

    Args:
      section, what: of the configuration, and what a value other than None and False means, for the message.

    Raises:
      ConfigError: they give several.
    """
    chosen = [match(name, rules) for name in names]
    if any(value != chosen[0] for value in chosen):
        yes = next(name for name, value in zip(names, chosen, strict=True) if value)
        no = next(name for name, value in zip(names, chosen, strict=True) if value != match(yes, rules))
        raise ConfigError(
            f"{section}: {yes} is to {what} and {no} is not, but one scan runs both; keep as many layers at each end "
            "out of it by model.unscanned_end_layers, set model.scan_layers to false, or drop the layer's number."
        )
    return chosen[0]
