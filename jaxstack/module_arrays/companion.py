"""View of a frozen companion: another model in the module, with whose predictions the loss compares the trained one's.

The teacher of a distillation and the reference model of preferences are companions. One is a submodule, which the
module names in its attribute `companions`, so that its weights are sharded and gathered like any others. It is not
trained whatever the optimizer's rules say, no checkpoint holds it, its weights are not compressed, and its parameters
are read from elsewhere by `Trainer.load_unsaved`.
"""

from collections.abc import Sequence

from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.module_arrays.view import View

_FEATURES = {"reference": "preferences"}
"""Feature that a companion of a name belongs to; others are of a distillation."""


class Companion(View):
    """View of one companion, whose parameters are constants.

    Args:
      name: the submodule's name, such as `teacher`.
    """

    only_declares = True

    def __init__(self, name: str):
        self.name = name
        self.feature = _FEATURES.get(name, "distillation")

    @classmethod
    def find(cls, module: nnx.Module) -> Sequence["Companion"]:
        return [cls(name) for name in getattr(module, "companions", ())]

    def bind(self, arrays: ModuleArrays) -> "Companion":
        """Return this view.

        Raises:
          ConfigError: the arrays are in the order of pipeline stages, of which none holds a whole second model.
        """
        if arrays.stages > 1:
            raise ConfigError(f"a model with a {self.name} does not support a pipeline; set parallel.pipeline=1.")
        return self

    def fold(self, module: nnx.Module) -> nnx.Module:
        delattr(module, self.name)
        return module

    def saves(self, path: str) -> bool:
        return not path.startswith(f"{self.name}/")
