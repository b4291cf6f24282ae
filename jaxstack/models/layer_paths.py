"""Matching of rules by weight path (such as FP8 rules) to dense layers, even if a scan stacks several in one array."""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from jaxstack.errors import ConfigError
from jaxstack.parameter_paths import Rules, match


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
