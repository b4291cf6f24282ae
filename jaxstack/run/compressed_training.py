"""Training with weights kept compressed (quantized, pruned or factorised): checks at the start, and a summary."""

import jax
import numpy as np

from jaxstack.compressed_training.mask import MaskRule
from jaxstack.errors import ConfigError
from jaxstack.functional.compressed import CompressedModule
from jaxstack.functional.module import Dict, FunctionalModule
from jaxstack.trainer import Trainer


def check_masks(module: FunctionalModule, params: Dict) -> None:
    """Check that each weight that is trained with its zeros fixed (method `mask`) has at least one zero.

    Args:
      module: the module of the run.
      params: the parameters that it starts from, those of `module.used`.

    Raises:
      ConfigError: one has none.
    """
    if not isinstance(module, CompressedModule):
        return
    module = module.plain
    for path, (rule, weight) in module.chosen.items():
        if isinstance(rule, MaskRule) and int(module.kept_of(params, path)) == int(np.prod(weight.layout.shape)):
            raise ConfigError(
                f"compression.rules: {path} has no zeros that method mask could keep; start from a pruned model, or "
                "make the rule's path match pruned weights only."
            )


def describe_compression(trainer: Trainer) -> list[str]:
    """Return one line per compression method used in training: number of weight values, and how many are stored."""
    module = trainer.module
    if not isinstance(module, CompressedModule):
        return []
    plain = module.plain
    kept = jax.jit(lambda params: plain.kept(module.to_plain(params, plain.abstract_params)))(trainer.state.params)
    sizes: dict[str, list[int]] = {}
    for path, (rule, weight) in plain.chosen.items():
        sums = sizes.setdefault(rule.title, [0, 0])
        sums[0] += int(np.prod(weight.layout.shape))
        sums[1] += int(kept[path])
    return [
        f"{title}: {total:,} weights"
        + (f", of which {stored:,} ({stored / total:.1%}) are stored" if stored != total else "")
        for title, (total, stored) in sizes.items()
    ]
