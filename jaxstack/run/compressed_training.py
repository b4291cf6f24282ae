"""Training with weights kept compressed (quantized, pruned or factorised): checks at the start, and a summary."""

import jax
import numpy as np

from jaxstack.compressed_training.mask import MaskRule
from jaxstack.errors import ConfigError
from jaxstack.module_arrays.compression import Compression
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.trainer import Trainer


def check_masks(module: ModuleArrays, params: Dict) -> None:
    """Check that each weight that is trained with its zeros fixed (method `mask`) has at least one zero.

    Args:
      module: the module of the run.
      params: the parameters that it starts from, those of `module.used`.

    Raises:
      ConfigError: one has none.
    """
    compression = module.plain.view(Compression)
    if compression is None:
        return
    for path, (rule, weight) in compression.chosen.items():
        if isinstance(rule, MaskRule) and int(compression.kept_of(params, path)) == int(np.prod(weight.layout.shape)):
            raise ConfigError(
                f"compression.rules: {path} has no zeros that method mask could keep; start from a pruned model, or "
                "make the rule's path match pruned weights only."
            )


def describe_compression(trainer: Trainer) -> list[str]:
    """Return one line per compression method used in training: number of weight values, and how many are stored."""
    module = trainer.module
    plain = module.plain
    compression = plain.view(Compression)
    if compression is None:
        return []
    kept = jax.jit(lambda params: compression.kept(module.to_plain(params, plain.abstract_params)))(
        trainer.state.params
    )
    sizes: dict[str, list[int]] = {}
    for path, (rule, weight) in compression.chosen.items():
        sums = sizes.setdefault(rule.title, [0, 0])
        sums[0] += int(np.prod(weight.layout.shape))
        sums[1] += int(kept[path])
    return [
        f"{title}: {total:,} weights"
        + (f", of which {stored:,} ({stored / total:.1%}) are stored" if stored != total else "")
        for title, (total, stored) in sizes.items()
    ]
