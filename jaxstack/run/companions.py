"""The frozen models that a run compares the trained one with: which a configuration asks for, checked and read.

In the module they are companions, see `jaxstack.module_arrays.companion`.
"""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx
from jax.typing import DTypeLike

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.distill import check_vocabulary, empty_model
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from jaxstack.trainer import Trainer


def companions(config: RunConfig) -> list["StoredCompanion"]:
    """Return the frozen models that a run needs in addition to the one that it trains."""
    found = []
    teacher = config.distill.teacher
    if teacher is not None:
        found.append(StoredCompanion("teacher", "distillation", "distill.teacher", teacher, "distilling"))
    if config.reference is None:
        return found
    key, directory = config.reference
    if directory == "init_from":
        directory = None if config.trains_adapters_only else config.run.init_from
    if directory is not None:
        if config.preference.loss is not None:
            found.append(StoredCompanion("reference", "preferences", key, directory, "measuring rewards"))
        else:
            found.append(StoredCompanion("reference", "reinforcement", key, directory, "measuring the divergence"))
    return found


class StoredCompanion(NamedTuple):
    """A frozen model on disk that a loss compares the trained one with."""

    name: str
    """Its name in the module, as in `Transformer.companions`."""
    feature: str
    """Name of the feature that it belongs to, see `jaxstack.run_config.FEATURES`."""
    key: str
    """The configuration key that asks for it."""
    directory: str
    """Directory of a run or a Hugging Face checkpoint."""
    verb: str
    """Verb of the line that names its parameters, such as `distilling` in "distilling from DIR"."""

    def check(self, model: ModelConfig, tokenizer: Tokenizer) -> None:
        """Check that the companion has the vocabulary and the tokenizer of the model that is trained.

        Raises:
          ConfigError: the directory holds no model, or one with another vocabulary or tokenizer.
        """
        other = StoredModel.open(self.directory)
        check_vocabulary(model, other.model, self.directory, self.key)
        # A run has the tokenizer that it was trained with; another program's may differ in what changes no ids.
        if not other.exported and other.has_tokenizer and other.tokenizer.hash != tokenizer.hash:
            raise ConfigError(
                f"{self.key}: {self.directory} was trained with another tokenizer, so that its ids mean other texts; "
                f"train with it: data.tokenizer={{name: file, path: {other.tokenizer_folder}}}."
            )

    def attached_to(
        self, make: Callable[[nnx.Rngs], Transformer], model: ModelConfig, dtype: DTypeLike
    ) -> Callable[[nnx.Rngs], Transformer]:
        """Return a function that creates the model of `make` plus this one, whose weights are still zeros.

        Raises:
          ConfigError: the directory holds no model, or one with another vocabulary.
        """
        other = StoredModel.open(self.directory).model
        if other.vocab_size is None:  # a run's config.yaml always has it
            raise ConfigError(f"{self.key}: {self.directory} does not say how large its vocabulary is.")
        check_vocabulary(model, other, self.directory, self.key)

        def made(rngs: nnx.Rngs) -> Transformer:
            student = make(rngs)
            student.attach(self.name, empty_model(other, dtype), self.feature)
            return student

        return made

    def load(self, trainer: Trainer, report: Callable[[str], None]) -> None:
        """Read the companion's parameters into a trainer, before its state is used.

        Args:
          trainer: the trainer of a model that it is attached to.
          report: called with a line that names the companion, and with each warning.
        """
        stored = StoredModel.open(self.directory, report)
        stored.check_step()
        report(f"{self.verb} from {stored.describe()}")
        trainer.load_unsaved({self.name: stored.read(trainer.start_shapes[1][self.name])})
