"""View of a frozen companion: another model in the module, with whose predictions the loss compares the trained one's.

The teacher of a distillation and the reference model of preferences are companions. One is a submodule, which the
module names in its attribute `companions`, with the feature that it belongs to, so that its weights are sharded and
gathered like any others. It is not trained whatever the optimizer's rules say, no checkpoint holds it, its weights are
not compressed, and its parameters are read from elsewhere by `Trainer.load_unsaved`.
"""

from collections.abc import Sequence

from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.module_arrays.view import View


class Companion(View):
    """View of one companion, whose parameters are constants.

    Args:
      name: the submodule's name, such as `teacher`.
      feature: name of the feature that it belongs to, such as `distillation`, see `jaxstack.config.features`.
    """

    only_declares = True

    def __init__(self, name: str, feature: str):
        self.name = name
        self.feature = feature

    @classmethod
    def find(cls, module: nnx.Module) -> Sequence["Companion"]:
        return [cls(name, feature) for name, feature in dict(getattr(module, "companions", ())).items()]

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
