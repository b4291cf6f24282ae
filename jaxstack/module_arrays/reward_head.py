"""View of the head of a reward model, which a run adds to the language model that it starts from."""

from collections.abc import Sequence

from flax import nnx

from jaxstack.module_arrays.view import View

NAME = "reward_head"
"""Path of the head's weights, see `Transformer.add_reward_head`."""


class RewardHead(View):
    """View of the reward head: newly initialized, and trained also where the rest of the model is not."""

    only_declares = True

    @classmethod
    def find(cls, module: nnx.Module) -> Sequence["RewardHead"]:
        return [] if getattr(module, NAME, None) is None else [cls()]

    def trains(self, path: str) -> bool | None:
        return True if path == NAME else None

    def fold(self, module: nnx.Module) -> nnx.Module:
        delattr(module, NAME)
        return module

    def adds(self, path: str) -> bool:
        return path == NAME
