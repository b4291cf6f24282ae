"""Warnings about recipes that change the values of weights that were rounded in training."""

from collections.abc import Iterator, Mapping, Sequence

from jaxstack.compress.methods.base import Method
from jaxstack.compress.methods.rtn import Rtn
from jaxstack.compress.recipe import method_name
from jaxstack.compressed_training.base import WeightRule
from jaxstack.compressed_training.lsq import LsqRule
from jaxstack.compressed_training.qat import QatRule
from jaxstack.tree_rules import match

_RULE_ORDER = ("path", "method", "bits", "group_size", "scales", "activations")


def other_rounding_warnings(rules: Sequence[WeightRule], methods: Mapping[str, Method]) -> Iterator[str]:
    """Yield a warning for each method of a recipe that changes values which training has rounded.

    A warning names the weights, and the recipe's rule that rounds as training did.

    Args:
      rules: `compression.rules` of the run.
      methods: path of each weight to compress -> its method in the recipe.
    """
    table = [*((rule.path, _same_rounding(rule)) for rule in rules), (".*", None)]
    paths: dict[tuple[Rtn, Method], list[str]] = {}
    for path, method in methods.items():
        trained = match(path, table)
        same = None if trained is None else trained.model_copy(update={"path": method.path})
        if same is not None and same != method:
            paths.setdefault((same, method), []).append(path)
    for (same, method), found in paths.items():
        settings = {name: value for name, value in same.model_dump().items() if value is not None}
        rule = ", ".join(f"{name}: {settings[name]}" for name in sorted(settings, key=_RULE_ORDER.index))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield (
            f"warning: this run was trained with rounded weights, whose values {method_name(method)} changes: "
            f"{found[0]}{more}. The rule {{{rule}}} keeps the trained values."
        )


def _same_rounding(rule: WeightRule) -> Rtn | None:
    """Return the rule of a recipe that rounds as a rule of training does; None if that does not round."""
    if isinstance(rule, LsqRule):
        return Rtn(path=rule.path, bits=rule.bits, group_size=rule.group_size, scales="fitted")
    if isinstance(rule, QatRule):
        return Rtn(path=rule.path, bits=rule.bits, group_size=rule.group_size, activations=rule.activations)
    return None
